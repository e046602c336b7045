"""Processes of our own for a bench, a test or a notebook: a service, its workers, a Redis."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def serving(*arguments: str, redis: str | None = None) -> Iterator[dict[str, Any]]:
    """A `rstar-lab sandbox serve` or `worker` process.

    Gives what it says when it is ready, its pid, and `wait(seconds)`, which returns its exit status.
    """
    command = [sys.executable, "-c", "from rstar_lab.sandbox.cli import main; main()", *arguments, "--json"]
    environment = {**os.environ, "RSTAR_LAB_SANDBOX_REDIS": redis} if redis else os.environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
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


@contextlib.contextmanager
def own_redis() -> Iterator[str | None]:
    """The address of a fresh redis-server on loopback with a password; None where none is installed."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        port, password = free_port(), os.urandom(16).hex()
        config = f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {password}\nappendonly yes\n"
        process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        try:
            wait_for_port(port)
            yield f"redis://:{password}@127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


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
