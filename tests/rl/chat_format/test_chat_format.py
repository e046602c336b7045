"""The chat format: the template equals the functions, calls are never dropped, parsing is linear."""

import gc
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.chat_format import parser
from rstar_lab.rl.chat_format import template as chat
from rstar_lab.sandbox.call import CallResult

CALL = '{"name": "execute_python_code_with_standard_io", "arguments": {"code": "print(1)", "input": ""}}'


def template(messages, tools=(), add_generation_prompt=False):
    rendered, _ = render_jinja_template(
        [messages],
        tools=list(tools) or None,
        chat_template=chat.CHAT_TEMPLATE,
        add_generation_prompt=add_generation_prompt,
    )
    return rendered[0]


texts = st.lists(
    st.sampled_from(["a", "\n", " ", "é", "'", '"', "\\", "{", "}", "<reason>", "<|im_end|>", "<|im_start|>", "{{"])
).map("".join)
calls = st.fixed_dictionaries(
    {"name": st.just("f"), "arguments": st.one_of(st.dictionaries(texts, texts, max_size=2), st.just('{"code": "1"}'))}
)
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts | st.none()},
    optional={
        "tool_calls": st.lists(calls | calls.map(lambda call: {"type": "function", "function": call}), max_size=3)
    },
)
others = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool", "tool"]), "content": texts})


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(assistant | others, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_template_and_segments_are_the_same(messages, with_tools, generate):
    tools = (chat.CODE_TOOL, chat.JUPYTER_TOOL) if with_tools else ()
    pieces = chat.render_segments(messages, tools=tools, add_generation_prompt=generate)
    assert "".join(text for text, _ in pieces) == template(messages, tools, generate)
    own = [text for text, is_own in pieces if is_own]
    assert len(own) == sum(message["role"] == "assistant" for message in messages)
    assert all(text.endswith(chat.END_OF_TURN) for text in own)


@pytest.mark.parametrize("tools", [(), (chat.CODE_TOOL,), (chat.RELEASED_TOOL, chat.JUPYTER_TOOL)])
@pytest.mark.parametrize("system", ["", chat.SYSTEM_PROMPT])
def test_a_rollout_reads_as_the_template_renders_it(tools, system):
    """Prompt, the model's turns and the tool responses, put end to end as the agent loop does it."""
    question = "What is 2+2? <|im_end|>é"
    turns = [
        f"try</reason>\n<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
        "so</reason>\n<answer>\\boxed{4}</answer>",
    ]
    answers = ["1\n", "Traceback: <|im_start|>system"]
    rollout = chat.render_prompt(question, tools=tools, system=system) + turns[0] + chat.END_OF_TURN
    rollout += chat.render_tool_responses(answers) + turns[1] + chat.END_OF_TURN + "\n"
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "user", "content": chat.format_question(question)},
        {"role": "assistant", "content": "<reason>" + turns[0]},
    ]
    messages += [{"role": "tool", "content": answer} for answer in answers]
    messages += [{"role": "assistant", "content": turns[1]}]
    assert rollout == template(messages, tools)
    assert rollout.count("<|im_start|>user\n") == 2, "consecutive tool replies share one user turn"
    assert chat.render_prompt(question, tools=tools, system=system) == template(messages[:-4], tools, True)
    assert rollout.count("<|im_end|>") == 4 + bool(tools or system), "control tokens in outside text are defused"


def test_prompt_contains_tools_and_the_answer_instruction():
    prompt = chat.render_prompt("Q?")
    assert prompt.endswith("<|im_start|>assistant\n<reason>")
    assert json.dumps(chat.CODE_TOOL) in prompt
    assert "<answer>" in prompt.split("<|im_start|>user")[1] and "\\boxed{" in prompt.split("<|im_start|>user")[1]
    assert chat.CODE_TOOL["function"]["parameters"]["required"] == ["code", "input"]
    assert chat.render_prompt("Q?", tools=(), system="").startswith("<|im_start|>user\nQ?")


# --- parsing ---------------------------------------------------------------------------------------------------------


def one(text):
    (call,) = parser.parse_tool_calls(text)
    return call


def test_good_calls():
    text = f"reason</reason>\n<tool_call>\n{CALL}\n</tool_call> and <tool_call>{CALL}</tool_call>"
    assert [call.arguments for call in parser.parse_tool_calls(text)] == [{"code": "print(1)", "input": ""}] * 2
    assert parser.parse_tool_calls("no call") == []
    assert parser.parse_tool_calls("a lone </tool_call>") == []


def test_tags_inside_a_string_belong_to_it():
    code = "print('</tool_call><tool_call>{\\'')  # \"quoted\""
    call = one(chat.render_tool_call("f", {"code": code}))
    assert call.arguments == {"code": code} and call.error is None
    after = parser.parse_tool_calls(chat.render_tool_call("f", {"code": code}) + chat.render_tool_call("g", {}))
    assert [call.name for call in after] == ["f", "g"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("", "JSON"),
        ("not json", "JSON"),
        ('{"name": "f"}', "arguments"),
        ('{"name": "f", "arguments": "{}"}', "object"),
        ('{"name": "f", "arguments": null}', "object"),
        ('{"name": "f", "arguments": [1]}', "object"),
        ('{"arguments": {}}', "name"),
        ('{"name": 3, "arguments": {}}', "name"),
        ('{"name": "", "arguments": {}}', "name"),
        ("[1, 2]", "object"),
        ("3", "object"),
        ('{"name": "f", "arguments": {"code": "\\d"}}', "escape"),
        ('{"name": "f", "arguments": {"code": "a\nb"}}', "control"),
        ('{"name": "f", "arguments": {"code": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", "digits"),
        (CALL + CALL, "Extra data"),
        (CALL + "\n" + CALL, "Extra data"),
        (CALL + " trailing", "Extra data"),
        ("{'name': 'f', 'arguments': {}}", "JSON"),
        ("[" * 100_000, "deep"),
        ('{"name": "f", "arguments": {"code": "print(1)}}', "Unterminated"),
        ('{"name": "f", "arguments": {"code": print("</reason>")}}', "JSON"),
    ],
)
def test_malformed_calls_come_with_their_error(body, word):
    call = one(f"x<tool_call>{body}</tool_call>y")
    assert call.arguments is None and word in call.error and call.raw == body
    first, second = parser.parse_tool_calls(f"<tool_call>{body}</tool_call> then <tool_call>{CALL}</tool_call>")
    assert first.error and second.error is None, "a malformed call must not swallow the next"


@pytest.mark.parametrize("body", ["", CALL, CALL[:-20], '{"name": "f", "arguments": {"code": "print(\'</tool'])
def test_unterminated_calls(body):
    assert one(f"<tool_call>{body}").error
    first, second = parser.parse_tool_calls(f"<tool_call>{body}<tool_call>{CALL}</tool_call>")
    assert first.error and second.error is None


@pytest.mark.parametrize("code", ["print('<tool_call>')", "a = '</tool_call>' + '<tool_call>'", "'</tool_call>'"])
def test_tags_inside_a_string_of_a_malformed_call_belong_to_it(code):
    body = json.dumps({"name": "f", "arguments": {"code": code}})
    assert "no closing" in one(f"<tool_call>{body}").error, "an unterminated call"
    assert "Extra data" in one(f"<tool_call>{body}{body}</tool_call>").error, "two objects in one tag"
    first, second = parser.parse_tool_calls(f"<tool_call>{body}<tool_call>{CALL}</tool_call>")
    assert first.raw == body and first.error and second.error is None


def test_an_escaped_lone_surrogate_in_the_arguments_is_kept():
    call = one('<tool_call>{"name": "f", "arguments": {"code": "x = \'\\ud800\'"}}</tool_call>')
    assert call.error is None and call.arguments == {"code": "x = '\ud800'"}


def test_the_name_is_kept_where_it_can_be_read():
    assert one('<tool_call>{"name": "f", "arguments": {"code": \\}}</tool_call>').name == "f"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, '"', "\\", "{", "}", "a", " "]), max_size=25))
def test_no_call_is_dropped(parts):
    text = "".join(parts)
    parsed = parser.parse_tool_calls(text)
    for call in parsed:
        assert (call.error is None) == (call.arguments is not None)
        assert call.raw in text
    whole = text.count(f"<tool_call>{CALL}</tool_call>")
    if '"' not in parts and "\\" not in parts:
        assert sum(call.error is None for call in parsed) >= whole
        assert len(parsed) == text.count("<tool_call>")
    assert bool(parsed) == ("<tool_call>" in text)


PIECES = ["<tool_call>", "</tool_call>", '"', "\\", '\\"', "{", "[", ",", "1", '{"a":', '["', '",', "x" * 20, CALL]


def cost(unit: str, size: int) -> float:
    """Return the CPU time of parsing, in seconds."""
    text = unit * (size // len(unit))
    gc.disable()  # collecting the objects of earlier tests can take longer than the parser
    try:
        start = time.process_time()
        parser.parse_tool_calls(text)
        return time.process_time() - start
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_parsing_is_linear(seed):
    """Ten times the text takes about ten times as long, for units that tempt a parser to start again and again."""
    rng = random.Random(seed)
    units = [
        "<tool_call>",
        '<tool_call>"',
        '<tool_call>["',
        '<tool_call>{"a": "\\',
        '<tool_call>[",",',
        '<tool_call>{"a":[',
    ]
    units += ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(30)]
    for unit in units:
        small, large = cost(unit, 40_000), cost(unit, 400_000)
        assert large < 40 * small + 0.5, (unit, small, large)


def _is_void(text: str) -> bool:
    return parser.is_void_turn(text, parser.parse_tool_calls(text))


def test_void_turns_have_neither_a_valid_call_nor_an_answer():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert not _is_void(f"a</reason>{call}")
    assert not _is_void("b</reason><answer>\\boxed{4}</answer>")
    assert _is_void("only words")
    assert _is_void("<tool_call>{broken</tool_call>")
    assert _is_void("<answer>4</answer>")


# --- results ---------------------------------------------------------------------------------------------------------


def result(outcome, stdout="", stderr="", value=None):
    return CallResult(outcome=outcome, stdout=stdout, stderr=stderr, value=value, duration_s=1.25)


def test_results_as_the_model_sees_them():
    assert chat.render_tool_result(result(Outcome.OK, "4\n")) == "4"
    assert chat.render_tool_result(result(Outcome.OK, value="[1, 2]")) == "[1, 2]"
    assert chat.render_tool_result(result(Outcome.OK, "a\n", value="3")) == "a\n3"
    assert chat.render_tool_result(result(Outcome.OK, "4\n", stderr="a warning")) == "4"
    assert (
        chat.render_tool_result(result(Outcome.EXCEPTION, "4\n", "Traceback\nValueError: x\n"))
        == "4\nTraceback\nValueError: x"
    )
    for outcome in (Outcome.TIMEOUT, Outcome.MEMORY, Outcome.OUTPUT_LIMIT, Outcome.KILLED, Outcome.SANDBOX_ERROR):
        text = chat.render_tool_result(result(outcome, "partial"))
        assert text.startswith("partial\n") and "1.25" not in text
