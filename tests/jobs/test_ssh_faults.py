"""Jobs over ssh on hosts without permissions and behind a jump host; killed copies; and what is never sent."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.ssh_server import SshServer, forget_agents

from rstar_lab.common.errors import UserError
from rstar_lab.jobs import JobStatus, submit
from rstar_lab.jobs.pack import pack, pack_tar
from rstar_lab.jobs.ssh import mirror
from rstar_lab.jobs.ssh.backend import install_tree
from rstar_lab.jobs.ssh.connection import Agent, Connection, ConnectionLost
from rstar_lab.runs.reader import RunReader

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Permissions of files also hold for root without these capabilities.
    drop = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
    server = SshServer(tmp_path_factory.mktemp("sshd"), prefix=prefix)
    server.config.write_text(
        server.config.read_text() + server.config.read_text().replace("Host cluster", "Host bastion")
    )
    yield server
    forget_agents()
    server.stop()


@pytest.mark.slow
def test_a_remote_folder_without_permission_is_named(settings, tmp_path):
    (tmp_path / "far").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"cannot write to .*/far on the host: .*Permission denied"):
        install_tree(Connection(settings), lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [".", "trajectories", "run.json"])
def test_a_run_that_cannot_be_read_is_named_and_shows_no_half_step(agent, tmp_path, name, write_run):
    write_run(Path(agent.runs))
    locked = Path(agent.runs, "run", name)
    mode = locked.stat().st_mode
    locked.chmod(0)
    try:
        with pytest.raises(UserError, match=r"run/?.*: permission denied; change its permissions|[Pp]ermission denied"):
            mirror.pull_run(agent, "run", tmp_path / "here", False)
    finally:
        locked.chmod(mode)
    assert not (tmp_path / "here" / "run" / "metrics.jsonl").exists()
    mirror.pull_run(agent, "run", tmp_path / "here", False)
    assert len(RunReader(tmp_path / "here" / "run").metrics()) == 3


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_not_reported_as_a_change(agent, tmp_path, write_run):
    write_run(Path(agent.runs))
    locked = next(Path(agent.runs, "run", "transcripts").rglob("*.parquet"))
    locked.chmod(0)
    with pytest.raises(UserError, match=rf"{locked.name}.*Permission denied.*Change the permissions"):
        mirror.pull_run(agent, "run", tmp_path / "here", False)


@pytest.mark.slow
def test_a_pull_that_is_killed_continues(agent, tmp_path, write_run):
    write_run(Path(agent.runs), steps=20)
    here = tmp_path / "here"
    code = (
        "import sys; from pathlib import Path; from rstar_lab.jobs.ssh import mirror; from rstar_lab.hardware.profiles import Ssh\n"
        "from rstar_lab.jobs.ssh.connection import Agent, Connection\n"
        f"agent = Agent(Connection(Ssh(**{agent.connection.settings.model_dump()!r})), {str(ROOT)!r}, {agent.runs!r})\n"
        f"mirror.pull_run(agent, 'run', Path({str(here)!r}), False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while process.poll() is None and not list((here / "run").rglob("*.parquet")):
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if (here / "run" / "metrics.jsonl").exists():
        assert RunReader(here / "run").read("trajectories").num_rows >= 8 * len(RunReader(here / "run").metrics())
    mirror.pull_run(agent, "run", here, False)
    assert RunReader(here / "run").metrics() == RunReader(Path(agent.runs, "run")).metrics()
    assert not list((here / "run").rglob(".*.tmp"))


@pytest.mark.slow
def test_a_jump_host_carries_commands_and_copies(server, settings, tmp_path, write_run):
    Connection(settings).close()  # with a connection of its own
    behind = settings.model_copy(update={"jump": "bastion"})
    (tmp_path / "far" / "runs").mkdir(parents=True)
    write_run(tmp_path / "far" / "runs")
    agent = Agent(Connection(behind), str(ROOT), str(tmp_path / "far" / "runs"))
    before = (server.folder / "sshd.log").read_text()
    mirror.pull_run(agent, "run", tmp_path / "here", False)
    agent.close()
    assert len(RunReader(tmp_path / "here" / "run").metrics()) == 3
    accepted = (server.folder / "sshd.log").read_text()[len(before) :].count("Accepted publickey")
    assert accepted >= 2, "one login on the jump host, one on the host"
    with pytest.raises(ConnectionLost, match=r"cannot reach other@cluster through nowhere\.invalid"):
        Connection(settings.model_copy(update={"jump": "nowhere.invalid", "user": "other"})).run("true")


def linked_tree(tmp_path):
    """A tree with links inside of it, and with links to a secret and to a folder outside."""
    root, outside = tmp_path / "tree", tmp_path / "outside"
    for path in (root / "code" / "a.py", root / "b.py", outside / "id_ed25519", outside / "data" / "big.bin"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    for name, target in {
        "package": "code", "c.py": "b.py", "notes.txt": "../outside/id_ed25519", "data": outside / "data", "loop": "loop",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    return root


@pytest.mark.parametrize("git", [False, True])
def test_links_inside_of_the_tree_are_sent_as_links_and_others_are_not(git, tmp_path):
    root = linked_tree(tmp_path)
    if git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    package = pack(root, tmp_path / "out")
    archive, _ = pack_tar(root)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", "-", "-C", str(tmp_path / "unpacked")], input=archive, check=True)
    for copy in (tmp_path / "out", tmp_path / "unpacked"):
        assert (copy / "package" / "a.py").read_text() == "a.py" and (copy / "c.py").read_text() == "b.py"
        assert (copy / "package").is_symlink()
        assert not any(os.path.lexists(copy / name) for name in ("notes.txt", "data"))
    assert "links that are absolute or leave the tree are not sent: data" in str(package) and "notes.txt" in str(
        package
    )


@pytest.mark.slow
def test_a_job_that_prints_its_environment_shows_no_secret(settings, tmp_path, monkeypatch):
    """The profile names the secrets; their names do not look like secrets, and one has several lines."""
    first, second = secrets.token_hex(12), secrets.token_hex(12)  # this file is part of the tree that is sent
    values = {"MY_LOGIN": first, "MY_CERTIFICATE": f"-----BEGIN-----\n{second}\n-----END-----"}
    content = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text())
    far = settings.model_copy(update={"setup": [f"export PYTHONPATH={tmp_path}"]})
    content |= {"backend": "ssh", "ssh": far.model_dump(exclude_none=True), "secrets": list(values)}
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(content))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    code = tmp_path / "rewards.py"
    code.write_text(
        "import os\nprint(*os.environ.items(), *os.environ.values(), sep='\\n', flush=True)\nraise SystemExit(3)\n"
    )
    messages: list[str] = []
    job = submit("tiny_fast", str(tmp_path / "profile.yaml"), overrides={"rl.reward": "rewards:f"}, runs_dir=tmp_path / "here",
                 name="env", preflight=False, log=messages.append)  # fmt: skip
    assert job.wait(timeout_s=120) == JobStatus.FAILED, "the module of the reward ends it"
    log = job.logs()
    files = [path for folder in ("far", "here") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    for secret in (first, second):
        assert secret not in log and not any(secret in message for message in messages)
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert "MY_LOGIN" in log and "***" in log, "the job printed its environment"
