"""Job and run folders from other people: they are listed, and nothing that they name runs, is contacted or is shown as markup."""

import asyncio
import base64
import dataclasses
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess

import psutil
import pytest
from helpers.jobs import job_spec
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Ssh, load_profile
from rstar_lab.jobs import JobBoard, JobStatus, attach, job_row, list_jobs, submit
from rstar_lab.jobs.progress import parse_event
from rstar_lab.jobs.render import sbatch_script
from rstar_lab.jobs.ssh.backend import profile_of_host
from rstar_lab.jobs.ssh.connection import Connection, agent_of
from rstar_lab.jobs.ssh.mirror import pull_run
from rstar_lab.jobs.store import JobFolder, JobSpec, jobs_folder, write_exports

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user requires root")


@pytest.fixture
def ssh_log(tmp_path, monkeypatch):
    """Replace ssh and the programs that copy over it by one that records its arguments."""
    log, bin_folder = tmp_path / "ssh.log", tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("ssh", "rsync"):
        (bin_folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {log}\nexit 255\n')
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    return log


def job_content(job_id, runs, **changes):
    return dataclasses.asdict(job_spec(runs, job_id, **{"cwd": "/", "run": f"{job_id}-rl"} | changes))


def write_file(runs, job_id, content):
    """Write job.json as a program of somebody else does."""
    folder = runs / ".jobs" / job_id
    folder.mkdir(parents=True, mode=0o700)
    (folder / "job.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def own_job(runs, job_id="mine", **changes):
    folder = JobFolder.of(runs, job_id)
    folder.save(JobSpec(**job_content(job_id, runs, **changes)))
    return folder


def list_rows(runs):
    done = CliRunner().invoke(app, ["jobs", "list", "--runs-dir", str(runs), "--json"])
    assert done.exit_code == 0, done.output
    return {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}


SSH_HANDLE = {"ssh": {"host": "evil.example", "config": "/tmp/evil"}, "code": "/x", "runs": "/y"}


@needs_root
def test_a_job_of_another_user_is_shown_as_foreign_and_never_queried(tmp_path, ssh_log, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    own_job(tmp_path)
    for job_id, backend, handle in [
        ("evil-1", "ssh", SSH_HANDLE),
        ("evil-2", "ray", {"address": "http://127.0.0.1:9"}),
    ]:
        folder = write_file(tmp_path, job_id, job_content(job_id, tmp_path, backend=backend, handle=handle))
        os.chown(folder, NOBODY, NOBODY)
    found = list_rows(tmp_path)
    assert {job_id: row["status"] for job_id, row in found.items()} == {
        "mine": "queued",
        "evil-1": "foreign",
        "evil-2": "foreign",
    }
    assert "belongs to user nobody" in found["evil-1"]["error"]
    assert {row.id: row.status for row in JobBoard(tmp_path).rows()} == {
        key: row["status"] for key, row in found.items()
    }
    with pytest.raises(UserError, match="belongs to user nobody"):
        attach("evil-1", runs_dir=tmp_path)
    jobs = {job.id: job for job in list_jobs(tmp_path)}
    for action in (jobs["evil-1"].stop, jobs["evil-1"].logs, jobs["evil-1"].status, jobs["evil-1"].wait):
        with pytest.raises(UserError, match="belongs to user nobody"):
            action()
    assert not ssh_log.exists()


def test_a_connection_in_a_received_job_folder_is_not_used(tmp_path, ssh_log):
    write_file(tmp_path, "evil", job_content("evil", tmp_path, backend="ssh", handle=SSH_HANDLE))
    write_file(tmp_path, "token", job_content("token", tmp_path, backend="ray", handle={"token_path": "/etc/hostname"}))
    assert {row["status"] for row in list_rows(tmp_path).values()} == {"unknown"}
    # The file of a job of one's own changes nothing either: only the record counts.
    changed = own_job(tmp_path, "changed", backend="local")
    (changed.path / "job.json").write_text(
        json.dumps(job_content("changed", tmp_path, backend="ssh", handle=SSH_HANDLE))
    )
    assert list_rows(tmp_path)["changed"]["status"] == "queued"
    assert not ssh_log.exists()
    own_job(tmp_path, "really-mine", backend="ssh", handle=SSH_HANDLE)
    list_rows(tmp_path)
    assert "evil.example" in ssh_log.read_text(), "a host that the user has named is contacted"


def test_records_and_secrets_of_jobs_are_private(tmp_path):
    folder = own_job(tmp_path)
    write_exports(folder.secrets, {"WANDB_API_KEY": "it's hidden"})
    assert stat.S_IMODE(folder.record.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.record, folder.secrets)} == {0o600}
    shown = subprocess.run(
        ["sh", "-c", f". {shlex.quote(str(folder.secrets))}; echo $WANDB_API_KEY"], capture_output=True
    )
    assert shown.stdout == b"it's hidden\n"
    assert not any("hidden" in path.read_text() for path in folder.path.iterdir())


DAMAGED = {
    "empty": "", "brace": "{", "list": "[]", "deep": "[" * 100_000, "number": "5", "no-keys": "{}",
    "types": json.dumps(job_content("types", "/x") | {"handle": "text", "created": 5}),
    "traversal": json.dumps(job_content("traversal", "/x") | {"run": "../../etc/passwd"}),
    "other": json.dumps(job_content("somebody", "/x")),
    "backend": json.dumps(job_content("backend", "/x") | {"backend": "../x"}),
    "option": json.dumps(job_content("option", "/x") | {"backend": "slurm", "handle": {"slurm_id": "--help"}}),
    "kube": json.dumps(job_content("kube", "/x") | {"backend": "kuberay", "handle": {"name": 5}}),
    "bytes": "\udcff",
}  # fmt: skip


def test_one_broken_job_does_not_end_list_or_board(tmp_path):
    own_job(tmp_path)
    for job_id, text in DAMAGED.items():
        folder = tmp_path / ".jobs" / job_id
        folder.mkdir(parents=True, mode=0o700)
        (folder / "job.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / ".jobs" / "no-file").mkdir()
    (tmp_path / ".jobs" / "link").symlink_to(tmp_path / ".jobs" / "mine")
    (own_job(tmp_path, "exit").path / "exit.json").write_text("{}")
    own_job(tmp_path, "record").record.write_text("{")
    names = {*DAMAGED, "no-file", "link", "exit", "record"}
    found = list_rows(tmp_path)
    assert {job_id: row["status"] for job_id, row in found.items()} == dict.fromkeys(names, "unknown") | {
        "mine": "queued"
    }
    assert all(found[name]["error"] for name in names)
    board = {row.id: row.status for row in JobBoard(tmp_path).rows()}
    assert board == {job_id: row["status"] for job_id, row in found.items()}


@pytest.mark.parametrize("mode", [0o700, 0o2775, 0o777])
def test_the_folder_of_jobs_is_sticky(tmp_path, mode):
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(mode)
    assert stat.S_IMODE(jobs_folder(runs).stat().st_mode) == mode | 0o1000
    (runs / ".jobs").chmod(mode)
    assert mode & 0o022 == 0 or stat.S_IMODE(jobs_folder(runs).stat().st_mode) == mode | 0o1000


@needs_root
def test_a_link_of_another_user_is_no_folder_of_jobs(tmp_path):
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    runs.mkdir()
    mine.mkdir(mode=0o755)
    (runs / ".jobs").symlink_to(mine)
    assert jobs_folder(runs).resolve() == mine  # a link of one's own
    os.chown(runs / ".jobs", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UserError, match="a link of user"):
        own_job(runs)
    assert not any(mine.iterdir())


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ("my-rlhf-rl", "my-rlhf-rl"),
        ("my-rlhf-rl", "my-rlhf-sft"),
        ("a-rl-b-rl", "a-rl-b-sft"),
        ("x-rl", "x-rl"),
        ("g-grid", None),
    ],
)
def test_the_run_of_a_job_is_found_by_its_exact_name(tmp_path, run, found):
    own_job(tmp_path, run=run)
    for name in ("my-sfthf-rl", "my-sfthf-sft", "a-sft-b-sft", "a-sft-b-rl", found or "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert attach("mine", runs_dir=tmp_path).run_dir == (tmp_path / found if found else None)


# Copies of runs


def test_a_pull_follows_no_link_in_a_run_folder(tmp_path, ssh_log):
    """`.mirror.lock -> ~/.bashrc` emptied the file at the next pull."""
    victim = tmp_path / "bashrc"
    victim.write_text("mine")
    handle = {"ssh": {"host": "evil.example"}, "code": "/x", "runs": "/y"}
    own_job(tmp_path, backend="ssh", handle=handle)
    folder = tmp_path / "mine-rl"
    mirror = {"host": "evil.example", "status": "running"}
    for name in (".mirror.lock", ".run.json.tmp", "transcripts"):
        folder.mkdir()
        (folder / "mirror.json").write_text(json.dumps(mirror))
        (folder / name).symlink_to(tmp_path if name == "transcripts" else victim)
        with pytest.raises(UserError, match=r"link or a pipe|not a regular file|cannot write"):
            pull_run(agent_of(JobFolder.of(tmp_path, "mine").spec().handle), "mine-rl", tmp_path, False)
        assert victim.read_text() == "mine" and not ssh_log.exists()
        shutil.rmtree(folder)


def test_pipes_in_job_folders_block_no_list_and_no_log(tmp_path):
    own_job(tmp_path)
    for job_id in ("job.json", "exit.json", "log.txt"):
        folder = own_job(tmp_path, job_id).path
        (folder / job_id).unlink(missing_ok=True)
        os.mkfifo(folder / job_id)
    found = {job_id: row["status"] for job_id, row in list_rows(tmp_path).items()}
    assert found == {"mine": "queued", "log.txt": "queued", "job.json": "queued", "exit.json": "unknown"}
    assert {row.id: row.status for row in JobBoard(tmp_path).rows()} == found
    with pytest.raises(UserError, match="not a regular file"):
        attach("log.txt", runs_dir=tmp_path).logs()


def test_a_file_of_a_job_is_not_written_through_a_link(tmp_path):
    folder, victim = own_job(tmp_path), tmp_path / "bashrc"
    victim.write_text("mine")
    (folder.path / f".exit.json.{os.getpid()}").symlink_to(victim)
    (folder.path / "exit.json").symlink_to(victim)
    folder.write("exit.json", {"code": 0, "stopped": False})
    assert victim.read_text() == "mine" and folder.exit().code == 0


def test_stopping_a_received_job_ends_no_process_that_its_folder_names(tmp_path):
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as mine:
        handle = {"pid": mine.pid, "created": psutil.Process(mine.pid).create_time()}
        write_file(tmp_path, "got", job_content("got", tmp_path, handle=handle))
        with pytest.raises(UserError, match="was not submitted by you on this machine"):
            attach("got", runs_dir=tmp_path).stop()
        assert mine.poll() is None
        mine.kill()


def test_stopping_a_received_job_cancels_no_other_job_of_the_user(tmp_path, ssh_log, monkeypatch):
    """Its file names the id of a job of the user in the queue, in Kubernetes or on Ray."""
    (tmp_path / "bin" / "squeue").write_text('#!/bin/sh\necho "7 RUNNING"\n')
    (tmp_path / "bin" / "scancel").write_text(f'#!/bin/sh\necho "scancel $@" >> {ssh_log}\n')
    for name in ("squeue", "scancel"):
        (tmp_path / "bin" / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as ray:
        ray.settimeout(0.1)
        monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", f"http://127.0.0.1:{ray.getsockname()[1]}")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        for backend, handle in [
            ("slurm", {"slurm_id": "7"}),
            ("ray", {}),
            ("ray", {"address": None}),
            ("kuberay", {"name": "x", "namespace": "default", "context": None}),
        ]:
            write_file(tmp_path, "got", job_content("got", tmp_path, backend=backend, handle=handle))
            assert list_rows(tmp_path)["got"]["status"] == "unknown"
            for action in ("stop", "logs"):
                done = CliRunner().invoke(app, ["jobs", action, "got", "--runs-dir", str(tmp_path)])
                assert isinstance(done.exception, UserError), (backend, action, done.exception)
            shutil.rmtree(tmp_path / ".jobs" / "got")
        with pytest.raises(TimeoutError):
            ray.accept()
    assert not ssh_log.exists()
    own_job(tmp_path, backend="slurm", handle={"slurm_id": "7"})
    (tmp_path / "bin" / "squeue").write_text('#!/bin/sh\necho "7 CANCELLED"\n')
    CliRunner().invoke(app, ["jobs", "stop", "mine", "--runs-dir", str(tmp_path)])
    assert ssh_log.read_text() == "scancel 7\n"


@pytest.mark.parametrize(
    "event", ['{"event": "rl", "done": 1e308, "total": 1e-300, "step_s": 1e308}', '{"event": "rl", "done": 1e400}']
)
def test_numbers_in_a_log_do_not_end_the_board(tmp_path, event):
    folder = own_job(tmp_path, handle={"pid": os.getpid(), "created": psutil.Process().create_time()})
    folder.log.write_text(f'{{"event": "rl", "done": 1, "total": 1e14, "step_s": 1e14}}\n{event}\n')
    (row,) = JobBoard(tmp_path).rows()
    assert row.status == "running" and row.cells()


def test_a_name_that_is_too_long_does_not_end_the_list(tmp_path):
    own_job(tmp_path, runs_dir="x" * 100_000, recipe="x" * 100_000, profile="x" * 100_000)
    assert list_rows(tmp_path)["mine"]["status"] == "queued" and JobBoard(tmp_path).rows()


# Hosts


@pytest.mark.parametrize(
    "host",
    [
        "-oProxyCommand=id", "a@-x", "a,-oProxyCommand=id", "ssh://a@-x", "[-x]", "a b", "a\nb", "$(id)", "a;id",
        "`id`", "--",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["host", "user", "jump"])
def test_a_host_cannot_be_an_option_or_a_command(host, key, ssh_log):
    with pytest.raises(UserError, match=rf"ssh\.{key} .*not the name of a host or user"):
        Connection(Ssh(**{"host": "cluster", key: host}))
    assert not ssh_log.exists()


@pytest.mark.parametrize("host", ["cluster", "me@login.example.org", "10.0.0.7", "[fd00::7]", "fd00::7", "a_b-c"])
def test_ordinary_hosts_are_accepted(host):
    assert Connection(Ssh(host=host, jump="a,me@b:22")).host == host


def test_the_profile_of_a_host_chooses_no_connection_and_no_secrets(tmp_path, monkeypatch):
    profile = load_profile("laptop").model_dump(mode="json") | {
        "backend": "slurm",
        "secrets": ["AWS_SECRET_ACCESS_KEY"],
    }
    profile["ssh"] = {
        "host": "other", "user": "mallory", "port": 1, "jump": "evil.example", "config": "runs/x/cfg", "python": "/opt/python",
        "setup": ["module load x"], "remote_dir": "work", "backend": "local",
    }  # fmt: skip
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    encoded = base64.b64encode(f"rstar-lab-profile:\n{json.dumps(profile)}".encode()).decode()
    (bin_folder / "ssh").write_text(f"#!/bin/sh\necho {encoded} | base64 -d\n")
    (bin_folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    found = profile_of_host("login")
    assert found.secrets == [] and found.backend == "ssh"
    assert found.ssh == Ssh(
        host="login",
        backend="slurm",
        python="/opt/python",
        setup=["module load x"],
        remote_dir="work",
    )


@pytest.mark.parametrize("name", ["x\ntouch PWNED #", "../x", "-x", "", "a b", "a" * 200, "a;b", ".hidden", "ü"])
def test_submit_checks_the_name(name, tmp_path):
    with pytest.raises(UserError, match="name of the run"):
        submit("tiny_fast", overrides={"name": name}, runs_dir=tmp_path, preflight=False)
    with pytest.raises(UserError, match="id of the job"):
        submit("tiny_fast", job_id=name or " ", runs_dir=tmp_path, preflight=False)
    assert not list(tmp_path.iterdir())


# Code that waits in a queue


def start_of_script(script):
    """Return the part of a batch script that runs before the job's own code."""
    return script[: script.index('cd "$job/code"')] + "\necho started\n"


@needs_root
@pytest.mark.parametrize("swapped", [False, True])
def test_a_batch_script_runs_no_folder_of_another_user(tmp_path, swapped):
    profile = load_profile("h100x8")
    folder = tmp_path / "job"
    (folder / "code").mkdir(parents=True)
    spec = JobSpec("job", "toy", "h100x8", "slurm", ["python3"], "/", str(tmp_path), {}, "now")
    script = start_of_script(sbatch_script(profile, spec, folder))
    if swapped:
        folder.rename(tmp_path / "away")
        (folder / "code").mkdir(parents=True)
        os.chown(folder, NOBODY, NOBODY)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ("started" in done.stdout) != swapped and ("does not belong to you" in done.stdout) == swapped, done


# Text of jobs


HOSTILE = "\x1b]52;c;ZXZpbA==\x1b\\ [/x] [bold]b[/] \x1b[2J\x07 \x9b2J \u202eabc"


def without_control(text):
    return not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in text)


def test_text_of_jobs_reaches_the_terminal_without_control_sequences(tmp_path):
    folder = own_job(tmp_path, recipe=HOSTILE, profile=HOSTILE)
    folder.log.write_text(
        f"{HOSTILE}\n\x1b[31mred\x1b[0m\n" + json.dumps({"event": HOSTILE, "done": 1, "total": 2}) + "\n"
    )
    folder.write("exit.json", {"code": 0, "stopped": False})
    write_file(tmp_path, "a[bold]", "{")
    for command in (
        ["list"],
        ["status", "mine"],
        ["logs", "mine"],
        ["logs", "mine", "--follow"],
        ["status", "a[bold]"],
    ):
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["jobs", *command, "--runs-dir", str(tmp_path)])
        assert done.exit_code == (1 if command[1:] == ["a[bold]"] else 0), (command, done.output)
        assert without_control(done.stdout + done.stderr), command
        if command[0] == "logs":
            assert "[/x] [bold]b[/]" in done.stdout and "\nred\n" in done.stdout
    listed = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["jobs", "list", "--runs-dir", str(tmp_path)])
    assert "a[bold]" in listed.stdout


@pytest.mark.parametrize(
    "event",
    [
        {"event": "rl", "done": "x", "total": {}}, {"event": 5, "done": 1}, {"done": 1}, {"event": "rl", "done": 1, "total": None},
        {"event": "rl", "done": 3, "total": 10, "reward": "high", "error_rate": [], "step_s": "x"},
        {"event": "rl", "done": 1e308, "total": 1e-308}, {"event": "rl", "done": True, "total": True},
    ],
)  # fmt: skip
def test_events_that_a_program_prints_do_not_end_board_or_watch(tmp_path, event, capsys):
    folder = own_job(tmp_path)
    folder.log.write_text(json.dumps(event) + '\n{"event": "rl", "done": Infinity}\n')
    folder.write("exit.json", {"code": 0, "stopped": False})
    board = JobBoard(tmp_path)
    board.to_html()
    assert attach("mine", runs_dir=tmp_path).watch() == JobStatus.FINISHED
    printed = capsys.readouterr().out
    assert asyncio.run(attach("mine", runs_dir=tmp_path).watched()) == JobStatus.FINISHED
    assert capsys.readouterr().out == printed
    assert job_row(attach("mine", runs_dir=tmp_path))["status"] == "finished"


def test_an_event_keeps_its_numbers():
    event = {"event": "rl", "done": 3, "total": 10, "reward": 0.5}
    assert parse_event(json.dumps(event)) == event
    assert parse_event("text") is None and parse_event("[1]") is None


def test_ssh_gets_the_host_after_all_options(ssh_log):
    with pytest.raises(UserError):
        Connection(Ssh(host="cluster")).run("true")
    words = ssh_log.read_text().splitlines()
    assert words[words.index("cluster") - 1] == "--" and shlex.split(words[-1])[0] == "exec"


def test_watch_prints_what_the_first_step_and_the_end_say(tmp_path, capsys):
    folder = own_job(tmp_path)
    lines = [
        {"event": "first_step", "line": "first step: 8 of 8\x1b[31m"},
        {"nothing_learnt": "nothing was learnt"},
        {"line": 5},
    ]
    folder.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.write("exit.json", {"code": 0, "stopped": False})
    attach("mine", runs_dir=tmp_path).watch()
    printed = capsys.readouterr().out
    assert "first step: 8 of 8" in printed and "nothing was learnt" in printed and without_control(printed)
