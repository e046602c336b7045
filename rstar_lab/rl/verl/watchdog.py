"""Report what the rollouts of a hung step wait for, then end the run so that its job can restart it from a checkpoint."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rstar_lab.runs.files import write_json
from rstar_lab.runs.writer import RunWriter
from rstar_lab.untrusted.text import counted

EXIT_CODE = 70
STOP_FILE = ".stop"  # the driver creates it in the run's folder when it is ended


class PendingOperations:
    """What each rollout waits for: generation, tools (with the environment) or reward."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float]] = {}

    def begin(self, traj_id: str, operation: str) -> None:
        self._open[traj_id] = operation, time.monotonic()

    def end(self, traj_id: str) -> None:
        self._open.pop(traj_id, None)

    def report(self) -> dict[str, Any]:
        """Return {"host", "pid", "waits": {operation: {"count", "longest_s", "traj_id"}}}."""
        now, waits = time.monotonic(), dict[str, dict[str, Any]]()
        for traj_id, (operation, since) in list(self._open.items()):
            entry = waits.setdefault(operation, {"count": 0, "longest_s": 0.0, "traj_id": traj_id})
            entry["count"] += 1
            if now - since > entry["longest_s"]:
                entry["longest_s"], entry["traj_id"] = round(now - since, 1), traj_id
        return {"host": socket.gethostname(), "pid": os.getpid(), "waits": waits}


PENDING = PendingOperations()


class Watchdog:
    """Watches the phases of a step, and ends the process when STOP_FILE exists.

    Args:
        limit_s: maximum seconds of one phase; None disables the watchdog.
        pending: returns the operations that every worker waits for; called once, for the report. terminate: called after the report.
    """

    def __init__(
        self,
        limit_s: float | None,
        writer: RunWriter,
        pending: Callable[[], list[dict[str, Any]]],
        terminate: Callable[[], None] = lambda: os._exit(EXIT_CODE),
    ):
        self.limit_s, self.writer, self.pending, self.terminate = limit_s, writer, pending, terminate
        self._now: tuple[str, int, float] | None = None
        if limit_s is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        self._now = (phase, step, time.monotonic())

    def leave(self) -> None:
        self._now = None

    def _watch(self) -> None:
        assert self.limit_s is not None
        while True:
            time.sleep(min(1.0, self.limit_s / 4))
            if (self.writer.run_dir / STOP_FILE).exists():
                return signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            now = self._now
            if now and time.monotonic() - now[2] > self.limit_s:
                self.report(*now)
                return self.terminate()

    def report(self, phase: str, step: int, since: float) -> dict[str, Any]:
        """Write watchdog.json and mark the run as failed."""
        waits: Any
        try:
            waits = self.pending()
        except Exception as error:
            waits = [{"host": "unknown", "error": repr(error)}]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
        stacks = {names.get(ident, str(ident)): traceback.format_stack(frame)[-3:] for ident, frame in frames}
        waited_s = round(time.monotonic() - since, 1)
        report = {"step": step, "phase": phase, "waited_s": waited_s, "workers": waits, "stacks": stacks}
        write_json(self.writer.run_dir / "watchdog.json", report)
        message = f"step {step} has waited {waited_s} s for {phase}; {_describe(waits)}"
        print(f"watchdog: {message}; see {self.writer.run_dir / 'watchdog.json'}", file=sys.stderr, flush=True)
        self.writer.finish("failed", error=message)
        return report


def _describe(workers: list[dict[str, Any]]) -> str:
    lines = [
        f"{operation} on {worker['host']}: {counted(wait['count'], 'rollout')} waiting, {wait['traj_id']} for {wait['longest_s']} s"
        for worker in workers
        for operation, wait in worker.get("waits", {}).items()
    ]
    return "; ".join(lines) or "no rollout is in progress"
