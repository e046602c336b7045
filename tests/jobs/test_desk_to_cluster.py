"""From a notebook at the desk to a Slurm cluster of another user on this machine, reached with ssh. Part of `make test-all`."""

import os
import re
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from helpers.notebooks import NOTEBOOKS
from helpers.other_user import other_user
from helpers.ssh_server import forget_agents
from nbclient import NotebookClient

from rstar_lab.jobs import JobStatus, attach, list_jobs, submit
from rstar_lab.jobs.ssh.mirror import follow
from rstar_lab.runs.reader import RunReader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
SECRET = secrets.token_hex(12)  # the source of this test is sent to the cluster too
FOUR_CELLS_S = 60


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The cluster, with its profile, as `ssh cluster` reaches it."""
    with other_user() as host, pytest.MonkeyPatch.context() as patch:
        # What ~/.ssh/config does for a person.
        client = tmp_path_factory.mktemp("bin") / "ssh"
        client.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {host.server.config} "$@"\n')
        client.chmod(0o755)
        patch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
        patch.setenv("MY_API_KEY", SECRET)
        profile = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text())
        profile |= {"name": "far", "backend": "slurm", "secrets": ["MY_API_KEY"], "ssh": {"python": sys.executable}}
        profile["slurm"] = {"time": "00:20:00", "requeue_before_s": 0}
        command = ["ssh", "cluster", "mkdir -p rstar-lab && cat > rstar-lab/profile.yaml"]
        subprocess.run(command, input=yaml.safe_dump(profile), text=True, check=True)
        yield host
        forget_agents()


def processes(host):
    """Return the command lines of the user's processes on all nodes, without those of its ssh sessions."""
    found = subprocess.run(["ps", "-U", host.user, "-o", "stat=,args="], capture_output=True, text=True).stdout
    lines = [line for line in found.splitlines() if not line.startswith("Z")]
    return [line for line in lines if "sshd:" not in line and "jobs.ssh.agent" not in line]


def wait_until_gone(host):
    deadline = time.monotonic() + 60
    while left := processes(host):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def test_four_cells_from_a_fresh_kernel_to_a_running_job(host, tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "09_cluster.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells[0].source = re.sub(r'^host = ""', 'host = "cluster"', cells[0].source, flags=re.MULTILINE)
    cells[0].source += f"\nruns_dir = {str(tmp_path / 'here' / 'runs')!r}"
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    with client.setup_kernel(cwd=str(NOTEBOOKS)):
        started = time.monotonic()
        for cell in cells[:4]:
            client.execute_cell(cell, notebook.cells.index(cell))
        (job,) = list_jobs(tmp_path / "here" / "runs")
        while job.status() == JobStatus.QUEUED:
            time.sleep(0.2)
        seconds = time.monotonic() - started
    assert job.status() == JobStatus.RUNNING and job.spec.handle["ssh"]["host"] == "cluster"
    assert "tiny_fas" in host.run("squeue --me --noheader")
    print(f"four cells: {seconds:.0f} s")
    assert seconds < FOUR_CELLS_S
    shown = "".join(str(output) for cell in cells for output in cell.get("outputs", []))
    assert "all* up infinite 2" in shown, "the card shows the queue"
    assert job.stop() == JobStatus.STOPPED
    wait_until_gone(host)
    places = [tmp_path / "here", host.home / "rstar-lab"]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in shown
    assert SECRET not in subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True).stdout


def test_log_and_steps_arrive_once_although_sshd_stops_for_a_minute(host, tmp_path):
    here = tmp_path / "here"
    job = submit("tiny_fast", host="cluster", command="sft", runs_dir=here, name="cut", preflight=False, log=print,
                 overrides={"sft.problems.synthetic.count": 800})  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(job.follow(timeout_s=900)))
    reader.start()
    time.sleep(5)
    host.server.stop()
    time.sleep(60)
    assert not (host.home / "rstar-lab/runs/.jobs" / job.id / "exit.json").exists(), (
        "ended before the connection was back"
    )
    host.server.start()
    reader.join()
    far = Path(job.spec.handle["runs"])
    assert job.status() == JobStatus.FINISHED
    assert lines == (far / ".jobs" / job.id / "log.txt").read_text().splitlines(), "every line arrives once"
    follow(job)
    copy, original = RunReader(here / "cut-sft"), RunReader(far / "cut-sft")
    assert copy.metrics() == original.metrics() and len(copy.metrics()) > 3
    assert attach(job.id, runs_dir=here).run_dir == here / "cut-sft"
