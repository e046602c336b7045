"""Copies of runs whose transcripts stay on the host: what is copied, what is fetched, and what the inspector lists."""

from pathlib import Path

import pytest
from helpers.run_rows import rows
from helpers.ssh_server import forget_agents

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.common.errors import UserError
from rstar_lab.jobs.ssh import mirror
from rstar_lab.jobs.ssh.connection import ConnectionLost
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.runs import RunWriter
from rstar_lab.runs.compact import compact
from rstar_lab.runs.reader import RunReader

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_transcripts_can_stay_on_the_host(agent, tmp_path, write_run):
    far, here = Path(agent.runs), tmp_path / "here"
    write_run(far, 2)
    mirror.pull_run(agent, "run", here, False, False)
    run = RunReader(here / "run")
    assert run.read("trajectories").num_rows
    with pytest.raises(UserError, match="jobs pull JOB --transcripts"):
        run.read("transcripts")


@pytest.mark.slow
def test_the_list_of_a_copy_without_transcripts_shows_the_questions(agent, tmp_path):
    def question_of(step):
        return [row | {"question": f"How much is {step} + {number // 4}? " + "Explain. " * 40}
                for number, row in enumerate(rows(step)["transcripts"])]  # fmt: skip

    def write(runs_dir, run_id, steps):
        with RunWriter.open(runs_dir, run_id, kind="train", recipe={}, seed=0) as writer:
            for step in steps:
                trajectories = [
                    row
                    | {"problem_id": f"{run_id}-{step}-{row['problem_id']}", "traj_id": f"{run_id}/{row['traj_id']}"}
                    for row in rows(step)["trajectories"]
                ]
                transcripts = [row | {"traj_id": f"{run_id}/{row['traj_id']}"} for row in question_of(step)]
                writer.write_step("rl", step, trajectories=trajectories, calls=[], transcripts=transcripts, metrics={})

    def questions(runs_dir):
        runs = open_runs(runs_dir)
        return Source(runs).questions(runs.trajectories().drop_duplicates("problem_id").to_dict("records"))

    far, here = Path(agent.runs), tmp_path / "here"
    for steps in (range(1, 3), range(3, 5)):
        write(far, "run", steps)
        mirror.pull_run(agent, "run", here, False, False)
        expected = questions(far)
        assert len(expected) == 2 * steps[-1] and questions(here) == expected
    assert not list((here / "run").rglob("transcripts/*"))
    write(far, "own", [1])
    write(here, "own", [1])
    with pytest.warns(UserWarning, match="skipped: the transcripts of run run are still on"):
        assert questions(here) == questions(far), "beside a run with transcripts"


@pytest.mark.slow
def test_a_transcript_that_stayed_on_the_host_is_copied_when_it_is_opened(
    agent, server, tmp_path, write_run, write_steps
):
    far, here = Path(agent.runs), tmp_path / "here"
    handle = {"ssh": agent.connection.settings.model_dump(), "code": agent.code, "runs": agent.runs}
    spec = JobSpec("job", "toy", "laptop", "ssh", ["python3"], "/", str(here), {}, "now", run="run-rl", handle=handle)
    JobFolder.of(here, "job").save(spec)
    write_run(far, 3)
    mirror.pull_run(agent, "run", here, False, False, job_id="job")
    original, copy = open_runs(far), open_runs(here)
    traj_id = original.trajectories({"step": 2}).traj_id[0]
    assert copy.transcript(traj_id).equals(original.transcript(traj_id))
    assert copy.tokens(traj_id).equals(original.tokens(traj_id))
    assert [path.name for path in (here / "run" / "transcripts").rglob("*.parquet")] == ["step=000002.parquet"]
    other = original.trajectories({"step": 3}).traj_id[0]
    server.stop()
    forget_agents()
    assert copy.record(traj_id)["messages"] == original.record(traj_id)["messages"], "what was opened stays here"
    with pytest.raises(ConnectionLost, match="cluster"):
        copy.record(other)
    server.start()
    with RunWriter.open(far, "run", kind="train", recipe={}, seed=0) as writer:
        writer.cut(1)
        write_steps(writer, range(2, 4), seed=1)
    mirror.pull_run(agent, "run", here, False, False, job_id="job")
    assert [path.name for path in (here / "run" / "transcripts").rglob("*.parquet")] == ["step=000002.parquet"]
    assert copy.transcript(traj_id).equals(original.transcript(traj_id))


@pytest.mark.slow
def test_a_transcript_is_found_in_a_run_that_was_compacted_on_the_host(agent, tmp_path, write_run, monkeypatch):
    far, here = Path(agent.runs), tmp_path / "here"
    handle = {"ssh": agent.connection.settings.model_dump(), "code": agent.code, "runs": agent.runs}
    spec = JobSpec("job", "toy", "laptop", "ssh", ["python3"], "/", str(here), {}, "now", run="run-rl", handle=handle)
    JobFolder.of(here, "job").save(spec)
    write_run(far, 3)
    size = max(path.stat().st_size for path in (far / "run").rglob("transcripts/*/*"))
    monkeypatch.setattr("rstar_lab.runs.compact._MERGED_BYTES", 2 * size)
    compact(far / "run")
    assert [len(list((far / "run").rglob(f"{level}/*/*"))) for level in ("trajectories", "transcripts")] == [3, 2]
    mirror.pull_run(agent, "run", here, False, False, job_id="job")
    traj_id = open_runs(far).trajectories({"step": 2}).traj_id[0]
    assert open_runs(here).transcript(traj_id).equals(open_runs(far).transcript(traj_id))
