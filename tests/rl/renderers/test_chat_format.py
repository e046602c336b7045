"""The chat format: the template equals the functions, calls are never dropped, parsing is linear."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.base import is_void_turn
from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results
from rstar_lab.sandbox.call import CallResult
from rstar_lab.tool_calls import parse_tool_calls

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
    own = [text for text, is_user_function in pieces if is_user_function]
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
    rollout = render_prompt(question, tools=tools, system=system) + turns[0] + chat.END_OF_TURN
    rollout += render_tool_results(answers) + turns[1] + chat.END_OF_TURN + "\n"
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "user", "content": chat.format_question(question)},
        {"role": "assistant", "content": "<reason>" + turns[0]},
    ]
    messages += [{"role": "tool", "content": answer} for answer in answers]
    messages += [{"role": "assistant", "content": turns[1]}]
    assert rollout == template(messages, tools)
    assert rollout.count("<|im_start|>user\n") == 2, "consecutive tool replies share one user turn"
    assert render_prompt(question, tools=tools, system=system) == template(messages[:-4], tools, True)
    assert rollout.count("<|im_end|>") == 4 + bool(tools or system), "control tokens in outside text are defused"


def test_prompt_contains_tools_and_the_answer_instruction():
    prompt = render_prompt("Q?")
    assert prompt.endswith("<|im_start|>assistant\n<reason>")
    assert json.dumps(chat.CODE_TOOL) in prompt
    assert "<answer>" in prompt.split("<|im_start|>user")[1] and "\\boxed{" in prompt.split("<|im_start|>user")[1]
    assert chat.CODE_TOOL["function"]["parameters"]["required"] == ["code", "input"]
    assert render_prompt("Q?", tools=(), system="").startswith("<|im_start|>user\nQ?")


def _is_void(text: str) -> bool:
    return is_void_turn(text, parse_tool_calls(text))


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


@given(st.text("ab", max_size=30), st.integers(1, 20))
def test_only_a_response_above_the_limit_is_cut_and_says_by_how_much(text, limit):
    start, mark, end = chat.PaperRenderer.truncate(text, limit, "middle").partition("\n[")
    omitted, _, end = end.partition(" characters left out]\n")
    assert bool(mark) == (len(text) > limit) and text.startswith(start) and text.endswith(end)
    assert len(start) + int(omitted or 0) + len(end) == len(text)


def test_results_as_the_model_sees_them():
    assert chat.PaperRenderer.result_text(result(Outcome.OK, "4\n")) == "4"
    assert chat.PaperRenderer.result_text(result(Outcome.OK, value="[1, 2]")) == "[1, 2]"
    assert chat.PaperRenderer.result_text(result(Outcome.OK, "a\n", value="3")) == "a\n3"
    assert chat.PaperRenderer.result_text(result(Outcome.OK, "4\n", stderr="a warning")) == "4"
    assert (
        chat.PaperRenderer.result_text(result(Outcome.EXCEPTION, "4\n", "Traceback\nValueError: x\n"))
        == "4\nTraceback\nValueError: x"
    )
    for outcome in (Outcome.TIMEOUT, Outcome.MEMORY, Outcome.OUTPUT_LIMIT, Outcome.KILLED, Outcome.SANDBOX_ERROR):
        text = chat.PaperRenderer.result_text(result(outcome, "partial"))
        assert text.startswith("partial\n") and "1.25" not in text
