"""Traces: executed for real, imperfect in the shares asked for, encoded as a rollout sees them."""

from collections import Counter

import pytest
import pytest_asyncio
from pydantic import ValidationError

from rstar_lab import tool_calls as parser
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import MODEL_ERRORS, Outcome
from rstar_lab.rl import render_prompt, render_tool_results
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.renderers.released import ReleasedRenderer
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.synthetic.families import LEVELS, synthesize
from rstar_lab.rl.synthetic.traces import TraceMix, make_traces
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.sandbox import LocalSandbox
from rstar_lab.verify import verify

PROBLEMS = synthesize(0, 320)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traces():
    async with LocalSandbox() as sandbox:
        return await make_traces(PROBLEMS, sandbox, seed=0)


class NoSandbox:
    async def run_many(self, calls):
        raise AssertionError("nothing should be run")


def assistant_text(trace):
    return "\n".join(text.removesuffix(chat.END_OF_TURN) for text, own in trace.segments() if own)


async def test_every_kind_occurs_and_ends_as_it_should(traces):
    right = {"clean", "error_then_fix", "malformed_then_fix", "double_check"}
    counts = Counter(trace.kind for trace in traces)
    assert set(counts) == right | {"wrong_code", "guess", "error_then_guess"}
    for trace, problem in zip(traces, PROBLEMS, strict=True):
        assert trace.problem_id == problem.problem_id
        assert verify(assistant_text(trace), problem.answer) is trace.correct
        if trace.kind in right:
            assert trace.correct
    missed = [trace.correct for trace in traces if trace.kind not in right]
    assert sum(missed) / len(missed) < 0.1


async def test_errors_are_real(traces):
    outcomes = {
        "clean": (1, 0),
        "error_then_fix": (2, 1),
        "malformed_then_fix": (2, 1),
        "double_check": (2, 0),
        "wrong_code": (1, 0),
        "guess": (0, 0),
        "error_then_guess": (1, 1),
    }
    for trace in traces:
        errors = sum(Outcome(outcome) in MODEL_ERRORS for outcome in trace.outcomes)
        assert (len(trace.outcomes), errors) == outcomes[trace.kind]
    seen = Counter(outcome for trace in traces for outcome in trace.outcomes)
    assert {"ok", "exception", "syntax_error", "malformed_call"} <= set(seen)


async def test_tool_responses_are_what_a_rollout_would_get(traces):
    async with LocalSandbox() as sandbox:
        tools = make_tools(["python"], sandbox)
        for trace in traces[:60]:
            for message, result_message in zip(trace.messages, trace.messages[1:], strict=False):
                if result_message["role"] != "tool":
                    continue
                text = chat.render_segments([message])[1][0]
                (call,) = parser.parse_tool_calls(text)
                result = await execute_call(
                    call, tools, PaperRenderer(PromptStyle()), seed=1, traj_id="t", max_chars=4096
                )
                assert result.text == result_message["content"]


async def test_segments_equal_the_text_of_a_rollout(traces):
    for trace, problem in zip(traces[:60], PROBLEMS, strict=False):
        pieces = trace.segments()
        own = [i for i, (_, mine) in enumerate(pieces) if mine]
        assert "".join(text for text, _ in pieces[: own[0]]) == render_prompt(problem.question)
        results = [message["content"] for message in trace.messages if message["role"] == "tool"]
        for before, after, text in zip(own, own[1:], results, strict=False):
            assert "".join(piece for piece, _ in pieces[before + 1 : after]) == render_tool_results([text])


async def test_segments_of_the_released_format_equal_the_text_of_a_rollout():
    async with LocalSandbox() as sandbox:
        mix = TraceMix(malformed_then_fix=0.5)
        made, again = [
            await make_traces(PROBLEMS[:30], sandbox, seed=0, mix=mix, renderer=ReleasedRenderer) for _ in range(2)
        ]
    assert made == again
    texts = []
    for trace, problem in zip(made, PROBLEMS, strict=False):
        pieces = trace.segments(ReleasedRenderer)
        own = [i for i, (_, mine) in enumerate(pieces) if mine]
        assert pieces[0][0] == render_prompt(problem.question, ["python"], "released")
        results = [message["content"] for message in trace.messages if message["role"] == "tool"]
        for before, after, text in zip(own, own[1:], results, strict=False):
            assert pieces[before + 1 : after] == [(render_tool_results([text], "released"), False)]
        texts += results
        if trace.correct:
            assert verify("".join(text for text, mine in pieces if mine), problem.answer)
    starts = {text.split("\n")[0].split(":")[0] for text in texts}
    assert starts == {"Tool call success", "Tool call failure", "Failed to decode tool call"}


async def test_seed_fixes_the_traces_and_the_cache_gives_them_back(tmp_path):
    problems, done = PROBLEMS[:40], []
    async with LocalSandbox() as sandbox:
        first = await make_traces(
            problems, sandbox, seed=1, cache=tmp_path, progress=lambda n, of: done.append((n, of))
        )
        assert done[-1][0] == done[-1][1] > 0
        assert await make_traces(problems, sandbox, seed=1) == first
        assert await make_traces(problems, sandbox, seed=2, cache=tmp_path) != first
        assert await make_traces(problems, sandbox, seed=1, mix=TraceMix(guess=5), cache=tmp_path) != first
    # No sandbox is needed for what is cached; the folder holds whole files only.
    assert await make_traces(problems, NoSandbox(), seed=1, cache=tmp_path) == first
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}
    assert len(list(tmp_path.iterdir())) == 3


def test_mix_gets_harder_with_the_level():
    mix = TraceMix(hardness=0.8)
    wrong = [mix.weights(level)["wrong_code"] for level in LEVELS]
    assert wrong == sorted(wrong)
    assert wrong[-1] > 2 * wrong[0]
    totals = [sum(mix.weights(level).values()) for level in LEVELS]
    assert totals == pytest.approx([totals[0]] * len(LEVELS))


def test_mix_refuses_what_makes_no_sense():
    kinds = ("clean", "error_then_fix", "malformed_then_fix", "double_check", "wrong_code", "guess", "error_then_guess")
    with pytest.raises(ValidationError, match="weight 0"):
        TraceMix(**dict.fromkeys(kinds, 0))
    with pytest.raises(ValidationError, match="clena"):
        TraceMix(**{"clena": 0.5})


async def test_foreign_problems_have_no_traces():
    foreign = PROBLEMS[0].model_copy(update={"question": "Why?", "source": "aime"})
    with pytest.raises(UserError, match="aime"):
        await make_traces([foreign], NoSandbox(), seed=0)
