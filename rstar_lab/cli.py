"""Entry point of the `rstar-lab` command."""

import gc
import os
import signal
from typing import Any


def main() -> None:
    """Import the commands and run the command line. Ctrl-C during the imports ends the process with code 130."""
    # Must be set before torch is imported: OpenMP threads that spin while they wait starve the engines beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    gc.set_threshold(50_000)  # garbage collection takes a fifth of the import time
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # otherwise Ctrl-C is ignored, as after nohup
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from rstar_lab.commands.app import mount, run

    mount()
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    run()


def __getattr__(name: str) -> Any:
    """Return `app`, the Typer application with all commands, or `mount`; they are imported when they are first used."""
    if name not in ("app", "mount"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rstar_lab.commands import app

    return getattr(app, name)


if __name__ == "__main__":
    main()
