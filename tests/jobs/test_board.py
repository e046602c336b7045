"""The board of all jobs: rows of local and distant jobs, one request per host, buttons, and its form without a browser."""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.jobs import job_spec

from rstar_lab.hardware.profiles import Ssh
from rstar_lab.jobs import slurm
from rstar_lab.jobs.board import BoardWidget, JobBoard
from rstar_lab.jobs.ssh.connection import Agent
from rstar_lab.jobs.store import JobFolder, JobSpec

ROOT = Path(__file__).parent.parent.parent
EVENT = {"event": "rl", "done": 3, "total": 10, "reward": 0.25, "error_rate": 0.5, "step_s": 2.0}


def write_job(runs, job_id, *, status="running", event=EVENT, **changes):
    """Write the folder of a job of this process (running) or of a job that has ended."""
    folder = JobFolder.of(runs, job_id)
    folder.save(
        job_spec(runs, job_id, recipe="tiny", created=f"2026-01-01T00:00:{len(job_id):02d}", run="tiny-rl",
                 handle={"pid": os.getpid(), "created": psutil.Process().create_time()})
        if not changes else JobSpec(**changes)
    )  # fmt: skip
    folder.log.write_text(f"starts\n{json.dumps(event)}\nan ordinary line\n")
    if status != "running":
        folder.write("exit.json", {"code": 0 if status == "finished" else 1, "stopped": status == "stopped"})


def test_a_row_shows_progress_and_the_time_that_is_left(tmp_path):
    write_job(tmp_path, "one")
    (row,) = JobBoard(tmp_path).rows()
    assert (row.status, row.phase, row.done, row.total, row.reward, row.error_rate) == (
        "running", "rl", 3, 10, 0.25, 0.5,
    )  # fmt: skip
    assert row.left_s == 14.0, "7 steps of 2 s"
    assert row.line == "an ordinary line"


def test_a_job_that_has_ended_is_read_once(tmp_path):
    write_job(tmp_path, "one", status="failed")
    board = JobBoard(tmp_path)
    assert [row.status for row in board.rows()] == ["failed"]
    (tmp_path / ".jobs" / "one" / "log.txt").unlink()
    assert [row.line for row in board.rows()] == ["an ordinary line"]


def test_the_buttons_fit_the_status_of_the_selected_job(tmp_path):
    write_job(tmp_path, "runs")
    write_job(tmp_path, "ended", status="finished")
    board = JobBoard(tmp_path)
    widget = BoardWidget(board, None)
    widget.show(board.rows())
    widget.chosen.value = "runs"
    assert [name for name, button in widget.buttons.items() if not button.disabled] == ["Logs", "Stop"]
    widget.chosen.value = "ended"
    assert [name for name, button in widget.buttons.items() if not button.disabled] == ["Logs"]
    widget.buttons["Logs"].click()
    assert "an ordinary line" in widget.message.value and "event rl · done 3" in widget.message.value
    assert [value for _, value in widget.chosen.options] == ["ended", "runs"] and ">runs<" in widget.table.value


def test_long_lines_of_a_log_are_shortened(tmp_path):
    write_job(tmp_path, "one", event=EVENT | {"recipe": {"rl": list(range(3000))}, "text": "x" * 5000})
    widget = BoardWidget(board := JobBoard(tmp_path), None)
    widget.show(board.rows())
    widget.buttons["Logs"].click()
    assert max(map(len, widget.message.value.splitlines())) < 400 and "2999" not in widget.message.value


def test_a_finished_job_shows_the_reward_of_its_last_step(tmp_path):
    (tmp_path / "tiny-rl").mkdir()
    (tmp_path / "tiny-rl" / "run.json").write_text("{}")
    (tmp_path / "tiny-rl" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "error_rate": 0.25}\n')
    write_job(tmp_path, "one", status="finished", event={"event": "evaluate", "done": 8, "total": 8})
    (row,) = JobBoard(tmp_path).rows()
    assert (row.phase, row.reward, row.error_rate) == ("evaluate", 0.5, 0.25)


def test_the_board_of_an_empty_folder_names_the_command_that_starts_a_job(tmp_path):
    assert "jobs submit" in JobBoard(tmp_path).to_html()


def cpu_s(server):
    """Return the CPU seconds of this process, and of the server with the agent and the processes that it started."""
    host = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (host, *host.children(recursive=True))]
    return time.process_time() + sum(t.user + t.system + t.children_user + t.children_system for t in times)


def open_connections(server):
    connections = psutil.net_connections("tcp")
    return [c for c in connections if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == server.port]


@pytest.mark.slow
def test_200_jobs_of_one_host_take_one_request_and_under_a_second_of_cpu(server, tmp_path, monkeypatch):
    far, here = tmp_path / "far", tmp_path / "here"
    settings = Ssh(host="cluster", config=str(server.config), backend="local", python=sys.executable)
    handle = {"ssh": settings.model_dump(), "code": str(ROOT), "runs": str(far)}
    for number in range(200):
        write_job(far, f"job-{number:03d}")
        write_job(here, f"job-{number:03d}", id=f"job-{number:03d}", recipe="tiny", profile="x", backend="ssh", command=[],
                  cwd="/", runs_dir=str(here), overrides={}, created="2026-01-01", handle=handle)  # fmt: skip
    requests = []
    request = Agent.request
    monkeypatch.setattr(
        Agent, "request", lambda self, name, **options: requests.append(name) or request(self, name, **options)
    )
    board = JobBoard(here)
    rows = board.rows()
    assert len(rows) == 200 and {row.status for row in rows} == {"running"} and {row.done for row in rows} == {3}
    assert requests == ["jobs"]
    before = cpu_s(server)
    board.to_html()
    assert cpu_s(server) - before < 1, "0.06 s measured on an AMD EPYC"
    assert len(open_connections(server)) == 1
    server.stop()
    assert {row.status for row in board.rows()} == {"unknown"}
    server.start()
    assert {row.status for row in board.rows()} == {"running"}


def test_the_states_of_all_slurm_jobs_are_read_with_one_request(tmp_path, monkeypatch):
    commands = []

    def run(*command):
        commands.append(command[0])
        return "".join(f"7_{number} RUNNING\n" for number in range(9)) + "8 PENDING\n"

    monkeypatch.setattr(slurm, "_run", run)
    monkeypatch.setattr(slurm, "_states_read", float("-inf"))
    for number, slurm_id in enumerate([*(f"7_{task}" for task in range(9)), "8"]):
        spec = job_spec(tmp_path, f"job-{number}", backend="slurm", handle={"slurm_id": slurm_id})
        JobFolder.of(tmp_path, spec.id).save(spec)
    assert [row.status for row in JobBoard(tmp_path).rows()] == ["queued"] + ["running"] * 9
    assert commands == ["squeue"]
