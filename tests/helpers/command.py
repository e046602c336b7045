"""Run the command line in this process, which takes a fraction of the time of a new one."""

import contextlib
import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_code(*arguments: str) -> int:
    """Run `rstar-lab` and return its exit code. Afterwards signals end this process again, which a command that ends ignores."""
    from rstar_lab.cli import command_line

    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        with mock.patch.object(sys, "argv", ["rstar-lab", *arguments]):
            command_line.run()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `rstar-lab` in a folder and return its exit code and what it printed, as `subprocess.run` does."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd or Path.cwd()), redirect_stdout(output), redirect_stderr(errors):
        code = exit_code(*arguments)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())
