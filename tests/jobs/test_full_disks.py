"""Jobs on full and read-only disks and with used-up quotas, of the host and of this machine."""

import sys
import time
from pathlib import Path

import pytest
from helpers.small_disk import SmallDisk

from rstar_lab.common.errors import UserError
from rstar_lab.jobs import JobStatus, local, submit
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.ssh import mirror
from rstar_lab.jobs.ssh.backend import install_tree
from rstar_lab.jobs.ssh.connection import Agent, Connection
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.runs.reader import RunReader

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(params=["size", "quota"])
def disk(request, tmp_path):
    disk = SmallDisk(tmp_path, request.param)
    yield disk
    disk.unmount()


def agent_on(server, runs):
    runs.mkdir(exist_ok=True)
    return Agent(Connection(server.settings(runs.parent)), str(ROOT), str(runs))


def test_code_that_does_not_fit_is_named_and_nothing_partial_stays(server, disk):
    with pytest.raises(
        UserError, match=rf"cannot write to .*/far on the host: .*{disk.reason}.*Free space or quota there"
    ):
        install_tree(Connection(server.settings(disk.folder)), lambda line: None)
    assert list((disk.folder / "code").iterdir()) == []


def test_a_job_that_a_full_host_rejects_leaves_nothing(server, disk, tmp_path, write_run):
    agent = agent_on(server, disk.folder / "runs")
    write_run(disk.folder / "runs", steps=2)
    disk.fill()
    request = dict(
        job_id="job-1", recipe="tiny_fast", recipe_text=None, profile_text=(ROOT / "cluster/profiles/laptop.yaml").read_text(),
        overrides={}, command="sft", name="job", preflight=False, secrets={},
    )  # fmt: skip
    with pytest.raises(UserError, match=rf"^cluster: .*far/runs.*{disk.reason} .* free.; free space or quota there"):
        agent.request("submit", **request)
    assert agent.request("jobs") == []
    assert mirror.pull_run(agent, "run", tmp_path / "here", False).steps == 2
    agent.close()


def test_a_copy_that_does_not_fit_here_is_named_and_continues_later(server, disk, tmp_path, write_run):
    agent, here = agent_on(server, tmp_path / "runs"), disk.folder / "here"
    write_run(tmp_path / "runs", steps=40)
    with pytest.raises(UserError, match=disk.reason):
        mirror.pull_run(agent, "run", here, False)
    disk.free()
    mirror.pull_run(agent, "run", here, False)
    assert len(RunReader(here / "run").metrics()) == 40
    agent.close()


def test_a_submission_to_a_full_disk_is_named_and_leaves_no_job(disk):
    disk.fill()
    with pytest.raises(UserError, match=rf"{disk.folder}/.*: {disk.reason} .* are free.; free space or quota there"):
        submit("tiny_fast", runs_dir=disk.folder / "runs", preflight=False, log=print)
    assert not list(disk.folder.glob("runs/.jobs/*/job.json"))


def test_a_job_whose_log_does_not_fit_continues(disk, tmp_path):
    printed, freed = tmp_path / "printed", tmp_path / "freed"
    program = (
        "import pathlib, time\n"
        "for number in range(1500): print(f'line {number:04d} ' + 'x' * 1000)\n"
        f"pathlib.Path({str(printed)!r}).touch()\n"
        f"while not pathlib.Path({str(freed)!r}).exists(): time.sleep(.05)\n"
        "print('after')\n"
    )
    command = [sys.executable, "-c", program]
    spec = JobSpec("log", "toy", "laptop", "local", command, str(tmp_path), str(disk.folder), {}, "now")
    folder = JobFolder.of(disk.folder, "log")
    folder.save(spec)
    local.Local().start(folder, spec)
    deadline = time.monotonic() + 30
    while not printed.exists():
        assert time.monotonic() < deadline, "the job waits for its log"
        time.sleep(0.05)
    disk.free()
    freed.touch()
    assert Job(folder).wait(timeout_s=30) == JobStatus.FINISHED
    log = Job(folder).logs()
    # The supervisor may still read the last lines when there is space again.
    assert log.startswith("line 0000 ") and " lines of output could not be written]\n" in log
    assert log.endswith("\nafter\n")
