"""Starts a sandbox service or worker for a notebook, a bench or a test."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rstar_lab.hardware.processes import exit_with_parent, wait_or_kill


@contextlib.contextmanager
def serving(
    *arguments: str, redis: str | None = None, prefix: Sequence[str] = (), prepare: str = ""
) -> Iterator[dict[str, Any]]:
    """Run a `rstar-lab sandbox serve` or `worker` process while the block runs.

    Yields its ready message, with `pid` and `wait(seconds)`, which returns the exit status. prefix: a command that runs
    the process, such as `ip netns exec NAME`. prepare: Python code that it runs first.
    """
    code = f"{prepare}\nfrom rstar_lab.cli.sandbox import main\nmain()"
    command = [*prefix, sys.executable, "-c", code, *arguments, "--json"]
    environment = {**os.environ, "RSTAR_LAB_REDIS_URL": redis} if redis else os.environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=exit_with_parent)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise RuntimeError(f"`rstar-lab sandbox {' '.join(arguments)}` did not start; its error is printed above")
        yield {**json.loads(ready), "pid": process.pid, "wait": process.wait}
    finally:
        process.terminate()
        wait_or_kill(process, 60)
