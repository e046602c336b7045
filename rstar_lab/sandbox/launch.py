"""Processes of our own for a bench, a test or a notebook: a service, its workers, a Redis."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rstar_lab.sandbox.runtime import kernel


def exit_with_parent() -> None:
    """Runs in a child before its program: nothing of ours outlives who started it, killed or not."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def serving(*arguments: str, redis: str | None = None, prefix: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A `rstar-lab sandbox serve` or `worker` process; prefix: a command that runs it, such as `ip netns exec NAME`.

    Gives what it says when it is ready, its pid, and `wait(seconds)`, which returns its exit status.
    """
    command = [*prefix, sys.executable, "-c", "from rstar_lab.sandbox.cli import main; main()", *arguments, "--json"]
    environment = {**os.environ, "RSTAR_LAB_REDIS_URL": redis} if redis else os.environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=exit_with_parent)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise RuntimeError(f"`sandbox {' '.join(arguments)}` did not start")
        yield {**json.loads(ready), "pid": process.pid, "wait": process.wait}
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TemporaryRedis:
    """A redis-server of our own, with a password, in a folder of its own, which can be killed and started again."""

    def __init__(self, folder: str, *, append_only: bool = True, bind: str = "127.0.0.1") -> None:
        self.folder, self.append_only, self.bind = folder, append_only, bind
        self.port, self.password = free_port(), os.urandom(16).hex()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.bind.split()[-1]}:{self.port}/0"

    def start(self) -> None:
        keep = "yes" if self.append_only else "no"
        settings = f'port {self.port}\nbind {self.bind}\ndir {self.folder}\nrequirepass {self.password}\nappendonly {keep}\nsave ""\n'
        self.process = subprocess.Popen(
            ["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=exit_with_parent
        )
        assert self.process.stdin is not None
        self.process.stdin.write(settings.encode())
        self.process.stdin.close()
        wait_for_port(self.port)

    def kill(self) -> None:
        """SIGKILL: no time to save anything."""
        if self.process:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def temporary_redis(*, append_only: bool = True, bind: str = "127.0.0.1") -> Iterator[TemporaryRedis]:
    """Raises FileNotFoundError where redis-server is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        redis = TemporaryRedis(folder, append_only=append_only, bind=bind)
        redis.start()
        try:
            yield redis
        finally:
            redis.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
