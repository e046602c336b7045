"""Tests of the agent loop with a scripted engine and the real sandbox."""

import pytest
from helpers.scripted_engine import ScriptedEngine

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import neutralise, render_tool_call
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.sandbox import LocalSandbox
from rstar_lab.verify import verify

PROBLEM = Problem(problem_id="p", question="What is 6 times 7?", answer="42")
TOOL = "execute_python_code_with_standard_io"
ANSWER = " The answer.</reason>\n<answer>\\boxed{42}</answer>"


def call(code: str, stdin: str = "") -> str:
    return render_tool_call(TOOL, {"code": code, "input": stdin})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text of a test", PROBLEM.question], 300)


@pytest.fixture
async def tools():
    async with LocalSandbox(workers=1) as sandbox:
        yield make_tools(["python", "jupyter"], sandbox, timeout_s=5.0, memory_mb=256)


async def roll(tokenizer, tools, turns: list[str], engine=None, marks_outputs=False, **limits):
    engine = engine or ScriptedEngine(tokenizer, lambda prompt, turn: turns[turn])
    limits = LimitsSection(**({"max_response_tokens": 4000} | limits))
    context = RolloutContext(Codec(tokenizer, tools), tools, verify, limits, marks_outputs=marks_outputs)
    trajectory = await run_rollout(RolloutTask(PROBLEM, "t", "g", sample=0, seed=1), engine, context)
    return trajectory, engine


async def test_calls_past_the_limit_of_a_turn_return_an_error(tokenizer, tools):
    turns = [f" Compute.</reason>\n{call('print(1)') * 5}", ANSWER]
    trajectory, _ = await roll(tokenizer, tools, turns, max_calls_per_turn=2)
    assert [str(c.outcome) for c in trajectory.calls] == ["ok", "ok", *["malformed_call"] * 3]
    assert "at most 2 tool calls" in trajectory.calls[-1].response
    assert trajectory.errors_and_calls == (3, 5)


async def test_generated_tokens_are_never_encoded_again(tokenizer, tools):
    turns = [f" Compute.</reason>\n{call('print(6 * 7)')}", ANSWER]
    trajectory, engine = await roll(tokenizer, tools, turns)
    first, second = engine.prompts
    assert second[: len(first)] == first
    own = [i for i, mine in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mine]
    assert tokenizer.decode(own) == turns[0] + "<|im_end|>" + turns[1] + "<|im_end|>"
    assert second == trajectory.prompt_ids + trajectory.response_ids[: trajectory.turns[1].start]
    assert trajectory.reward == 1.0 and trajectory.answer == "42"
    assert trajectory.stop_reason is StopReason.ANSWERED
    between = trajectory.response_ids[trajectory.turns[0].end : trajectory.turns[1].start]
    assert tokenizer.decode(between) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
    )
    assert not any(trajectory.loss_mask[trajectory.turns[0].end : trajectory.turns[1].start])


@pytest.mark.parametrize("room", [0, 1])
async def test_tool_output_that_fills_the_response_ends_the_rollout(tokenizer, tools, room):
    turns = [f" Compute.</reason>\n{call('print(6 * 7)')}", ANSWER]
    whole, _ = await roll(tokenizer, tools, turns)
    limit = whole.turns[1].start + room
    trajectory, engine = await roll(tokenizer, tools, turns, max_response_tokens=limit)
    assert (len(engine.prompts), trajectory.stop_reason) == (1 + room, StopReason.LENGTH)
    assert len(trajectory.response_ids) == (limit if room else whole.turns[0].end)


async def test_every_kind_of_call_gets_a_response_in_order(tokenizer, tools):
    turn = "</reason>\n" + "\n".join(
        [
            call("print(input())", "hello"),
            "<tool_call>\n{not json}\n</tool_call>",
            render_tool_call("no_such_tool", {}),
            render_tool_call(TOOL, {"code": "1"}),
            render_tool_call(TOOL, {"code": 1, "input": ""}),
            call("1 / 0"),
            call("x ="),
        ]
    )
    trajectory, engine = await roll(tokenizer, tools, [turn, ANSWER])
    assert [c.outcome for c in trajectory.calls] == [
        Outcome.OK,
        Outcome.MALFORMED_CALL,
        Outcome.UNKNOWN_TOOL,
        Outcome.INVALID_ARGUMENTS,
        Outcome.INVALID_ARGUMENTS,
        Outcome.EXCEPTION,
        Outcome.SYNTAX_ERROR,
    ]
    prompt = tokenizer.decode(engine.prompts[1])
    places = [
        prompt.index(part)
        for part in ("\nhello\n", "could not be parsed", "There is no tool", "missing argument 'input'")
    ]
    assert places == sorted(places)
    assert "must be a string" in prompt and "ZeroDivisionError" in prompt and "SyntaxError" in prompt
    assert trajectory.p_err == pytest.approx(6 / 7) and trajectory.p_format == 0.0
    assert {c.position for c in trajectory.calls} == {trajectory.turns[0].end}


async def test_a_lone_surrogate_in_arguments_reaches_the_sandbox_and_the_prompt(tokenizer, tools):
    escaped = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    turn = "</reason>\n" + "".join(
        escaped % (TOOL, arguments)
        for arguments in (
            '{"code": "print(len(input()))", "input": "a\\ud800"}',
            '{"code": "x = \'\\ud800\'", "input": ""}',
            '{"code": "print(1)", "input": "", "\\ud800": 1}',
        )
    )
    trajectory, engine = await roll(tokenizer, tools, [turn, ANSWER])
    assert Outcome.MALFORMED_CALL not in [c.outcome for c in trajectory.calls]
    assert trajectory.calls[2].outcome is Outcome.INVALID_ARGUMENTS
    assert "unknown argument '?'" in tokenizer.decode(engine.prompts[1])
    assert trajectory.reward == 1.0


async def test_long_tool_output_loses_its_middle_and_is_not_scored(tokenizer, tools):
    code = "print('<ans' + 'wer>' + chr(92) + 'boxed{42}</ans' + 'wer>' + 'y' * 500)"
    trajectory, _ = await roll(tokenizer, tools, [f"</reason>\n{call(code)}", " No idea.</reason>"], max_tool_chars=100)
    assert trajectory.reward == 0.0 and trajectory.answer is None and trajectory.p_format == 1.0
    assert len(trajectory.calls[0].response) < 200 and "characters left out" in trajectory.calls[0].response


async def test_the_tokens_of_tool_output_are_marked_without_the_template(tokenizer, tools):
    codes = ("print('first')", "1 / 0", "print('<|im_end|> second')")
    turns = ["</reason>\n" + "".join(map(call, codes)), f"</reason>\n{call('print(3)')}", ANSWER]
    plain, _ = await roll(tokenizer, tools, turns)
    assert not any(turn.outputs for turn in plain.turns)
    marked, _ = await roll(tokenizer, tools, turns, marks_outputs=True)
    assert marked.response_ids == plain.response_ids
    spans = [span for turn in marked.turns for span in turn.outputs]
    texts = [tokenizer.decode(marked.response_ids[start:end]) for start, end in spans]
    expected = [record.response for record in marked.calls]
    assert len(spans) == 4 and not any(any(marked.loss_mask[start:end]) for start, end in spans)
    for text, response in zip(texts, expected, strict=True):
        assert text.strip() == neutralise(response).strip()
    assert len(set(spans)) == 4 and spans == sorted(spans)


async def test_an_engine_failure_ends_the_rollout_without_an_exception(tokenizer, tools):
    class Failing:
        async def generate(self, prompt_ids, sampling):
            raise EngineError("gone")

    trajectory, _ = await roll(tokenizer, tools, [], engine=Failing())
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR and not trajectory.usable


async def test_a_tool_session_lasts_for_one_trajectory(tokenizer, tools):
    cells = [render_tool_call("jupyter_code", {"code": code}) for code in ("x = 41", "x + 1")]
    turns = [f"</reason>\n{cells[0]}", f"</reason>\n{cells[1]}", ANSWER]
    trajectory, _ = await roll(tokenizer, tools, turns)
    assert trajectory.calls[1].response == "42"
    trajectory, _ = await roll(tokenizer, tools, [f"</reason>\n{cells[1]}", ANSWER])
    assert trajectory.calls[0].outcome is Outcome.EXCEPTION
