"""Tests of the checks of rollouts, chat template and code tools before an update."""

import asyncio
from dataclasses import replace

import pytest
from helpers.scripted_engine import ScriptedEngine

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.evaluation import summarise
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.paper import PaperRenderer, render_tool_call
from rstar_lab.rl.reward import reward
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.checks import (
    RolloutError,
    check_rollouts,
    check_template,
    check_tools,
    overlong_message,
    split_overlong,
)
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.step import rollout_metrics
from rstar_lab.rl.tools.code import CodeTool
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.sandbox import CallResult, LocalSandbox

TOKENIZER = train_tokenizer(["a text"], 300)
TURNS = (
    render_tool_call("execute_python_code_with_standard_io", {"code": "print(5)", "input": ""}),
    "</reason>\n<answer>\\boxed{5}</answer>",
)


class BrokenSandbox:
    """Reports success for every call and runs none."""

    def __init__(self, outcome: Outcome = Outcome.OK):
        self.outcome = outcome

    async def run_many(self, calls):
        return [CallResult(self.outcome, "", "", None, 0.0) for _ in calls]


@pytest.fixture
async def rollout():
    """A rollout of two turns with a tool call between them."""
    async with LocalSandbox(workers=1) as sandbox:
        tools = {"execute_python_code_with_standard_io": CodeTool(sandbox)}
        context = RolloutContext(
            Codec(TOKENIZER, tools), tools, reward, LimitsSection(max_response_tokens=2000, max_turns=4)
        )
        task = RolloutTask(Problem(problem_id="p", question="How many?", answer="5"), "t", "g", 0, 0)
        return await run_rollout(task, ScriptedEngine(TOKENIZER, lambda _, turn: TURNS[turn]), context)


async def test_rollouts_of_the_agent_loop_pass(rollout):
    assert len(rollout.turns) == 2 and not all(rollout.loss_mask)
    check_rollouts([rollout])
    check_rollouts([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {"loss_mask": [*t.loss_mask[-1:], *t.loss_mask[:-1]]},
            "loss mask of rollout t does not match its turns",
        ),
        (lambda t: {"loss_mask": [True] * len(t.loss_mask)}, "does not match its turns, first at token"),
        (lambda t: {"log_probs": t.log_probs[1:]}, "tokens, "),
        (lambda t: {"log_probs": [float("nan"), *t.log_probs[1:]]}, "not finite"),
        (lambda t: {"log_probs": [0.0] * len(t.log_probs)}, "the engines return no log-probs"),
    ],
)
async def test_broken_rollouts_are_not_trained_on(rollout, change, message):
    with pytest.raises(RolloutError, match=message):
        check_rollouts([replace(rollout, **change(rollout))])


async def test_one_rollout_without_log_probs_is_left_to_the_mismatch_check(rollout):
    check_rollouts([rollout, replace(rollout, log_probs=[0.0] * len(rollout.log_probs))])


@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("with_tools", [True, False])
def test_prompts_of_the_codec_match_the_stored_template(system, with_tools):
    tools = {"python": CodeTool(BrokenSandbox())} if with_tools else {}
    check_template(Codec(TOKENIZER, tools, PromptStyle(system=system)))


@pytest.mark.parametrize("name", ["prompt", "continuation"])
def test_another_template_in_the_rollouts_is_an_error(monkeypatch, name):
    render = getattr(PaperRenderer, name)
    monkeypatch.setattr(PaperRenderer, name, lambda *a, **k: render(*a, **k).removesuffix("<reason>"))
    with pytest.raises(RolloutError, match="stored with the model"):
        check_template(Codec(TOKENIZER, {"python": CodeTool(BrokenSandbox())}))


def test_a_model_with_another_template_is_not_compared(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages }}")
    monkeypatch.setattr(PaperRenderer, "prompt", lambda *a, **k: "another prompt")
    check_template(Codec(TOKENIZER, {}))


@pytest.mark.slow
async def test_code_tools_are_checked_with_a_program():
    async with LocalSandbox(workers=1) as sandbox:
        await check_tools(
            {"python": CodeTool(sandbox), "jupyter": CodeTool(sandbox, sessions={}), "own": object()}, seed=7
        )
    with pytest.raises(
        RolloutError, match=r"tool python: the sandbox ran 'print\(7 \* 2 \+ int\(input\(\)\)\)'.*expected 15"
    ):
        await check_tools({"python": CodeTool(BrokenSandbox())}, seed=7)


async def test_a_sandbox_that_is_not_reached_is_not_a_wrong_output():
    await asyncio.wait_for(check_tools({"python": CodeTool(BrokenSandbox(Outcome.SANDBOX_ERROR))}, seed=7), 20)


async def test_correct_answers_without_reward_are_counted(rollout):
    assert rollout.reward == 1.0
    assert rollout_metrics([rollout, rollout])["correct_unrewarded"] == 0.0
    assert rollout_metrics([rollout, replace(rollout, reward=-1.0)])["correct_unrewarded"] == 0.5


async def test_answers_that_are_compared_as_text_are_counted(rollout):
    pairs = {("7", "7"): 0.0, ("43 (or 42)", "42"): 1.0, ("7", "see figure 1 of the solution"): 1.0, (None, "7"): None}
    for (answer, truth), share in pairs.items():
        rollouts = [replace(rollout, answer=answer, truth=truth)]
        assert rollout_metrics(rollouts)["text_answers"] == share
    rollouts += [
        replace(rollout, answer=answer, truth="7") for answer in ("7 (or 8)", "(" * 50 + "5" + ")" * 50, "8", "9")
    ]
    assert rollout_metrics(rollouts)["text_answers"] == 0.5
    assert summarise(step_rows(rollouts, {}, "all")["trajectories"])["text_answers"] == 0.5


def test_problems_with_overlong_prompts_are_found_by_their_tokens():
    codec = Codec(train_tokenizer(["text and more text"], 300), {})
    problems = [Problem(problem_id=str(n), question="text " * n, answer="1") for n in (1, 50, 120, 200, 5000)]
    lengths = [len(codec.prompt_ids(problem.question)) for problem in problems]
    for limit in (lengths[1], lengths[2] - 1, lengths[3], 10**6):
        kept, overlong = split_overlong(problems, codec, limit)
        assert [p.problem_id for p in kept] == [
            p.problem_id for p, n in zip(problems, lengths, strict=True) if n <= limit
        ]
        assert len(kept) + len(overlong) == len(problems)
    assert "stages.a.problems: 1 of 5 are left out" in overlong_message("a", problems[4:], 5)


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("Traceback (most recent call last):\n  ...\nZeroDivisionError: division by zero", 1),
        ("1\nnumpy.linalg.LinAlgError: Singular matrix", 1),
        ("Error: division by zero", 1),
        ("KeyError", 1),
        ("the mean error: 0.1\nNoErrorHere\nErrors: 3", 0),
        ("42", 0),
    ],
)
async def test_calls_that_print_an_exception_and_end_ok_are_counted(rollout, response, count):
    def answered(outcome):
        return replace(rollout, calls=(ToolCallRecord(0, 0, "python", "", outcome, response, 0, 0, 0),))

    assert rollout_metrics([answered(Outcome.OK), rollout]).get("ok_with_exception", 0) == count
    assert "ok_with_exception" not in rollout_metrics([answered(Outcome.EXCEPTION)])
