"""The chat view splits a turn while it streams, in every syntax of calls."""

import json

import pytest

from rstar_lab.rl.chat.events import Event, Kind, TurnSplitter
from rstar_lab.tool_calls import parse_tool_calls

CODE = "print('</tool_call>')"
CALLS = {
    "hermes": f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': {'code': CODE}})}\n</tool_call>",
    "function_tags": f"<function=f>\n<parameter=code>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
    "json": json.dumps({"name": "f", "parameters": {"code": CODE}}),
    "gemma4": f'<|tool_call>call:f{{code:<|"|>{CODE}<|"|>}}<tool_call|>',
    "glm": f"<tool_call>f<arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>",
}


def split(text, syntax="hermes", kind=Kind.REASON, size=1):
    splitter, merged = TurnSplitter(kind, syntax), []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for event in [event for piece in pieces for event in splitter.feed(piece)] + splitter.end(
        parse_tool_calls(text, syntax=syntax)
    ):
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


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_turn_is_split_at_its_tags_for_any_chunk_size(size):
    text = (
        f"a < b</reason>so{CALLS['hermes']}<tool_call>{{not json</tool_call>"
        "<reason>more</reason> <answer>\\boxed{1<2}</answer> <toolbox> </answer"
    )
    assert split(text, size=size) == [
        ("reason", "a < b"), ("text", "so"), ("call", CODE), ("call", "{not json"), ("reason", "more"),
        ("answer", "\\boxed{1<2}"), ("text", "<toolbox> </answer"),
    ]  # fmt: skip


def test_the_text_of_a_call_is_kept_until_the_turn_ends():
    splitter, text = TurnSplitter(), '<tool_call>{"name": "f'
    assert splitter.feed("</reason>" + text) == []
    assert splitter.end(parse_tool_calls("</reason>" + text)) == [Event(Kind.CALL, '{"name": "f', "")]
