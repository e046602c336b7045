"""Every end of a command is a clean end: no process and no shared memory is left, and a run says that it was stopped."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rstar_lab.jobs import JobStatus, submit

ROOT = Path(__file__).parents[1]
CLOSED = "its output is closed"
# Command line, and what it prints when its processes run.
COMMANDS = {
    "bench": (["bench", "scheduler"], "bench"),
    "service": (["sandbox", "serve", "--port", "0"], "http"),
    "train": (["train", "tiny_fast", "--runs-dir", "runs"], "sft"),
}
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, CLOSED]


def marked(mark):
    """Return the command lines of the processes that have this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RSTAR_LAB_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            pass
    return found


def end(arguments, ready, how, folder):
    """Start a command, end it, and return its exit code, its stderr and what its processes left."""
    mark, before = uuid.uuid4().hex, set(Path("/dev/shm").iterdir())
    command = subprocess.Popen(
        [sys.executable, "-m", "rstar_lab.cli", *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"RSTAR_LAB_TEST": mark, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while ready not in (line := command.stdout.readline()):
        assert line, command.stderr.read()
    time.sleep(2)
    if how is CLOSED:
        command.stdout.close()
    else:
        command.send_signal(how)
    code = command.wait(timeout=120)
    deadline = time.monotonic() + 10  # of the processes of one that was killed
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    shared = {name for name in set(Path("/dev/shm").iterdir()) - before if name.name.startswith("rstar")}
    return code, command.stderr.read(), left, shared


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ENDS, ids=str)
@pytest.mark.parametrize("name", ["bench", "service", pytest.param("train", marks=pytest.mark.soak)])
def test_a_command_that_is_ended_leaves_nothing(name, how, tmp_path):
    if how is CLOSED and name != "train":
        pytest.skip("it prints nothing more")
    arguments, ready = COMMANDS[name]
    code, errors, left, shared = end(arguments, ready, how, tmp_path)
    assert left == [] and "Traceback" not in errors, errors
    if how is signal.SIGKILL:
        assert code == -9
        return
    assert not shared
    if name == "service":
        assert code == 0
        return
    assert code == 128 + (signal.SIGPIPE if how is CLOSED else how)
    assert errors.strip().endswith("stopped; run the same command again to continue")
    for run in tmp_path.glob("runs/*/run.json"):
        assert json.loads(run.read_text())["status"] == "stopped"


def test_a_list_whose_reader_has_gone_prints_no_error(tmp_path):
    text = f"{sys.executable} -m rstar_lab.cli recipes --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "" and done.stdout[1:].strip() in ("0", "141")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_end_of_a_job_is_in_its_run_and_its_log(how, tmp_path):
    job = submit("tiny_fast", runs_dir=tmp_path, preflight=False)
    deadline = time.monotonic() + 300
    while '"event": "sft"' not in job.logs():
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.5)
    if how == "stop":
        assert job.stop() is JobStatus.STOPPED
        assert json.loads((tmp_path / "tiny_fast-sft" / "run.json").read_text())["status"] == "stopped"
        return
    (trainer,) = psutil.Process(job.spec.handle["pid"]).children()
    trainer.kill()
    assert job.wait(timeout_s=60) is JobStatus.FAILED
    assert job.logs().splitlines()[-1].startswith("error: the command of the job was killed by SIGKILL")
    assert "Traceback" not in job.logs() and "helper process" not in job.logs()
