"""Images of figures, drawn by a local Chromium or Chrome in a process of its own, so that a broken browser cannot stop a notebook."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import plotly.graph_objects as go
import psutil

from rstar_lab.runs import RunStoreError

LIMIT_S = 60.0  # for an image, and for the start of the browser with the first one


class _Renderer:
    """The process with the browser. After the first failure it is not started again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._failure = ""

    def image(self, figure: go.Figure, options: dict[str, Any]) -> bytes:
        with self._lock:
            if self._failure:
                raise RunStoreError(self._failure)
            connection = self._connection or self._start()
            watchdog = threading.Timer(LIMIT_S, self._kill)
            watchdog.start()  # sending a large figure waits for the process, too
            try:
                connection.send_bytes(json.dumps([figure.to_json(), options]).encode())
                answer = connection.recv_bytes()
            except (OSError, EOFError):
                self._fail(f"the browser ended, or drew nothing within {LIMIT_S:g} s")
            finally:
                watchdog.cancel()
            return answer[1:] if answer.startswith(b"+") else self._fail(answer.decode())

    def _fail(self, reason: str) -> NoReturn:
        self._failure = f"cannot draw images of figures: {' '.join(reason.split())[:300]}"
        self._kill()
        raise RunStoreError(self._failure)

    def _kill(self) -> None:
        _kill_children(self._process.pid)
        self._process.kill()
        self._process.wait()

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        return self._connection


_RENDERER = _Renderer()


def figure_image(figure: go.Figure, format: str, width: int, height: int, scale: float = 1) -> bytes:
    """Return an image of a figure. format: svg, png or pdf. width, height: pixels.

    Raises RunStoreError if no browser is installed, or if it failed or did not answer, now or for an earlier image of this process.
    """
    return _RENDERER.image(figure, {"format": format, "width": width, "height": height, "scale": scale})


def _kill_children(pid: int) -> None:
    """Kill the browser of a renderer, which is in a session of its own."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            child.kill()


async def _serve(connection: Connection) -> None:
    import kaleido

    async with kaleido.Kaleido() as browser:
        while True:
            figure, options = json.loads(await asyncio.to_thread(connection.recv_bytes))
            connection.send_bytes(b"+" + await browser.calc_fig(json.loads(figure), opts=options))


def _main(connection: Connection) -> None:
    """Answer requests until the other end closes. Then end the browser too, which may not react any more."""
    try:
        asyncio.run(_serve(connection))
    except BaseException as error:
        with contextlib.suppress(OSError):  # the other end is closed
            connection.send_bytes((str(error) or type(error).__name__).encode())
    _kill_children(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])))
