"""A Redis server for a measurement or a test."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

from rstar_lab.hardware.processes import exit_with_parent, free_port


class TemporaryRedis:
    """A redis-server with a password and a folder of its own, which can be killed and started again."""

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
        """Kill the server, so that it cannot save anything."""
        if self.process:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def temporary_redis(*, append_only: bool = True, bind: str = "127.0.0.1") -> Iterator[TemporaryRedis]:
    """Run a TemporaryRedis while the block runs. Raises FileNotFoundError if redis-server is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        redis = TemporaryRedis(folder, append_only=append_only, bind=bind)
        redis.start()
        try:
            yield redis
        finally:
            redis.kill()


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
