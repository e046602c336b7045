"""Ctrl-C and missing permissions: one line, a sensible exit code, no traceback. Real processes, as in a terminal."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLI = [sys.executable, "-m", "rstar_lab.cli"]
# Permissions of files also hold for root without these capabilities.
DROP = "-dac_override,-dac_read_search"
AS_USER = ["setpriv", f"--bounding-set={DROP}", f"--inh-caps={DROP}"] if os.geteuid() == 0 else []


def interrupt(arguments, folder, *, ready=None, after_s=0.0, path=()):
    """Send Ctrl-C to all processes of a command, when it has printed `ready` or `after_s` seconds later. Returns its exit
    code and stderr. path: folders in which Python looks for modules first."""
    command = subprocess.Popen(
        [*CLI, *map(str, arguments)], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip
    while ready and ready not in (line := command.stdout.readline()):
        assert line, command.stderr.read()
    time.sleep(after_s)
    os.killpg(command.pid, signal.SIGINT)
    output, errors = command.communicate(timeout=60)
    assert "Traceback" not in output + errors, errors
    return command.returncode, errors


def test_ctrl_c_while_the_command_line_imports_its_modules_prints_nothing(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\nwhile True: time.sleep(0.1)")
    assert interrupt(["--help"], tmp_path, ready="importing", path=[tmp_path]) == (130, "")


@pytest.mark.slow
def test_ctrl_c_ends_the_log_of_a_job_and_not_the_job(tmp_path):
    from rstar_lab.jobs import JobStatus, local
    from rstar_lab.jobs.job import Job
    from rstar_lab.jobs.store import JobFolder, JobSpec

    program = [sys.executable, "-c", "import time; print('hello'); time.sleep(60)"]
    spec = JobSpec("log", "toy", "laptop", "local", program, str(tmp_path), str(tmp_path), {}, "now")
    folder = JobFolder.of(tmp_path, "log")
    folder.save(spec)
    folder.save(dataclasses.replace(spec, handle=local.Local().start(folder, spec)))
    code, errors = interrupt(["jobs", "logs", "log", "--follow", "--runs-dir", tmp_path], tmp_path, ready="hello")
    assert (code, errors) == (130, "")
    assert Job(folder).status() == JobStatus.RUNNING
    Job(folder).stop()


@pytest.mark.soak  # on a busy machine the command may end before the signal
def test_ctrl_c_ends_a_command_without_a_coroutine_with_one_line(tmp_path):
    arguments = ["preflight", "tiny", "--profile", "laptop"]
    ready = "recipe"
    code, errors = interrupt(arguments, tmp_path, ready=ready)
    assert (code, errors) == (130, "error: stopped; run the same command again to continue\n")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [6, 15, 30])
@pytest.mark.parametrize("command", ["train", "sft", "demo"])
def test_ctrl_c_at_any_time_ends_training_with_one_line(command, seconds, tmp_path):
    recipe = ["--fast"] if command == "demo" else ["tiny_fast"]
    code, errors = interrupt([command, *recipe, "--runs-dir", "runs"], tmp_path, after_s=seconds)
    assert code == 130 and errors.strip().endswith("error: stopped; run the same command again to continue")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("jobs submit tiny_fast --runs-dir closed --no-preflight", "closed/.jobs"),
        ("jobs submit locked.yaml --no-preflight", "locked.yaml"),
        ("sft tiny_fast --runs-dir closed", "closed"),
        ("serve model", "model/model.safetensors"),
        ("chat model --engine transformers --prompt hi", "model/model.safetensors"),
        ("data synthesize --seed 1 --count 3 --out closed/x.jsonl", "closed/x.jsonl"),
    ],
)
def test_missing_permissions_are_one_line_that_names_the_file(arguments, named, tmp_path):
    if AS_USER and not shutil.which("setpriv"):
        pytest.skip("setpriv (util-linux) is not installed")
    from helpers.tiny_models import make_model

    if "model" in arguments:
        make_model(tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").chmod(0)
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "locked.yaml").touch(mode=0)
    done = subprocess.run(
        [*AS_USER, *CLI, *arguments.split()], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 1 and named in line and "Permission denied" in line
    assert "Traceback" not in done.stderr
