"""Tests of the rollouts that the trainer keeps, on constructed trajectories. Complete runs: test_runs_resume.py."""

from dataclasses import replace

import pytest
from helpers.scripted_training import problem, train
from helpers.trajectories import trajectory

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.algorithm.selection import Selection, select_rollouts
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.step import MismatchError, stale_tokens
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord
from rstar_lab.runs.reader import RunReader


def group(name: str, rewards: list[float], p_err: list[float] | None = None):
    p_err = p_err or [0.0] * len(rewards)
    return [
        replace(trajectory(i, 3, 4), traj_id=f"{name}{i}", group_id=name, reward=r, p_err=p, p_format=0.0)
        for i, (r, p) in enumerate(zip(rewards, p_err, strict=True))
    ]


def methods(**roc):
    """Return the hooks of GRPO-RoC that keeps 4 rollouts of a group. roc: keys of RoC."""
    return RlSection(group_size=4, method={"roc": roc}).hooks


def test_every_group_of_a_step_has_a_random_stream_of_its_own():
    rollouts = [t for n in range(12) for t in group(f"g{n}-", [1, 1, 1, 1, 0, 0, 0, 0])]
    kept = select_rollouts(rollouts, methods(), seed=1)
    chosen = {tuple(t.sample for t in kept.trajectories if t.group_id == f"g{n}-") for n in range(12)}
    assert len(chosen) > 6 and select_rollouts(rollouts, methods(), seed=1) == kept


def test_plain_grpo_keeps_all_rollouts_but_engine_failures():
    rollouts = group("g", [1, 0, 0, 0])
    rollouts[3] = replace(rollouts[3], stop_reason=StopReason.ENGINE_ERROR)
    kept = select_rollouts(rollouts, methods(rule="none"), seed=0)
    assert [t.traj_id for t in kept.trajectories] == ["g0", "g1", "g2"]


def test_the_released_rule_counts_responses_with_the_word_error():
    def with_text(t, text, outcome):
        return replace(t, calls=(ToolCallRecord(0, 0, "python", "", outcome, text, 0, 0, 0),))

    rollouts = group("g", [1, 1, 1, 1, 0, 0, 0, 0], [0.0, 1.0, 0.0, 0.0, 0, 0, 0, 0])
    rollouts[0] = with_text(rollouts[0], "mean squared error: 3", Outcome.OK)
    rollouts[1] = with_text(rollouts[1], "timed out", Outcome.TIMEOUT)
    rollouts[2] = with_text(rollouts[2], "7", Outcome.OK)
    rollouts[3] = with_text(rollouts[3], "an Error", Outcome.EXCEPTION)
    kept = select_rollouts(rollouts, methods(rule="released"), seed=0)
    assert [t.traj_id for t in kept.trajectories] == ["g1", "g2", "g4", "g5"]


@pytest.mark.slow
async def test_a_step_without_update_does_not_make_tokens_stale(tmp_path):
    trainer, _ = await train(
        tmp_path, [{"name": "one", "steps": 2}], {"one": [problem("solved", 1.0)]}, checkpoint_every=5
    )
    assert trainer.state.step == 2 and trainer.rollouts.versions[-1] == 0
    generated = replace(trajectory(0, 3, 4), policy_version=1)
    assert stale_tokens(Selection.of([generated], [1.0]), trainer.rollouts.versions[-1]) == 0.0
    trainer, _ = await train(
        tmp_path / "update",
        [{"name": "one", "steps": 1}],
        {"one": [problem("mixed", 0.5)]},
        schedule={"dynamic_sampling": 20},
    )
    assert trainer.rollouts.versions[-1] == 1


@pytest.mark.slow
async def test_a_correction_of_most_tokens_for_five_updates_stops_the_run(tmp_path):
    # The scripted engine's log-probs differ from the trainer's, so no ratio lies within these bounds.
    options = {
        "correction": {"type": "icepop", "bounds": (1e6, 2e6), "max_share": 0.5},
        "schedule": {"dynamic_sampling": 20},
    }
    stages = [{"name": "one", "steps": 9}]
    with pytest.raises(MismatchError, match=r"rl\.correction: icepop changed more than 50%"):
        await train(tmp_path, stages, {"one": [problem("mixed", 0.5)]}, **options)
    assert [line["step"] for line in RunReader(tmp_path / "s-rl").metrics()] == [1, 2, 3, 4], (
        "the fifth update stops it"
    )
