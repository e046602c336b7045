"""Every end of a command is a clean end: no process and no shared memory is left, and a run says that it was stopped."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers.analysis_runs import make_run
from helpers.tiny_models import make_model

from rstar_lab.jobs import JobStatus, submit
from rstar_lab.rl.problems import Problem, write_problems

ROOT = Path(__file__).parents[1]
CLOSED = "its output is closed"
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, CLOSED]
CLI = ["-m", "rstar_lab.cli"]
LOCKED = re.compile(r"rstar-[a-z]+-(\d+)-[0-9a-f]{8}")
NOTEBOOK = "from rstar_lab.rl.pipeline import run_recipe\nrun_recipe('tiny_fast', {'runs': 'runs'})"
EVALUATE = [
    "evaluate",
    "model",
    "--problems",
    "problems.jsonl",
    "--samples",
    "200",
    "--set",
    "evaluate.max_response_tokens=900",
]
# Arguments of Python, what the command prints when its processes run, and its exit codes: those of a command that was stopped (128 and
# the signal), or 0 of a service. Others than the first four take minutes.
STOPPED, SERVICE = "stopped", "service"
COMMANDS = {
    "bench": ([*CLI, "bench", "scheduler"], "bench", STOPPED),
    "view": ([*CLI, "view", "runs", "--no-browser"], "http", SERVICE),
    "monitor": ([*CLI, "monitor", "--port", "0", "--runs-dir", "runs"], "http", SERVICE),
    "chat": ([*CLI, "chat", "model", "--engine", "transformers"], "> ", SERVICE),
    "serve": ([*CLI, "serve", "model", "--port", "0", "--max-model-len", "512"], "http", SERVICE),
    "evaluate": ([*CLI, *EVALUATE], "evaluat", STOPPED),
    "train": ([*CLI, "train", "tiny_fast", "--runs-dir", "runs"], "rl", STOPPED),
    "verl": (["-m", "rstar_lab.rl.verl.train", "tiny_fast", "--profile", "laptop", "--runs-dir", "runs"], "sft", STOPPED),
    "notebook": (["-m", "papermill", "book.ipynb", "out.ipynb", "--log-output"], "sft", None),
}  # fmt: skip


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


def stale():
    """Return the folders in shared memory whose processes have ended."""
    names = [LOCKED.fullmatch(path.name) for path in Path("/dev/shm").iterdir()]
    return [name[0] for name in names if name and not psutil.pid_exists(int(name[1]))]


def end(arguments, ready, how, folder, temporary):
    """Start a command, end it, and return its exit code, its stderr and the processes that it left."""
    mark = uuid.uuid4().hex
    command = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"RSTAR_LAB_TEST": mark, "PYTHONPATH": str(ROOT), "TMPDIR": temporary},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    seen = b""
    while ready.encode() not in seen:
        (readable, *_) = select.select([command.stdout, command.stderr], [], [], 300)
        chunk = b"".join(os.read(stream.fileno(), 2**16) for stream in readable)
        seen += chunk
        assert chunk, seen.decode()
    time.sleep(2)
    if how is CLOSED:
        command.stdout.close()
    else:
        command.send_signal(how)
    command.wait(timeout=120)
    errors = command.stderr.read().decode()
    deadline = time.monotonic() + 20  # of the processes of one that was killed
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return command.returncode, errors, left


@pytest.fixture
def temporary():
    folder = tempfile.mkdtemp(prefix="ends-", dir="/tmp")  # short: sockets are created in it
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ENDS, ids=str)
@pytest.mark.parametrize(
    "name", [*COMMANDS][:4] + [pytest.param(name, marks=pytest.mark.soak) for name in [*COMMANDS][4:]]
)
def test_a_command_that_is_ended_leaves_nothing(name, how, tmp_path, temporary):
    arguments, ready, status = COMMANDS[name]
    if how is CLOSED and name != "train":
        pytest.skip("it prints nothing more")
    make_run(tmp_path / "runs", "a", steps=1)
    if "model" in arguments:
        make_model(tmp_path / "model")
        problems = [Problem(problem_id=f"p{i}", question=f"{i} + 1?", answer=f"{i + 1}") for i in range(20)]
        write_problems(tmp_path / "problems.jsonl", problems)
    if name == "notebook":
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)]), tmp_path / "book.ipynb")
    code, errors, left = end(arguments, ready, how, tmp_path, temporary)
    assert left == []
    if how is signal.SIGKILL:
        assert code == -9
        subprocess.run([sys.executable, *CLI, "profiles"], env=os.environ | {"TMPDIR": temporary}, check=True)
    assert not stale() and not [*Path(temporary).iterdir()]
    if how is signal.SIGKILL or status is None:
        return
    assert "Traceback" not in errors, errors
    assert code in (128 + (signal.SIGPIPE if how is CLOSED else how), 0 if status == SERVICE else None)
    if status == STOPPED:
        assert errors.strip().endswith("stopped; run the same command again to continue")
    for run in tmp_path.glob("runs/*/run.json"):
        assert json.loads(run.read_text())["status"] in ("stopped", "finished")


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
