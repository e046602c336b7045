"""Memory of this process and its descendants (Linux): peak measurement and release of free heap pages."""

import ctypes
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


def process_tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes. Shared pages are counted once (proportional set
    size)."""
    total = 0
    pending = [pid]
    while pending:
        folder = Path(f"/proc/{pending.pop()}")
        try:
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
            for task in (folder / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except OSError:  # the process has ended
            continue
    return total


def release_free_heap() -> None:
    """Return free heap pages to the system. Batches of varying shape fragment the heap: without this, a process that trains
    the tiny model grows to three times its working set."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class PeakMemory:
    """Measures peak memory while its block runs, by sampling. `gb`: the peak in 10^9 bytes."""

    def __init__(self, every_s: float = 1.0):
        self._pid, self._every_s = os.getpid(), every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak = 0

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, process_tree_bytes(self._pid))
            if self._stop.wait(self._every_s):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def gb(self) -> float:
        return round(self._peak / 1e9, 2)
