"""Tests of what a run says about its first step, and at its end if nothing was learnt."""

import pytest
from helpers.scripted_training import problem, train

from rstar_lab.rl.rollout.words import first_remedy, first_step_line, nothing_learnt, rollout_line
from rstar_lab.runs.reader import RunReader

STEP = {
    "rollouts": 64, "correct": 0.0, "used_tool": 0.0, "answered": 0.25, "error_rate": None, "truncated": 0.0, "kept": 0,
    "generated_tokens_per_s": 350.4, "generate_s": 25.0, "generate_gb": 3.1, "update_s": 73.0, "update_gb": 6.2,
    "weights_s": 1.0, "weights_gb": 6.0, "step_s": 100.0,
}  # fmt: skip


def test_the_first_step_says_what_the_model_can_do():
    line = first_step_line(STEP, tools=True, steps=30)
    for part in (
        "0 of 64 rollouts correct (all rewards 0: nothing to learn from)", "0 used a tool",
        "16 have an answer in the asked format", "350 tokens/s", "generate 25.0 s (3.1 GB), update 73.0 s (6.2 GB)",
        "expected end in 50 min",
    ):  # fmt: skip
        assert part in line
    some = rollout_line(STEP | {"correct": 0.5, "used_tool": 1.0, "error_rate": 0.25}, tools=True)
    assert some.startswith("32 of 64 rollouts correct, 64 used a tool (25% of the calls failed)")
    assert "tool" not in rollout_line(STEP, tools=False)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "SFT first"),
        ({"answered": 1.0}, "does not call the tool"),
        ({"answered": 1.0, "used_tool": 1.0, "error_rate": 0.9}, "most tool calls fail"),
        ({"answered": 1.0, "used_tool": 1.0, "error_rate": 0.1}, "easier problems"),
        ({"truncated": 0.9}, "rl.limits.max_response_tokens"),
        ({"correct": 1.0, "answered": 1.0}, "harder problems"),
    ],
)
def test_the_first_thing_to_try_fits_the_rollouts(changes, remedy):
    assert remedy in first_remedy(STEP | changes, tools=True)
    assert remedy in str(nothing_learnt([STEP | changes, STEP | changes], tools=True))


def test_a_run_with_one_update_has_learnt_something():
    assert nothing_learnt([STEP, STEP | {"kept": 4}], tools=True) is None


@pytest.mark.parametrize(
    ("chance", "found"), [(0.0, "all rewards are 0"), (1.0, "all rewards are positive"), (0.5, None)]
)
async def test_the_end_of_a_run_says_if_nothing_was_learnt(tmp_path, chance, found):
    problems = {"a": [problem(str(i), chance) for i in range(4)]}
    _, run_dir = await train(tmp_path, [{"name": "a", "steps": 1}], problems)
    result = RunReader(run_dir).info["result"]
    assert (found is None) == ("nothing_learnt" not in result) and (found or "") in result.get("nothing_learnt", "")
    (line,) = RunReader(run_dir).metrics()
    assert line["generated_tokens_per_s"] > 0 and line["used_tool"] == 0
