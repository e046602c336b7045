"""Local jobs: real detached processes that are found by id and stopped with all their children."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from helpers.jobs import job_spec, until

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import processes_of
from rstar_lab.jobs import JobStatus, attach, list_jobs, submit
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.local import Local
from rstar_lab.jobs.secrets import redact, secret_values
from rstar_lab.jobs.store import REQUEUE_FILE, JobFolder


def start_job(tmp_path: Path, code: str, *, job_id: str = "toy-1", environment: dict[str, str] | None = None) -> Job:
    """Start a job whose command is a small program instead of a training run."""
    spec = job_spec(tmp_path, job_id, code=code, environment=environment or {})
    folder = JobFolder.of(tmp_path, job_id)
    folder.save(spec)
    folder.save(replace(spec, handle=Local().start(folder, spec)))
    return Job(folder)


@pytest.mark.slow
def test_a_job_runs_to_its_end_and_its_log_is_kept(tmp_path):
    job = start_job(tmp_path, "import os; print('hello'); print(os.environ['COLOUR'])", environment={"COLOUR": "red"})
    assert job.wait(timeout_s=60) == JobStatus.FINISHED
    assert job.logs() == "hello\nred\n"
    assert job.logs(tail=1) == "red\n"
    assert job.exit_code == 0


@pytest.mark.slow
def test_a_failing_job_has_status_failed_and_a_traceback_in_its_log(tmp_path):
    job = start_job(tmp_path, "raise ValueError('no such thing')")
    assert job.wait(timeout_s=60) == JobStatus.FAILED
    assert "ValueError: no such thing" in job.logs()
    assert job.exit_code == 1


@pytest.mark.slow
def test_a_command_that_cannot_start_fails_and_is_named_in_the_log(tmp_path):
    spec = job_spec(tmp_path, "x", command=["/nowhere/python"])
    folder = JobFolder.of(tmp_path, "x")
    folder.save(spec)
    folder.save(replace(spec, handle=Local().start(folder, spec)))
    assert Job(folder).wait(timeout_s=60) == JobStatus.FAILED
    assert "/nowhere/python" in Job(folder).logs()


@pytest.mark.slow
def test_a_job_outlives_its_submitter_and_is_found_by_id(tmp_path):
    program = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_jobs_local import start_job
        start_job(Path({str(tmp_path)!r}), "import time; print('begun'); time.sleep(600)")
        import os, signal; os.killpg(0, signal.SIGKILL)
    """
    gone = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], start_new_session=True)
    assert gone.returncode == -signal.SIGKILL
    job = attach("toy-1", runs_dir=tmp_path)
    until(lambda: "begun" in job.logs())
    assert job.status() == JobStatus.RUNNING
    assert [other.id for other in list_jobs(tmp_path)] == ["toy-1"]
    assert job.stop() == JobStatus.STOPPED


@pytest.mark.slow
def test_stop_ends_orphans_without_session_or_environment(tmp_path):
    stray_code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("stray", "w").write(str(os.getpid()))
time.sleep(600)
"""
    popen = f"subprocess.Popen([sys.executable, '-c', {stray_code!r}], start_new_session=True, env={{}})"
    code = f"""
        import os, subprocess, sys, time
        subprocess.run([sys.executable, '-c', {f"import subprocess, sys; {popen}"!r}])
        subprocess.Popen(['sleep', '600'])
        print('ready', flush=True)
        time.sleep(600)
    """
    job = start_job(tmp_path, code)
    until(lambda: "ready" in job.logs())
    stray = int(until(lambda: (tmp_path / "stray").exists() and (tmp_path / "stray").read_text()))
    supervisor = job.folder.spec().handle["pid"]
    assert stray in {process.pid for process in processes_of(job.id, root=supervisor)}
    assert job.stop() == JobStatus.STOPPED
    assert processes_of(job.id, root=supervisor) == []
    assert not psutil.pid_exists(stray) or psutil.Process(stray).status() == psutil.STATUS_ZOMBIE
    assert job.stop() == JobStatus.STOPPED, "stopping twice changes nothing"


@pytest.mark.slow
def test_processes_left_by_a_finished_run_are_ended(tmp_path):
    job = start_job(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    assert job.wait(timeout_s=60) == JobStatus.FINISHED
    left = int(job.logs())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_stop_ends_the_processes_of_a_killed_supervisor(tmp_path):
    job = start_job(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    until(lambda: "ready" in job.logs())
    os.kill(job.folder.spec().handle["pid"], signal.SIGKILL)
    until(lambda: job.status() == JobStatus.FAILED)
    assert processes_of(job.id)
    job.stop()
    assert processes_of(job.id) == []


@pytest.mark.slow
@pytest.mark.parametrize("runs_again", [False, True])
def test_a_terminated_supervisor_records_the_end_unless_the_job_runs_again(tmp_path, runs_again):
    """Slurm and Ray terminate the supervisor themselves."""
    job = start_job(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    until(lambda: "ready" in job.logs())
    if runs_again:
        (job.folder.path / REQUEUE_FILE).touch()
    supervisor = psutil.Process(job.folder.spec().handle["pid"])
    supervisor.terminate()
    until(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE)
    ended = job.folder.exit()
    assert ended is None if runs_again else (ended.code, ended.stopped) == (-signal.SIGTERM, True)


def test_each_line_of_a_secret_of_six_characters_or_more_is_hidden():
    environ = {"A_TOKEN": "sixsix", "B_KEY": "short", "C_SECRET": "first line\nsecond", "NAME": "not secret"}
    assert sorted(secret_values(environ)) == ["first line", "second", "sixsix"]


def test_passwords_are_found_in_long_lines_without_delay():
    """A pattern with quadratic time would take hours."""
    line = f"{'x' * 1_000_000} redis://me:verysecret@host:6379/0 amqp+tls://:other@host"
    assert redact(line, []).endswith(" redis://me:***@host:6379/0 amqp+tls://:***@host")


@pytest.mark.slow
def test_secrets_stay_out_of_log_and_metadata(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123secret")
    monkeypatch.setenv("RSTAR_LAB_REDIS_URL", "redis://user:hunter22@db:6379/0")
    job = start_job(tmp_path, "import os; print(sorted(os.environ.items()))")
    job.wait(timeout_s=60)
    everything = b"".join(path.read_bytes() for path in job.folder.path.iterdir())
    assert b"WANDB_API_KEY" in everything, "the program did print its environment"
    assert b"abc123secret" not in everything
    assert b"hunter22" not in everything


@pytest.mark.parametrize("overrides", [{"logging.api_key": "x"}, {"sandbox.url": "redis://:pass@host"}])
def test_a_secret_among_the_overrides_is_rejected_by_its_key(tmp_path, overrides):
    with pytest.raises(UserError, match=next(iter(overrides))):
        submit("tiny", overrides=overrides, runs_dir=tmp_path)
    assert not (tmp_path / ".jobs").exists()


def test_unknown_profile_or_job_raises_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match="did you mean 'laptop'"):
        submit("tiny", "labtop", runs_dir=tmp_path)
    with pytest.raises(UserError, match="jobs list"):
        attach("nothing", runs_dir=tmp_path)


@pytest.mark.slow
def test_follow_yields_each_line_once_and_its_timeout_keeps_the_job(tmp_path):
    job = start_job(tmp_path, "import time\nfor i in range(3): print(i); time.sleep(.3)\nprint('last', end='')")
    assert list(job.follow(every_s=0.05, timeout_s=60)) == ["0", "1", "2", "last"]
    job = start_job(tmp_path, "import time; time.sleep(600)", job_id="toy-2")
    with pytest.raises(TimeoutError, match="toy-2 is still"):
        list(job.follow(timeout_s=0.5))
    assert job.status() == JobStatus.RUNNING
    job.stop()


def test_submit_runs_the_recipe_with_its_overrides(tmp_path, monkeypatch):
    """The command is the public command line, so that a notebook and a terminal start the same run."""
    seen = {}
    monkeypatch.setattr(Local, "start", lambda self, folder, spec: seen.setdefault("spec", spec) and {})
    job = submit(
        "tiny",
        "laptop",
        {"rl.lr": 1e-4, "rl.method.roc.rule": "none"},
        runs_dir=tmp_path,
        name="trial",
        preflight=False,
    )
    command = seen["spec"].command
    assert command[1:4] == ["-m", "rstar_lab.cli", "run"]
    assert command[5:9] == ["--set", "rl.lr=0.0001", "--set", "rl.method.roc.rule=none"]
    assert job.id.startswith("trial-")
    assert attach(job.id, runs_dir=tmp_path).spec.overrides == {
        "rl.lr": 1e-4,
        "rl.method.roc.rule": "none",
        "name": "trial",
    }


@pytest.mark.slow
def test_submit_stops_at_a_failed_preflight(tmp_path):
    (tmp_path / "bad.yaml").write_text("model: tiny\nrll: {}\n")
    with pytest.raises(UserError, match=r"preflight failed: recipe: .*rll"):
        submit(tmp_path / "bad.yaml", runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
