"""Jobs over ssh, with a real OpenSSH server: submit, watch, lose the connection, stop; and the copy of the runs."""

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import processes_of
from rstar_lab.jobs import JobStatus, attach, describe, list_jobs, submit
from rstar_lab.jobs.ssh import mirror
from rstar_lab.jobs.ssh.connection import Connection, ConnectionLost, shell_command
from rstar_lab.jobs.ssh.mirror import follow
from rstar_lab.jobs.store import JobFolder
from rstar_lab.runs import RunWriter
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.files import DataError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def profile(settings, tmp_path):
    content = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text())
    content |= {"backend": "ssh", "ssh": settings.model_dump(exclude_none=True), "secrets": ["MY_API_KEY"]}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def content(folder):
    """Return the rows of a run and its metrics."""
    run = RunReader(folder)
    return run.metrics(), [run.read(level).to_pylist() for level in ("trajectories", "calls", "transcripts")]


@pytest.mark.slow
def test_a_job_over_ssh_runs_and_its_log_and_runs_come_back(profile, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", "verysecretvalue")
    here, messages = tmp_path / "here", []
    job = submit("tiny_fast", profile, command="sft", runs_dir=here, name="far", preflight=False, log=messages.append,
                 overrides={"sft.problems.synthetic.count": 60})  # fmt: skip
    assert any("receives" in message for message in messages)
    assert job.wait(timeout_s=240) == JobStatus.FINISHED, job.logs()
    far = Path(job.spec.handle["runs"])
    assert job.logs() == (far / ".jobs" / job.id / "log.txt").read_text(), "the log is complete"
    follow(job)
    assert content(here / "far-sft") == content(far / "far-sft")
    assert RunReader(here / "far-sft").status == "finished"
    assert not (here / "far-sft" / "sft" / "model").exists(), "models are copied only when asked for"
    mirror.pull(job.spec, checkpoints=True)
    assert (here / "far-sft" / "sft" / "model" / "config.json").exists()
    again = attach(job.id, runs_dir=here)
    assert again.status() == JobStatus.FINISHED and again.run_dir == here / "far-sft"
    written = [path for path in here.rglob("*") if path.is_file()]
    assert not any(b"verysecretvalue" in path.read_bytes() for path in written), "secrets stay out of the files here"


@pytest.mark.slow
def test_the_tree_is_sent_once_and_not_to_other_versions(profile, settings, tmp_path):
    from rstar_lab.jobs.ssh.backend import install_tree

    sent = []
    first = install_tree(Connection(settings), sent.append)
    assert install_tree(Connection(settings), sent.append) == first
    assert len(sent) == 1
    assert Path(first[1], "rstar_lab", "common", "errors.py").exists() and Path(first[0]) == tmp_path / "far"
    assert (tmp_path / "far" / "code").stat().st_mode & 0o077 == 0, "other users cannot read it"


@pytest.mark.slow
def test_a_repeated_request_submits_one_job(agent, settings):
    profile = (ROOT / "cluster/profiles/laptop.yaml").read_text()
    request = dict(
        job_id="once-1", recipe="tiny_fast", recipe_text=None, profile_text=profile, overrides={"sft.problems.synthetic.count": 60},
        command="sft", name="once", preflight=False, secrets={},
    )  # fmt: skip
    first = agent.request("submit", **request)
    second = agent.request("submit", **request)
    assert first["row"]["id"] == second["row"]["id"] == "once-1"
    assert [row["id"] for row in agent.request("jobs")] == ["once-1"]
    agent.request("stop", job_id="once-1")


@pytest.mark.slow
def test_a_rejected_job_leaves_nothing_behind_here(profile, tmp_path):
    with pytest.raises(UserError, match=r"cluster: preflight failed: .*no_such_recipe"):
        submit("no_such_recipe", profile, runs_dir=tmp_path / "here", log=print)
    assert list_jobs(tmp_path / "here") == []


@pytest.mark.slow
def test_a_job_is_described_by_its_host(profile, tmp_path):
    here = describe("tiny_fast", "laptop")
    there = describe("tiny_fast", profile)
    assert there.ready and there.host == "cluster" and there.backend == "local"
    assert there.disk_gb == here.disk_gb and there.stages == here.stages
    assert "cluster" in str(there) and "<table>" in there._repr_html_()


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "fish", "zsh"])
def test_scripts_run_in_every_login_shell(shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script = """printf '%s\\n' "it's 1! \\\\ $((1 + 1))"\ncat"""
    done = subprocess.run([shell, "-c", shell_command(script)], input="input", capture_output=True, text=True)
    assert done.stdout == "it's 1! \\ 2\ninput", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("echo Welcome; rsync", "a start-up file of the shell there prints text"),
        ("rsync-lacks", "cluster has no rsync"),
        ("echo 'zsh:1: command not found: rsync' >&2; exit 127;", "cluster has no rsync"),
    ],
)
def test_a_host_where_rsync_does_not_work_is_an_error_with_the_remedy(
    agent, tmp_path, monkeypatch, problem, message, write_run
):
    write_run(Path(agent.runs), 2)
    client = tmp_path / "bin" / "rsync"
    client.parent.mkdir()
    command = f'{shutil.which("rsync")} --rsync-path="{problem}" "$@" 2>&1 | sed s/-lacks// >&2'
    client.write_text(f"#!/bin/bash\nset -o pipefail\n{command}\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=message):
        mirror.pull_run(agent, "run", tmp_path / "here", False)


@pytest.mark.slow
def test_a_copy_replaces_no_other_run_of_the_same_name(agent, profile, tmp_path, write_run):
    far, here = Path(agent.runs), tmp_path / "here"
    for place, seed in ((far, 0), (here, 1)):
        write_run(place, 2, seed, "run-rl")
    before = content(here / "run-rl")
    with pytest.raises(mirror.NotACopy, match="run-rl is a run of this machine, not a copy of"):
        mirror.pull_run(agent, "run-rl", here, False)
    assert content(here / "run-rl") == before
    with pytest.raises(UserError, match="submit with another --name"):
        submit("tiny_fast", profile, name="run", runs_dir=here, preflight=False, log=print)
    assert list_jobs(here) == []


def test_the_copying_process_ends_when_the_host_stays_silent(monkeypatch):
    def lost():
        raise ConnectionLost("gone")

    lines = []
    monkeypatch.setattr(mirror, "GIVE_UP_S", 0.05)
    with pytest.raises(ConnectionLost):
        follow(SimpleNamespace(status=lost), log=lines.append)
    assert lines == ["gone; trying again"]


def test_one_process_copies_the_runs_of_a_job(tmp_path, monkeypatch):
    started, start = [], mirror.start_detached
    monkeypatch.setattr(
        mirror, "start_detached", lambda command, *log, **kept: started.append(start(["sleep", "60"], *log, **kept))
    )
    folder = JobFolder.of(tmp_path, "job")
    folder.create()
    for _ in range(2):
        mirror.start_mirror(folder, SimpleNamespace(runs_dir=str(tmp_path), id="job"))
    assert len(started) == 1, "the process holds the lock"
    os.kill(started[0], signal.SIGKILL)
    os.waitpid(started[0], 0)
    mirror.start_mirror(folder, SimpleNamespace(runs_dir=str(tmp_path), id="job"))
    assert len(started) == 2
    os.kill(started[1], signal.SIGKILL)


def test_a_damaged_copy_is_named_and_not_replaced(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mirror.json").write_text("{")
    with pytest.raises(DataError, match=r"run/mirror\.json: .*move this folder away"):
        mirror.foreign_run(folder, "host", "/runs/run")


def test_a_host_cannot_write_outside_of_the_runs_folder(tmp_path):
    class Hostile:
        connection = SimpleNamespace(host="hostile")
        runs = "/runs"

    for run_id in ("../run", "/tmp/run"):
        with pytest.raises(UserError, match="cannot be copied"):
            mirror.pull_run(Hostile(), run_id, tmp_path / "here", False)
    assert not (tmp_path / "x").exists() and not (tmp_path / "run").exists()


def test_an_unreachable_host_is_named(profile, tmp_path):
    with pytest.raises(ConnectionLost, match=r"cannot reach nowhere\.invalid"):
        submit("tiny_fast", profile, host="nowhere.invalid", runs_dir=tmp_path / "here", preflight=False)
    assert list_jobs(tmp_path / "here") == []


@pytest.mark.slow
def test_stop_ends_all_processes_of_the_job(profile, tmp_path):
    job = submit(
        "tiny_fast", profile, command="sft", runs_dir=tmp_path / "here", name="end", preflight=False, log=print
    )
    deadline = time.monotonic() + 60
    while not processes_of(job.id):  # the supervisor gets the job's variable when its program starts
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert job.stop() == JobStatus.STOPPED
    deadline = time.monotonic() + 20
    while left := [p for p in processes_of(job.id) if "ssh.mirror" not in " ".join(p.cmdline())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_a_copy_is_readable_while_the_run_is_written(agent, tmp_path, write_steps):
    far, here = Path(agent.runs), tmp_path / "here"
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            if (here / "run" / "run.json").exists():
                run = RunReader(here / "run")
                steps = len(run.metrics())
                assert run.read("trajectories").num_rows >= 8 * steps
                seen.append(steps)

    failures = []

    def checked_read():
        try:
            read()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=checked_read, daemon=True)
    reader.start()
    with RunWriter.open(far, "run", kind="train", recipe={}, seed=0) as writer:
        for first in range(1, 13, 3):
            write_steps(writer, range(first, first + 3))
            pulled = mirror.pull_run(agent, "run", here, False)
            assert pulled.steps == 3 and pulled.bytes > 0
            assert RunReader(here / "run").status == "running"
        writer.finish("finished")
    mirror.pull_run(agent, "run", here, False)
    done.set()
    reader.join()
    assert not failures and {3, 6, 9, 12} & set(seen)
    assert content(here / "run") == content(far / "run")


@pytest.mark.slow
def test_a_run_that_was_cut_and_written_again_is_copied_exactly(agent, tmp_path, write_run, write_steps):
    far, here = Path(agent.runs), tmp_path / "here"
    write_run(far, 5)
    mirror.pull_run(agent, "run", here, False)
    with RunWriter.open(far, "run", kind="train", recipe={}, seed=0) as writer:
        writer.cut(2)
        write_steps(writer, range(3, 5), seed=1)
    mirror.pull_run(agent, "run", here, False)
    assert content(here / "run") == content(far / "run")
    assert sorted(path.name for path in (here / "run").rglob("step=*")) == sorted(
        path.name for path in (far / "run").rglob("step=*")
    )


@pytest.mark.slow
def test_a_copy_that_stops_at_any_file_is_readable_and_continues(agent, tmp_path, monkeypatch, write_steps):
    far, here = Path(agent.runs), tmp_path / "here"
    with RunWriter.open(far, "run", kind="train", recipe={}, seed=0) as writer:
        write_steps(writer, range(1, 3))
        mirror.pull_run(agent, "run", here, False)
        write_steps(writer, range(3, 5))
        writer.finish("finished")
    transfer = mirror.copy_files
    names = [str(path.relative_to(far / "run")) for path in sorted((far / "run").rglob("*.*")) if path.name[0] != "."]
    names.remove("metrics.jsonl")
    for stop_after in range(1, len(names)):

        def part(agent, folder, *options, stop_after=stop_after):
            transfer(
                agent, folder, "--include=*/", *(f"--include=/{name}" for name in names[:stop_after]), "--exclude=*"
            )
            raise ConnectionLost("cut")

        monkeypatch.setattr(mirror, "copy_files", part)
        with pytest.raises(ConnectionLost):
            mirror.pull_run(agent, "run", here, False)
        run = RunReader(here / "run")
        assert [line["step"] for line in run.metrics()] == [1, 2]
        assert run.read("transcripts").num_rows == run.read("trajectories").num_rows
    monkeypatch.setattr(mirror, "copy_files", transfer)
    mirror.pull_run(agent, "run", here, False)
    assert content(here / "run") == content(far / "run")


def test_all_requests_share_one_connection(agent, server):
    agent.request("jobs")
    agent.connection.run("true")
    listing = subprocess.run(
        ["ss", "-Htn", "state", "established", f"( dport = :{server.port} )"], capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("ss is not installed")
    assert len(listing.stdout.splitlines()) == 1
