"""A tiny model that was trained on one conversation: asked QUESTION, it calls the tool and answers with its output."""

from pathlib import Path

from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.renderers.paper import (
    CODE_TOOL,
    SYSTEM_PROMPT,
    format_question,
    render_segments,
    render_tool_call,
)

QUESTION, ANSWER = "What is six times seven?", "42"
CODE = "print(6 * 7)"
CALL = render_tool_call(CODE_TOOL["function"]["name"], {"code": CODE, "input": ""})
MESSAGES = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": format_question(QUESTION)},
    {"role": "assistant", "content": f"I compute it.</reason>\n{CALL}"},
    {"role": "tool", "content": ANSWER},
    {"role": "assistant", "content": f"It says {ANSWER}.</reason>\n<answer>\\boxed{{{ANSWER}}}</answer>"},
]


def make_memorized_model(folder: Path, messages=MESSAGES, tools=(CODE_TOOL,), max_length=512, target=1e-3):
    """Train the model on a conversation, save it to `folder` and return it. tools: schemas. target: loss at which the
    training ends. Takes some seconds."""
    import torch

    from rstar_lab.rl.models.model import build_tiny, save_model

    pieces = render_segments(messages, tools=list(tools))
    tokenizer = train_tokenizer([text for text, _ in pieces] * 3, 340)
    model = build_tiny(
        tokenizer, seed=0, hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128, max_length=max_length
    )
    encoded = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in pieces]
    ids = torch.tensor([[token for tokens, _ in encoded for token in tokens]])
    labels = torch.tensor([[token if own else -100 for tokens, own in encoded for token in tokens]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(int(0.3 / target)):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < target:
            break
    assert loss < 0.01, f"the model did not learn the conversation: {loss}"
    save_model(folder, model, tokenizer)
    return model.eval()
