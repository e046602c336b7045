"""Two real vLLM servers started by `rstar-lab serve`, shared by the tests that need them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

COMMAND = [str(Path(sys.executable).parent / "rstar-lab")]
KEY = "a-token-for-tests"


@dataclass
class Served:
    urls: list[str]
    process: subprocess.Popen[str]

    def of(self, url: str) -> psutil.Process:
        """Return the process that serves HTTP at a URL. The engine is its child."""
        port = url.rsplit(":", 1)[1]
        found = (p for p in psutil.Process(self.process.pid).children(recursive=True) if port in p.cmdline())
        return next(p for p in found if "rstar_lab.rl.serving.keeper" not in p.cmdline())

    def signal(self, url: str, number: int) -> None:
        """Send a signal to all processes of a server."""
        server = self.of(url)
        for process in [*server.children(recursive=True), server]:
            process.send_signal(number)


def members(groups: list[int]) -> list[int]:
    """Return the live processes of these process groups."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass
    return found


def engines_of(folder: Path) -> list[psutil.Process]:
    """Return the vLLM processes that log below this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(str(folder) in file.path for file in process.open_files() if "vllm-" in file.path):
                found.append(process)
    return found


def wait_until(done, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def serve(model: Path, *flags: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `rstar-lab serve` while the block runs."""
    environment = os.environ | {"RSTAR_LAB_API_KEY": KEY}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*COMMAND, "serve", str(model), "--json", "--port", "0", *flags],
            stdout=output, stderr=output, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def two_servers(model: Path, log: Path) -> Iterator[Served]:
    flags = [
        *["--replicas", "2", "--dtype", "float32", "--updatable", "--"],
        *["--kv-cache-memory-bytes", str(100 * 2**20), "--max-num-seqs", "32"],
    ]
    with serve(model, *flags, log=log) as process:
        assert wait_until(lambda: '"urls"' in log.read_text() or process.poll() is not None, 600), log.read_text()
        line = next((line for line in log.read_text().splitlines() if '"urls"' in line), None)
        assert line, log.read_text()
        said = json.loads(line)
        yield Served(said["urls"], process)
        groups = [child.pid for child in psutil.Process(process.pid).children()]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert wait_until(lambda: not members(groups))
