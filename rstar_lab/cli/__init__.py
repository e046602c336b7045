"""The `rstar-lab` command: one file per command, registered in `command_line`."""

import gc
import os
import signal
import tempfile
from pathlib import Path


def main() -> None:
    """Import the commands and run the command line. Ctrl-C during the imports ends the process with code 130."""
    # Must be set before torch is imported: OpenMP threads that spin while they wait starve the engines beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    gc.set_threshold(50_000)  # garbage collection takes a fifth of the import time
    from rstar_lab.hardware.ends import end_like_ctrl_c, exit_code

    end_like_ctrl_c()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # otherwise Ctrl-C is ignored, as after nohup
        signal.signal(signal.SIGINT, lambda *_: os._exit(exit_code()))
    from rstar_lab.cli.command_line import run
    from rstar_lab.common.temporary import SHARED_MEMORY, remove_stale_folders
    from rstar_lab.hardware.limits import raise_open_files

    raise_open_files()
    remove_stale_folders(Path(tempfile.gettempdir()), SHARED_MEMORY)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    run()
