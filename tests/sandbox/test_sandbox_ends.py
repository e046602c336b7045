"""However a sandbox command ends, nothing stays: no process, control group, temporary folder or token file."""

import asyncio
import contextlib
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rstar_lab.common.temporary import remove_stale_folders
from rstar_lab.sandbox import LocalSandbox, SandboxClient

pytestmark = pytest.mark.slow

TO_ALL = "SIGKILL to all processes"
ENDS = ["SIGTERM", "SIGHUP", "SIGINT", "SIGKILL", TO_ALL]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder for the temporary files and the token files of this test's commands."""
    for name, variable in (("tmp", "TMPDIR"), ("state", "XDG_STATE_HOME")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("RSTAR_LAB_SANDBOX_TOKEN", raising=False)
    return tmp_path


@contextlib.contextmanager
def command(*arguments: str, redis: str = "", output: int | None = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Run a sandbox command in a session of its own; kill what is left of it at the end."""
    environment = {**os.environ, **({"RSTAR_LAB_REDIS_URL": redis} if redis else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "rstar_lab.cli", "sandbox", *arguments],
        stdout=output, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        # A background job of a shell starts with SIGINT ignored, and its children inherit that.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    own = psutil.Process(process.pid)
    return [own, *own.children(recursive=True)]


def left(home: Path, processes: list[psutil.Process]) -> list[str]:
    """Wait up to 10 s for the end of the processes; return what is left of them."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    owners = {str(process.pid) for process in processes}
    groups = glob.glob("/sys/fs/cgroup/**/rstar-lab-sandbox-*", recursive=True)  # noqa: PTH207
    folders = [*glob.glob("/tmp/rstar-programs-*"), *groups]  # noqa: PTH207
    own = [path for path in folders if owners & set(Path(path).name.split("-"))]
    return [*map(str, alive), *own, *(str(path) for path in home.rglob("*") if not path.is_dir())]


def end(process: subprocess.Popen, how: str) -> list[psutil.Process]:
    processes = family(process)
    for victim in processes if how == TO_ALL else processes[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL if how == TO_ALL else getattr(signal, how))
    return processes


async def use(url: str) -> None:
    """Run a program and a cell of a session, so that there are supervisors."""
    async with SandboxClient(url) as client:
        assert (await client.run("print(1)")).stdout == "1\n"
        assert (await client.run("print(2)", session="s")).stdout == "2\n"


SERVE = ("serve", "--port", "0", "--workers", "1", "--json")


def serve(home: Path, how: str) -> tuple[list[psutil.Process], int | None]:
    """Run a service, end it, and return its processes and exit status."""
    with command(*SERVE) as process:
        ready = process.stdout.readline()
        assert ready, process.stderr.read()
        asyncio.run(use(ready.split('"url": "')[1].split('"')[0]))
        processes = end(process, how)
        return processes, process.wait(60)


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_a_service(home, how):
    processes, status = serve(home, how)
    if how.startswith("SIGKILL"):
        assert status == -signal.SIGKILL
        others, _ = serve(home, "SIGTERM")  # removes what a killed process could not remove
        processes += others
    else:
        assert status == 0
    assert left(home, processes) == []


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGINT", "SIGKILL"])
def test_nothing_is_left_of_a_service_that_is_ended_while_it_starts(home, how):
    for delay_s in (0.5, 1.0, 2.0):
        with command(*SERVE) as process:
            time.sleep(delay_s)
            processes = end(process, how)
            process.wait(30)
            assert "Traceback" not in process.stderr.read()
        serve(home, "SIGTERM") if how == "SIGKILL" else None
        assert left(home, processes) == [], delay_s


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_nothing_is_left_of_a_worker(home, redis, how):
    with command("worker", "--workers", "1", "--json", redis=redis.url) as process:
        assert process.stdout.readline(), process.stderr.read()
        processes = end(process, how)
        assert process.wait(60) == (-signal.SIGKILL if how == "SIGKILL" else 0)
    assert left(home, processes) == []


def test_a_closed_output_ends_a_check_and_not_a_service(home):
    reading, writing = os.pipe()
    os.close(reading)
    with command("check", output=writing) as check:
        os.close(writing)
        processes = family(check)
        check.wait(60)
        assert "Traceback" not in check.stderr.read()
    with command(*SERVE) as process:
        url = process.stdout.readline().split('"url": "')[1].split('"')[0]
        process.stdout.close()
        process.stdout = None
        asyncio.run(use(url))
        processes += end(process, "SIGTERM")
        assert process.wait(60) == 0
    assert left(home, processes) == []


def test_ten_killed_services_leave_no_more_than_one(home):
    processes = []
    for _ in range(10):
        with command(*SERVE) as process:
            assert process.stdout.readline()
            processes += end(process, TO_ALL)
    others, _ = serve(home, "SIGTERM")
    assert left(home, [*processes, *others]) == []


def test_a_service_with_little_memory_ends_at_once(home):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1_500_000_000, 1_500_000_000))"
    code = f"{limit}\nfrom rstar_lab.cli.sandbox import main\nmain()"
    with subprocess.Popen([sys.executable, "-c", code, *SERVE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        time.sleep(1)
        processes = end(process, "SIGTERM")
        assert process.wait(30) == 0
    assert left(home, processes) == []


async def test_a_cancelled_start_leaves_no_process():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    for delay_s in (0.0, 0.05, 0.15):
        sandbox = LocalSandbox(workers=1)
        starting = asyncio.create_task(sandbox.start())
        await asyncio.sleep(delay_s)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await sandbox.aclose()  # ends a start that was not cancelled in time
        new = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert not psutil.wait_procs(new, timeout=5)[1]


def test_only_the_folder_of_a_killed_process_is_removed(tmp_path):
    code = "import sys, time\nfrom pathlib import Path\nfrom rstar_lab.common.temporary import LockedFolder\n"
    code += f"folder = LockedFolder('weights', Path({str(tmp_path)!r}))\n(folder.path / 'a').touch()\n"
    code += "print(folder.path, flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        folder = Path(owner.stdout.readline().strip())
        remove_stale_folders(tmp_path)
        assert (folder / "a").exists()
        owner.kill()
    (tmp_path / "rstar-tokens-0").mkdir()
    (tmp_path / "rstar-weights-1-01234567").symlink_to(tmp_path / "rstar-tokens-0")
    remove_stale_folders(tmp_path)
    assert not folder.exists() and (tmp_path / "rstar-tokens-0").exists()
