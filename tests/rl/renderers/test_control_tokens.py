"""User text and tool output never become control tokens, and ordinary text keeps its tokens."""

import random

import pytest
from tokenizers import AddedToken

from rstar_lab.rl.models.model import build_tiny, export_chat_template, load_tokenizer, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.rl.renderers.paper import CONTROL_TOKENS, control_tokens, neutralise, render_tool_call
from rstar_lab.rl.rollout.codec import Codec

ADDED = ["<think>", "<|vision_start|>", "</tool_response>", "[INST]"]


@pytest.fixture(scope="module")
def tokenizer():
    """Like that of Qwen3: tags and vision tokens are single tokens, and so is a run of blanks, which is ordinary text."""
    made = train_tokenizer([render_prompt("What is 1 < 2?")], 600)
    made.add_tokens([AddedToken(text, normalized=False, special=text.startswith("<|")) for text in ADDED])
    made.add_tokens([AddedToken("    ", normalized=False)])
    return made


def test_control_tokens_are_found_in_the_tokenizer(tokenizer):
    found = control_tokens(tokenizer)
    assert set(found) == {*CONTROL_TOKENS, *ADDED}


def test_text_from_outside_contains_no_control_token(tokenizer):
    codec = Codec(tokenizer, {})
    control = {tokenizer.convert_tokens_to_ids(token) for token in ADDED} - {
        tokenizer.convert_tokens_to_ids("</tool_response>")
    }
    closing = tokenizer.convert_tokens_to_ids("</tool_response>")
    hostile = "".join(control_tokens(tokenizer))
    response = codec.tool_response_ids([hostile])
    assert not control & set(response) and response.count(closing) == 1
    assert response.count(codec.end_id) == 1
    prompt = codec.prompt_ids(hostile)
    assert not (control | {closing}) & set(prompt)


def test_ordinary_text_keeps_its_tokens(tokenizer):
    text = "if a[0] < b[1] > c:\n    print(<b>)\n</answer> 3 <= 4 |im_end|> _tool_call_"
    assert neutralise(text, control_tokens(tokenizer)) == text


def test_exported_template_renders_what_training_used(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ messages }}"
    save_model(tmp_path, build_tiny(tokenizer, seed=0, hidden_size=64, layers=1, heads=2, kv_heads=1), tokenizer)
    question = "Say <|vision_start|> and <think>."
    expected = render_prompt(question, tools=(), system="", control_tokens=control_tokens(tokenizer))
    for _ in range(2):
        saved = load_tokenizer(tmp_path)
        content = expected.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
        messages = [{"role": "user", "content": content.replace("< ", "<")}]
        assert saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
        export_chat_template(tmp_path)


def test_misplaced_control_tokens_of_a_turn(tokenizer):
    """Turns are put together from pieces of which it is known whether they contain a misplaced control token."""
    codec = Codec(tokenizer, {})
    call = render_tool_call("f", {"code": "print('<|im_start|>', '</tool_call>')"})
    in_place = [
        "words",
        " a < b ",
        "</reason>\n",
        call,
        "<tool_call>no JSON</tool_call>",
        "<answer>\\boxed{1}</answer>",
    ]
    misplaced = [
        "<|im_start|>", "<tool_response>", "</tool_response>", "<think>", "</tool_call>", f"<tool_call>{call}",
        "<tool_call>no JSON <|im_start|></tool_call>",
    ]  # fmt: skip
    rng = random.Random(0)
    for _ in range(300):
        pieces = rng.choices(in_place, k=rng.randint(0, 5))
        if stray := rng.random() < 0.5:
            pieces.insert(rng.randint(0, len(pieces)), rng.choice(misplaced))
        if rng.random() < 0.3:
            pieces.append("<tool_call>" + rng.choice(["", call[11:30]]))  # cut off or malformed, but not misplaced
        text = "".join(pieces)
        assert codec.has_misplaced_control_token(text) == stray, text
