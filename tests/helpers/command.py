"""Run the command line in this process, which takes a fraction of the time of a new one."""

import signal
import sys
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
