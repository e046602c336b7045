"""Rewards computed again from stored transcripts: the same reward changes nothing, another one is applied to every row."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar_lab.analysis import import_messages
from rstar_lab.common.errors import UserError
from rstar_lab.rl.rescore import rescore
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import TRAJECTORIES
from rstar_lab.runs.writer import RunWriter

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
SOURCE = "def always(text, answer):\n    return 0.5\n\ndef long(text, answer):\n    return float(len(text) > 100)\n"


@pytest.fixture
def run(tmp_path):
    """A copy of a golden evaluation."""
    name = "tiny_fast-eval-rl"
    shutil.copytree(GOLDEN / name, tmp_path / "runs" / name)
    return tmp_path / "runs" / name


def test_the_reward_of_the_run_changes_no_trajectory(run):
    found = rescore(run, dry_run=True)
    assert found.changes == [] and found.trajectories == RunReader(run).read("trajectories").num_rows
    assert found.correct == found.correct_before > 0
    assert not list(run.parent.glob("*rescored*")), "a dry run writes nothing"


def test_another_reward_gives_a_new_run_with_the_same_transcripts(run, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    before = RunReader(run).read("trajectories").to_pylist()
    found = rescore(run, reward="my_rewards:always")
    new = RunReader(found.run)
    assert set(new.read("trajectories")["reward"].to_pylist()) == {0.5}
    assert len(found.changes) == len(before)
    assert new.read("transcripts")["messages"].to_pylist() == RunReader(run).read("transcripts")["messages"].to_pylist()
    assert new.info["parent"]["run"] == RunReader(run).run_id
    assert RunReader(run).read("trajectories").to_pylist() == before, "the old run stays"
    assert rescore(run, reward="my_rewards:always").run == found.run, "the same command writes the same run"


def test_unknown_answer_format_is_an_error(run):
    with pytest.raises(UserError, match="choose from tagged"):
        rescore(run, answer="anywhere")


def test_rewards_of_environments_are_not_replaced(tmp_path):
    empty = {field.name: None for field in TRAJECTORIES}
    rows = [
        empty | {"traj_id": f"t{n}", "step": 1, "reward": 1.0, "environment": name}
        for n, name in enumerate([None, "quiz", "game", "quiz"])
    ]
    with RunWriter.open(tmp_path, "mixed", kind="rl", recipe={}, seed=0) as writer:
        writer.write_step("one", 1, trajectories=rows, calls=[], transcripts=[], metrics={})
    with pytest.raises(UserError, match=r"3 of 4 trajectories .* environments game, quiz, .* with `verify`"):
        rescore(tmp_path / "mixed")


@pytest.mark.slow
def test_command_line_lists_the_changes(run, tmp_path):
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    command = [sys.executable, "-m", "rstar_lab.cli", "rescore", run.name]
    command += ["--reward", "my_rewards:long", "--dry-run", "--json"]
    done = subprocess.run(
        [*command, "--runs-dir", str(run.parent)], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )  # fmt: skip
    *changes, last = map(json.loads, done.stdout.splitlines())
    assert last["run"] is None and last["changes"] == len(changes) > 0
    assert {"traj_id", "reward_before", "reward", "answer"} <= changes[0].keys()


def test_undecided_rollouts_are_decided(run):
    file = next((run / "trajectories").rglob("*.parquet"))
    table = pq.read_table(file)
    rows = table.to_pylist()
    right = next(row for row in rows if row["reward"] > 0)
    right |= {"reward": 0.0, "stop_reason": "undecided"}
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    found = rescore(run)
    assert found.correct == found.correct_before + 1 and [change.traj_id for change in found.changes] == [
        right["traj_id"]
    ]
    assert found.result is not None and "undecided" not in found.result and found.result["n"] == len(rows)


def test_imported_rollouts_without_a_reward_are_scored(tmp_path):
    rows = [
        {
            "id": number,
            "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": text}],
            "truth": "2",
        }
        for number, text in enumerate(("<answer>\\boxed{2}</answer>", "<answer>\\boxed{3}</answer>"))
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    run = import_messages(file, tmp_path / "runs")
    found = rescore(run, dry_run=True)
    assert [(change.reward_before, change.reward) for change in found.changes] == [(None, 1.0), (None, 0.0)]
    assert (found.correct_before, found.correct) == (0, 1)
    for row in rows:
        del row["truth"]
    file.write_text("\n".join(map(json.dumps, rows)))
    run = import_messages(file, tmp_path / "runs", run_id="no_truth")
    with pytest.raises(UserError, match="2 of 2 trajectories have no correct answer"):
        rescore(run, dry_run=True)
