"""Calls in the Hermes format: none is dropped, and parsing is linear."""

import json

import pytest
from helpers.cases import read_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_lab.tool_calls import parse_tool_calls

CALL = '{"name": "execute_python_code_with_standard_io", "arguments": {"code": "print(1)", "input": ""}}'


def one(text):
    (call,) = parse_tool_calls(text)
    return call


LONG = '{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}"
MORE = [
    (LONG, "digits"),
    ("[" * 100_000, "deep"),
    *((CALL + rest, "Extra data") for rest in (CALL, "\n" + CALL, " more")),
]


@pytest.mark.parametrize(("body", "word"), [*read_cases(__file__)["malformed"], *MORE])
def test_malformed_calls_come_with_their_error(body, word):
    call = one(f"x<tool_call>{body}</tool_call>y")
    assert call.arguments is None and word in call.error and call.raw == body
    first, second = parse_tool_calls(f"<tool_call>{body}</tool_call> then <tool_call>{CALL}</tool_call>")
    assert first.error and second.error is None, "a malformed call must not swallow the next"


@pytest.mark.parametrize("body", ["", CALL, CALL[:-20], '{"name": "f", "arguments": {"code": "print(\'</tool'])
def test_unterminated_calls(body):
    assert one(f"<tool_call>{body}").error
    first, second = parse_tool_calls(f"<tool_call>{body}<tool_call>{CALL}</tool_call>")
    assert first.error and second.error is None


@pytest.mark.parametrize("code", ["print('<tool_call>')", "a = '</tool_call>' + '<tool_call>'", "'</tool_call>'"])
def test_tags_inside_a_string_of_a_malformed_call_belong_to_it(code):
    body = json.dumps({"name": "f", "arguments": {"code": code}})
    assert "no closing" in one(f"<tool_call>{body}").error, "an unterminated call"
    assert "Extra data" in one(f"<tool_call>{body}{body}</tool_call>").error, "two objects in one tag"
    first, second = parse_tool_calls(f"<tool_call>{body}<tool_call>{CALL}</tool_call>")
    assert first.raw == body and first.error and second.error is None


def test_the_name_is_kept_where_it_can_be_read():
    assert one('<tool_call>{"name": "f", "arguments": {"code": \\}}</tool_call>').name == "f"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, '"', "\\", "{", "}", "a", " "]), max_size=25))
def test_no_call_is_dropped(parts):
    text = "".join(parts)
    parsed = parse_tool_calls(text)
    for call in parsed:
        assert (call.error is None) == (call.arguments is not None)
        assert call.raw in text
    whole = text.count(f"<tool_call>{CALL}</tool_call>")
    if '"' not in parts and "\\" not in parts:
        assert sum(call.error is None for call in parsed) >= whole
        assert sum(text.startswith("<tool_call>", call.start) for call in parsed) == text.count("<tool_call>")
    assert bool(parsed) >= ("<tool_call>" in text)
    assert all(call.error for call in parsed if not text.startswith("<tool_call>", call.start))
