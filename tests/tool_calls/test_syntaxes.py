"""Calls in every syntax: parsed or reported, never lost, and never run from the reasoning."""

import json

import pytest
from helpers.cases import read_cases

from rstar_lab.common.errors import UserError
from rstar_lab.tool_calls import SYNTAXES, parse_stored_calls, parse_tool_calls, text_outside_calls

CASES = read_cases(__file__)
ERROR = "error"
TOOL = CASES["tool"]


def hermes(code, name="f"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


def tags(name="f", **arguments):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def llama(code, name="f"):
    return json.dumps({"name": name, "parameters": {"code": code}})


WRITERS = {
    "hermes": hermes,
    "function_tags": lambda code, name="f": tags(name, code=code),
    "json": llama,
    "gemma4": lambda code, name="f": f'<|tool_call>call:{name}{{code:<|"|>{code}<|"|>}}<tool_call|>',
    "glm": lambda code, name="f": f"<tool_call>{name}<arg_key>code</arg_key><arg_value>{code}</arg_value></tool_call>",
    "harmony": lambda code, name="f": (
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
        f"{json.dumps({'code': code})}<|call|>"
    ),
}
PLANS = {
    "gemma4": ["", "<|channel>thought\nplan\n<channel|>", "plan\n<channel|>"],
    "harmony": ["", "<|channel|>analysis<|message|>plan<|end|>"],
}
PLAIN_PLANS = ["", "plan</think>\n\n", "<think>\nplan\n</think>\n\n", "plan</reason>\n"]
ENDS = {"gemma4": ["<channel|>"], "harmony": []}


def read(text, syntax, tools=(TOOL,)):
    calls = parse_tool_calls(text, syntax=syntax, tools=tools)
    assert all((call.error is None) == (call.arguments is not None) for call in calls)
    return [ERROR if call.error else (call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("code", CASES["programs"])
@pytest.mark.parametrize(
    ("syntax", "before"), [(syntax, plan) for syntax in SYNTAXES for plan in PLANS.get(syntax, PLAIN_PLANS)]
)
def test_a_program_keeps_its_call(syntax, code, before):
    assert read(before + WRITERS[syntax](code), syntax) == [("f", {"code": code})]
    if syntax != "json":
        twice = f"{before}{WRITERS[syntax](code)}\n{WRITERS[syntax]('2', 'g')}"
        assert read(twice, syntax) == [("f", {"code": code}), ("g", {"code": "2"})]


@pytest.mark.parametrize(
    ("syntax", "end"), [(syntax, end) for syntax in SYNTAXES for end in ENDS.get(syntax, ["</think>", "</reason>"])]
)
def test_drafts_in_the_reasoning_are_left_out(syntax, end):
    draft, real = WRITERS[syntax]("1"), WRITERS[syntax]("2")
    assert read(f"{draft} no, better:{end}\n{real}", syntax) == [("f", {"code": "2"})]
    assert read(f"{draft[:-8]} unfinished{end}\n{real}", syntax) == [("f", {"code": "2"})]
    assert read(f"{draft}{end}\nDone.", syntax) == []
    code = WRITERS[syntax](f"print('{end}')")
    assert read(f"{code} no{end}{real}", syntax) == [("f", {"code": "2"})]


def test_reasoning_between_calls_makes_no_drafts_of_the_first():
    text = f"{hermes('1')}<think>and <tool_call>now</think>{hermes('2')}"
    assert read(text, "hermes") == [("f", {"code": "1"}), ("f", {"code": "2"})]


@pytest.mark.parametrize("syntax", ["hermes", "function_tags", "glm", "gemma4"])
def test_a_call_ends_reasoning_that_has_no_end(syntax):
    assert read(f"I need the tool.\n{WRITERS[syntax]('1')}", syntax) == [("f", {"code": "1"})]
    assert read(f"<think>I need the tool.\n{WRITERS[syntax]('1')}", syntax) == [("f", {"code": "1"})]


@pytest.mark.parametrize("syntax", ["hermes", "function_tags"])
@pytest.mark.parametrize("end", ["</reason>\n<answer>\\boxed{42}</answer>", ". So \\boxed{42}", "<answer>42</answer>"])
def test_prose_that_names_a_tag_before_the_answer_is_no_call(syntax, end):
    assert read(f"I could use a <tool_call> here, no need{end}", syntax) == []
    assert read(f"The tags are <tool_call>...</tool_call>, no need{end}", syntax) == []
    assert read(f"The tags are `<tool_call><function=...>`, no need{end}", syntax) == []


def test_prose_that_names_a_tag_without_an_answer_is_reported():
    assert read("I could use a <tool_call> here", "hermes") == [ERROR]
    assert read('<tool_call>{"name": "f", "arg</tool_call> so \\boxed{42}', "hermes") == [ERROR]


X = ("f", {"code": "x"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let me see.\n\n<function=f>\n<parameter=code>\nx\n</parameter>\n</function>\n</tool_call>", [X]),
        ("<function=f>\n<parameter=code>\nx\n</parameter>\n</function>", [X]),
        ("<function=f>\n<parameter=code>\nx\n</parameter>\n</function>\n</tool_call>\n" + tags(code="x"), [X, X]),
        ("Write <function=f> in a line of its own", []),
        ("I run <function=f>\n<parameter=code>\nx\n</parameter>\n</function>\n</tool_call>", [X]),
        ("The tags are <function=f><parameter=code>, as I said.", []),
        ("<tool_call><function=f><parameter=code>x</parameter></function></tool_call>after", [X]),
        (tags(code="x").replace("</tool_call>", "<function=f>\n</function>\n</tool_call>"), [X, ("f", {})]),
        (tags(city="Dallas", n=5).replace("Dallas\n</parameter>", "Dallas"), [("f", {"city": "Dallas", "n": 5})]),
        (tags(code="x", n=5).replace("x\n</parameter>", "x"), [ERROR]),
        (tags(code="x").replace("</parameter>\n", ""), [X]),
        (tags(code="x").replace("</parameter>\n", "") + tags(code="x"), [X, X]),
        (tags(code="x").replace("\n</parameter>\n</function>\n</tool_call>", "\n") + tags(code="x"), [ERROR, X]),
        (tags(code="x").removesuffix("</tool_call>"), [ERROR]),
        (tags(code="x").replace("</function>\n", ""), [ERROR]),
        (tags(code='print("</function></tool_call>")'), [("f", {"code": 'print("</function></tool_call>")'})]),
        (tags(code='print("</parameter>")'), [("f", {"code": 'print("</parameter>")'})]),
        (tags(code=f"s = '''\n{tags(code='y')}\n'''"), [("f", {"code": f"s = '''\n{tags(code='y')}\n'''"})]),
        (tags(code="s = '''<tool_call>\n<function=f>\n'''"), [("f", {"code": "s = '''<tool_call>\n<function=f>\n'''"})]),
        ("<tool_call>{}</tool_call>", [ERROR]),
        ("<tool_call>\n<function=f>\n<parameter=code>\nx", [ERROR]),
        ("<tool_call>" * 3, [ERROR] * 3),
        (tags(flag="True", xs="['a', None]", label="null", size="None"),
         [("f", {"flag": True, "xs": ["a", None], "label": None, "size": None})]),
        (tags(flag="false", xs='["a"]', n="7", label="true"), [("f", {"flag": False, "xs": ["a"], "n": 7, "label": "true"})]),
        (tags(flag="perhaps", xs="(1, 2)", n="NaN"), [("f", {"flag": "perhaps", "xs": "(1, 2)", "n": "NaN"})]),
        (tags(code="5", city="None"), [("f", {"code": "5", "city": "None"})]),
        (tags(n="07", size="+5"), [("f", {"n": 7, "size": 5})]),
        (tags(n="0x7", size="1_0"), [("f", {"n": "0x7", "size": "1_0"})]),
    ],
)  # fmt: skip
def test_calls_in_function_tags(text, expected):
    assert read(text, "function_tags") == expected


def test_types_without_a_schema():
    text = tags(code="5", xs="[1, 2]", flag="True", word="hello", o='{"a": {"b": 1}}')
    expected = [("f", {"code": "5", "xs": [1, 2], "flag": True, "word": "hello", "o": {"a": {"b": 1}}})]
    assert read(text, "function_tags", None) == read(text, "function_tags", []) == expected


def test_tools_are_function_schemas_or_a_mapping():
    text = tags(n="5", label="5")
    inner = TOOL["function"]
    for tools in ([TOOL], [inner], {"f": TOOL}, {"f": inner}, {"f": inner["parameters"]}):
        assert read(text, "function_tags", tools) == [("f", {"n": 5, "label": "5"})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (llama("x") + "\n\nThat runs x.", [X]),
        (llama("x") + "; " + llama("x"), [X, X]),
        (llama("x") + "\nThen:\n" + llama("x"), [X, X]),
        (llama("x") + "\n" + llama("x").replace("parameters", "value"), [X]),
        ("<|python_tag|>" + llama("x") + "<|python_tag|>" + llama("x"), [X, X]),
        ("Let me check. <|python_tag|>" + llama("x"), [X]),
        ("Sure: " + llama("x"), []),
        ('{"name": "answer", "value": "\\\\boxed{42}"}', []),
        ('{"name": "answer", "value": "\\boxed{\\sqrt2}"}', []),
        ('{"type": "circle", "radius": 5}', []),
        ('{"name": "f", "parameters": {"code": "x"', [ERROR]),
        ('{"name": "f", "par', [ERROR]),
        ('{"name": "f", "parameters": 3}', [ERROR]),
        ("<|python_tag|>print(1)", [ERROR]),
        ("<|python_tag|>{}", [ERROR]),
    ],
)
def test_calls_as_json_objects(text, expected):
    assert read(text, "json") == expected


@pytest.mark.parametrize("syntax", [syntax for syntax in SYNTAXES if syntax != "harmony"])
def test_spans_cover_the_calls(syntax):
    text = f"plan</think>\n{WRITERS[syntax]('1')}\n"
    (call,) = parse_tool_calls(text, syntax=syntax)
    assert text[call.start : call.end].strip() == WRITERS[syntax]("1")
    assert text_outside_calls(text, syntax).split() == ["plan</think>"]


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES["further families"])
def test_calls_of_further_families(syntax, text, expected):
    assert read(text, syntax) == [one if one == ERROR else tuple(one) for one in expected]
    assert read("<|tool_call>call:f" + "{a:" * 5000, "gemma4") == [ERROR]


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_the_syntax_of_a_stored_turn_is_found(syntax):
    text = PLANS.get(syntax, PLAIN_PLANS)[1] + WRITERS[syntax]("<function=g> <tool_call>")
    assert [(call.name, call.arguments) for call in parse_stored_calls(text)] == [
        ("f", {"code": "<function=g> <tool_call>"})
    ]
    assert parse_stored_calls("no call") == []


@pytest.mark.parametrize("tag", ["</think>", "</reason>"])
@pytest.mark.parametrize("syntax", ["hermes", "function_tags", "json", "glm"])
def test_a_cut_call_is_reported_though_its_program_names_the_tag(syntax, tag):
    text = WRITERS[syntax](f"x = '{tag}'\ny = {'1' * 40}")
    cut = text[: text.index("1" * 20)]
    (call,) = parse_tool_calls(cut, syntax=syntax, tools=[TOOL])
    assert call.error


def test_a_draft_without_an_end_in_the_reasoning_is_no_call():
    text = "I could write <tool_call> {but no.</think>The answer is \\boxed{1}"
    assert parse_tool_calls(text) == []


def test_a_hermes_call_without_its_opening_tag_is_reported():
    text = 'Let me compute.\n{"name": "f", "arguments": {"code": "1"}}\n</tool_call>\n' + hermes("2")
    first, second = parse_tool_calls(text)
    assert (first.name, first.error) == ("f", "The tool call has no opening <tool_call>.") and second.error is None
    assert parse_tool_calls('The tag </tool_call> ends {"name": "f", "arguments": {}} a call.') == []


def test_a_parameter_that_is_given_twice_is_reported():
    text = "<tool_call>\n<function=f>\n<parameter=code>\n1\n</parameter>\n<parameter=code>\n2\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_tool_calls(text, syntax="function_tags", tools=[TOOL])
    assert call.error == "The tool call has the parameter code twice."


def test_harmony_calls_may_follow_each_other_without_a_start_mark():
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"code": "%d"}<|call|>'
    calls = parse_tool_calls(call % 1 + "\n" + call % 2, syntax="harmony")
    assert [one.arguments for one in calls] == [{"code": "1"}, {"code": "2"}]


def test_an_unknown_syntax_is_an_error():
    with pytest.raises(
        UserError, match=r"xml.* is not supported; choose from hermes, function_tags, json, gemma4, glm, harmony"
    ):
        parse_tool_calls("", syntax="xml")


@pytest.mark.slow
@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("unit", [*CASES["hostile"], hermes("</think>"), "[" * 50 + "("])
@pytest.mark.timeout(20)  # a quadratic parser takes minutes
def test_hostile_text_takes_linear_time(syntax, unit):
    parse_tool_calls(unit * (400_000 // len(unit)), syntax=syntax)
    text_outside_calls(unit * (400_000 // len(unit)), syntax=syntax)
