"""Conversations in the released format: the pieces of SFT and the chat template equal the texts of rollouts."""

import json
import random
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rstar_lab.rl import render_prompt, render_tool_results
from rstar_lab.rl.renderers import released
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.conversations import Conversation
from rstar_lab.rl.renderers.released import CHAT_TEMPLATE, ReleasedRenderer, render_segments

RECORDED = json.loads((Path(__file__).parent / "released_conversations.json").read_text(encoding="utf-8"))
TOOLS = {"python_code_with_standard_io": released.PYTHON_TOOL, "jupyter_code": released.JUPYTER_TOOL}
END = released.END_OF_TURN


def render(messages, tools=(), *, generate=False):
    (text,), _ = render_jinja_template(
        conversations=[messages], tools=list(tools) or None, chat_template=CHAT_TEMPLATE, add_generation_prompt=generate
    )
    return text


@pytest.mark.parametrize("index", range(len(RECORDED["conversations"])))
def test_a_conversation_is_rendered_as_the_release_recorded_it(index):
    recorded = RECORDED["conversations"][index]
    tools = [TOOLS[name] for name in recorded["tools"]]
    messages = [{"role": "user", "content": recorded["question"]}]
    expected = recorded["prompt"]
    for number, turn in enumerate(recorded["turns"]):
        messages.append({"role": "assistant", "content": f"thought {number}</reason>"})
        messages += [{"role": "tool", "content": text} for text in turn["texts"]]
        expected += f"thought {number}</reason>{END}{turn['rendered']}"
    assert render(messages, tools, generate=True) == expected
    messages.append({"role": "assistant", "content": "<reason>end</reason>\n<answer>\\boxed{1}</answer>"})
    pieces = render_segments(messages, tools=tools)
    expected += f"end</reason>\n<answer>\\boxed{{1}}</answer>{END}"
    assert "".join(text for text, _ in pieces) == expected == render(messages, tools)
    assert [text for text, own in pieces if own][-1].startswith("end</reason>")
    assert not any("<tool_response>" in text for text, own in pieces if own)


def test_calls_system_prompt_and_a_second_question():
    call = {"type": "function", "function": {"name": "jupyter_code", "arguments": {"code": 'print("é")'}}}
    messages = [
        {"role": "system", "content": "Own prompt."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<reason>r</reason>", "tool_calls": [call, call]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "s</reason>"},
        {"role": "user", "content": "again"},
    ]
    written = '<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "print(\\"é\\")"}}\n</tool_call>'
    expected = (
        render_prompt("q", ["jupyter_code"], "released", system="Own prompt.")
        + f"r</reason>\n{written}\n{written}{END}"
        + render_tool_results(["a", ""], "released")
        + f"s</reason>{END}"
        + ReleasedRenderer(PromptStyle("released")).next_question("again")
    )
    assert render(messages, [released.JUPYTER_TOOL], generate=True) == expected
    pieces = render_segments([*messages, {"role": "assistant", "content": "t"}], tools=[released.JUPYTER_TOOL])
    assert "".join(text for text, _ in pieces) == f"{expected}t{END}"
    assert [own for _, own in pieces] == [False, True] * 3


def test_pieces_equal_the_template_for_random_conversations():
    rng = random.Random(0)
    for _ in range(300):
        messages = [{"role": "system", "content": "S"}] * rng.randrange(2) + [
            {"role": "user", "content": "q\n é<|im_end|>"}
        ]
        for _ in range(rng.randrange(5)):
            messages.append({"role": "assistant", "content": rng.choice(["<reason>a</reason>", "b", ""])})
            role = rng.choice(["tool", "user"])
            messages += [
                {"role": role, "content": rng.choice(["x", "", "\n y \n"])} for _ in range(rng.randrange(1, 4))
            ]
        messages.append({"role": "assistant", "content": "end"})
        tools = rng.sample(list(TOOLS.values()), rng.randrange(3))
        assert "".join(text for text, _ in render_segments(messages, tools=tools)) == render(messages, tools)


def test_control_tokens_are_neutralised_only_in_texts_of_others():
    rows = [
        {"role": "user", "content": "a<|im_end|>"},
        {"role": "assistant", "content": "<reason>b<|im_end|></reason>"},
    ]
    conversation = Conversation(conversation_id="c", source="s", messages=rows)
    (question, _), (own, _) = conversation.segments(["<|im_end|>"], released.ReleasedRenderer)
    assert "a< |im_end|>" in question and own == f"b<|im_end|></reason>{END}"
