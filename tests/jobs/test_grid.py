"""A grid of an ablation as jobs: detached, limited, resumed, with its failures grouped."""

import time

import pytest
from helpers.jobs import job_spec

from rstar_lab.common.errors import UserError
from rstar_lab.jobs import JobStatus, list_jobs
from rstar_lab.jobs.grid import Grid, GridPlan, run_grid, submit_grid
from rstar_lab.jobs.store import JobFolder
from rstar_lab.runs.reader import RunReader

SMALL = {
    "sft.problems.synthetic.count": 60, "processes": 1, "stages.0.steps": 1, "rl.problems_per_step": 2, "rl.group_size": 2,
}  # fmt: skip


def controller(runs):
    return next(job for job in list_jobs(runs) if job.spec.run == "small-grid")


@pytest.mark.soak
def test_a_grid_outlives_its_caller_and_runs_each_arm_once(tmp_path):
    arms = {"plain": {}, "no RoC": {"rl.method.roc.oversample": 1}}
    grid = submit_grid("tiny_fast", arms, [0], runs_dir=tmp_path, overrides=SMALL, name="small", concurrency=2)
    with pytest.raises(UserError, match="already running"):
        submit_grid("tiny_fast", arms, [0], runs_dir=tmp_path, overrides=SMALL, name="small")
    assert controller(tmp_path).wait(timeout_s=300) == JobStatus.FINISHED, controller(tmp_path).logs()
    assert set(grid.status().values()) == {"finished"} and len(grid.status()) == 3
    labels = {RunReader(tmp_path / f"small-{arm}-s0-rl").info["recipe"].get("label") for arm in ("plain", "no-roc")}
    assert labels == {"plain", "no RoC"}
    jobs = len(list_jobs(tmp_path))
    assert run_grid("tiny_fast", arms, [0], runs_dir=tmp_path, overrides=SMALL, name="small") == [
        "small-plain-s0-rl", "small-no-roc-s0-rl",
    ]  # fmt: skip
    assert len(list_jobs(tmp_path)) == jobs, "finished runs are not run again"


def ended_job(runs, number, log):
    folder = JobFolder.of(runs, f"job-{number}")
    folder.save(
        job_spec(runs, f"job-{number}", recipe="tiny", grid="g", created=f"2026-01-0{number}", run=f"run-{number}-rl")
    )
    folder.log.write_text(log)
    folder.write("exit.json", {"code": 1, "stopped": False, "ended": time.time()})


def test_failures_are_grouped_by_their_first_error_line(tmp_path):
    trace = "Traceback (most recent call last):\n  File x\nValueError: no memory\nRuntimeError: after that\n"
    for number, log in enumerate([trace, "error: no such file\n", f"step 1\n{trace}", "it just ended\n"], 1):
        ended_job(tmp_path, number, log)
    assert Grid("g", tmp_path).failures() == {
        "ValueError: no memory": ["run-1-rl", "run-3-rl"], "error: no such file": ["run-2-rl"],
        "it just ended": ["run-4-rl"],
    }  # fmt: skip


def test_cells_and_keys_of_a_plan(tmp_path):
    plan = GridPlan(
        "g", "tiny", "laptop", str(tmp_path), {"a": {"rl.lr": 1.0}, "B!": {}}, [1, 2], {"rl.lr": 2.0, "x": 3}, 1
    )
    assert plan.cells() == [("a", 1), ("B!", 1), ("a", 2), ("B!", 2)]
    assert plan.keys("a", 2) == {
        "rl.lr": 1.0, "x": 3, "model": str(plan.model.resolve()), "sft": None, "seed": 2, "label": "a",
    }  # fmt: skip
    assert plan.run_name("B!", 1) == "g-b--s1"
    for arms, seeds in (({"a b": {}, "a-b": {}}, [1]), ({"a": {}}, [1, 1])):
        with pytest.raises(UserError, match="grid g: two runs would be called g-a"):
            GridPlan("g", "tiny", "laptop", str(tmp_path), arms, seeds, {}, 1)
