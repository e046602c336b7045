"""How a command ends: SIGTERM, SIGHUP (a closed terminal) and a closed output end it as Ctrl-C does. Also ends other processes."""

import atexit
import contextlib
import errno
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any, NoReturn

STOPPED = "stopped; run the same command again to continue"
CLOSED = (errno.EPIPE, errno.EIO)  # of a pipe without a reader, and of a terminal that is gone
_cause = signal.SIGINT  # what ends this process


def end_like_ctrl_c() -> None:
    """Let SIGTERM, SIGHUP and a closed output raise what Ctrl-C raises, once. A signal that the caller ignores stays ignored."""
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child ends as it would without this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        _stop(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)
    sys.stdout, sys.stderr = _Output(sys.stdout, stops=True), _Output(sys.stderr, stops=False)  # type: ignore[assignment]


def _stop(cause: signal.Signals) -> None:
    global _cause
    _cause = signal.SIGPIPE if output_is_closed() else cause
    for number in (signal.SIGTERM, signal.SIGHUP):  # a second one would interrupt the cleaning up
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def exit_code() -> int:
    """Return the exit code of a process that was ended: 128 plus the number of the signal."""
    return 128 + _cause


def output_is_closed() -> bool:
    """Whether the process was ended by a closed output."""
    return _cause is signal.SIGPIPE


def end_now(code: int) -> NoReturn:
    """End this process after its clean-up, without waiting for threads, such as one that still imports a library."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_or_kill(process: "subprocess.Popen[Any]", grace_s: float) -> int:
    """Wait until a process of this one has ended, kill it after `grace_s` seconds, and return its exit code."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Output:
    """A text stream that is replaced by the null device when nobody reads it any more."""

    def __init__(self, stream: Any, *, stops: bool):
        self._stream, self._stops = stream, stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try("write", text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments: Any) -> Any:
        global _cause
        try:
            return getattr(self._stream, method)(*arguments)
        except OSError as error:
            if error.errno not in CLOSED:
                raise
        with contextlib.suppress(OSError, ValueError):  # what is buffered goes there too
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self._stops and _cause is signal.SIGINT:
            _cause = signal.SIGPIPE
            os.kill(os.getpid(), signal.SIGTERM)  # only the main thread can change signal handlers
        return len(arguments[0]) if arguments else None
