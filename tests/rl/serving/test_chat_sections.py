"""The chat view splits a turn while it streams, in every syntax of calls."""

import json
from types import SimpleNamespace

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.chat.completions import PlainChat, _PartialTurn
from rstar_lab.rl.chat.events import Kind, Sections

CODE = "print('</tool_call>')"
CALLS = {
    "hermes": f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {'code': CODE}})}\n</tool_call>",
    "function_tags": f"<function=f>\n<parameter=code>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
    "json": json.dumps({"name": "f", "parameters": {"code": CODE}}),
    "gemma4": f'<|tool_call>call:f{{code:<|"|>{CODE}<|"|>}}<tool_call|>',
    "glm": f"<tool_call>f<arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>",
}


def split(text, syntax="hermes", kind=Kind.REASON, size=1):
    sections, merged = Sections(kind, syntax), []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for event in [event for piece in pieces for event in sections.feed(piece)] + sections.end():
        if merged and merged[-1][0] == event.kind != Kind.CALL:
            merged[-1] = (event.kind, merged[-1][1] + event.text)
        else:
            merged.append((event.kind, event.text))
    return [(str(kind), text.strip()) for kind, text in merged if text.strip()]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("syntax", CALLS)
def test_a_tag_in_the_code_belongs_to_it(syntax, size):
    text = CALLS[syntax] if syntax == "json" else f"Let me see.\n{CALLS[syntax]}\nDone."
    before, after = ([], []) if syntax == "json" else ([("text", "Let me see.")], [("text", "Done.")])
    assert split(text, syntax, Kind.TEXT, size) == [*before, ("call", CODE), *after]


@pytest.mark.parametrize("size", [1, 1000])
def test_prose_that_names_a_tag_does_not_hide_the_answer(size):
    text = "plan</reason>A <tool_call> is not needed. <answer>\\boxed{4}</answer>"
    expected = [("reason", "plan"), ("text", "A <tool_call> is not needed."), ("answer", "\\boxed{4}")]
    assert split(text, size=size) == expected


def test_the_messages_of_gpt_oss_are_told_apart():
    text = "<|channel|>analysis<|message|>plan<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    text += json.dumps({"code": CODE}) + "<|call|><|start|>assistant<|channel|>final<|message|>Four."
    assert split(text, "harmony") == [("reason", "plan"), ("call", CODE), ("text", "Four.")]


def test_drafts_are_reasoning_unless_the_reasoning_never_ends():
    call = CALLS["hermes"]
    assert split(f"try {call}</reason>{call}") == [("reason", f"try {call}"), ("call", CODE)]
    assert split(f"try {call}")[-1] == ("call", CODE)


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "{}", '{"error": 5}', '{"choices": 5}', '{"choices": [{}]}', '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": []}]}}]}', '{"usage": {"a": 1}, "choices": []}',
        '{"choices": [{"delta": {"reasoning": {"a": 1}}}]}', "[" * 200_000,
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_one_error(line):
    chat = PlainChat(SimpleNamespace(url="http://server.example"), {}, None)
    with pytest.raises(UserError, match=r"http://server\.example"):
        chat._add(_PartialTurn(), Sections(Kind.TEXT), line)
