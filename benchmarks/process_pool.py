"""A pool of processes for a measurement, which leaves none of them behind."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from rstar_lab.hardware.processes import exit_with_parent


@contextmanager
def process_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of spawned processes. They end with this process, however it ends, and at once if the block raises."""
    hook = threading.excepthook
    try:
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _end_with, (os.getpid(),)) as pool:
            try:
                yield pool
            except BaseException:
                # Python's thread of the pool raises InvalidStateError if calls are cancelled before their processes are killed.
                threading.excepthook = lambda _: None
                for process in multiprocessing.active_children():
                    process.kill()
                raise
    finally:
        threading.excepthook = hook


def _end_with(parent: int) -> None:
    exit_with_parent()
    if os.getppid() != parent:  # it ended while this process started
        os._exit(1)
