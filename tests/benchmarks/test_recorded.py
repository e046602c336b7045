"""Tests of the conversion of a recorded step to scripted rollouts."""

import pytest
from helpers.run_rows import call_row

from benchmarks.simulator import ScriptedTurn
from benchmarks.workloads import recorded_rollouts
from rstar_lab.runs import RunStoreError, RunWriter


def write(tmp_path, arrays: bool):
    rollout = {"traj_id": "t0", "group_id": "g", "problem_id": "p7", "kept": True}
    trajectory = rollout | {"turns": 2, "calls": 2, "model_tokens": 7, "response_tokens": 10}
    calls = [
        call_row("t0", 0, "ok", tool="t", queue_s=0.5, run_s=1.0),
        call_row("t0", 0, "ok", tool="t", index=1, position=5),
    ]
    transcript = {"traj_id": "t0", "question": "q", "truth": "1", "messages": "[]"}
    if arrays:
        mask = [True] * 4 + [False] * 3 + [True] * 3
        transcript |= {"prompt_ids": [1, 2, 3], "response_ids": list(range(10)), "loss_mask": mask}
    with RunWriter.open(tmp_path, "r", kind="train", recipe={}, seed=0) as writer:
        writer.write_step("rl", 1, trajectories=[trajectory], calls=calls, transcripts=[transcript], metrics={})
        writer.finish("finished")
        return writer.run_dir


def test_turns_are_runs_of_model_tokens_in_the_loss_mask(tmp_path):
    (rollout,) = recorded_rollouts(write(tmp_path, arrays=True), 1)
    assert (rollout.problem, rollout.prompt, rollout.generated) == ("p7", 3, 7)
    assert rollout.turns == (ScriptedTurn(4, 1.5, 3), ScriptedTurn(3, 0.0, 0))


def test_without_token_arrays_tokens_are_split_evenly_over_turns(tmp_path):
    (rollout,) = recorded_rollouts(write(tmp_path, arrays=False), 1)
    assert rollout.turns == (ScriptedTurn(3, 1.5, 1), ScriptedTurn(3, 0.0, 1))


def test_a_missing_step_is_an_error_with_its_number(tmp_path):
    with pytest.raises(RunStoreError, match="no committed step 9"):
        recorded_rollouts(write(tmp_path, arrays=True), 9)
