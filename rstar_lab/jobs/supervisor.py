"""Runs one job's command, on every backend: keeps its log free of secrets, records how it ended, leaves no process.

    python -m rstar_lab.jobs.supervisor JOB_FOLDER [--detach]

Detached, it outlives whoever submitted it: a session of its own, adopted by init.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

import psutil

from rstar_lab.jobs.secrets import redact, secret_values
from rstar_lab.jobs.store import JobFolder
from rstar_lab.processes import JOB_VARIABLE, adopt_orphans, end_processes

SECRETS_FILE = "secrets.json"
# Time for the run to finish what it writes; its checkpoints are atomic, so a kill costs what came after the last.
GRACE_S = 10.0


class Stopped(Exception):
    """Somebody asked the job to end."""


def supervise(folder: JobFolder, *, echo: bool) -> int:
    """Run the command of the job in `folder` to its end; returns its exit code."""
    spec = folder.spec()
    environment = {**os.environ, **spec.environment, JOB_VARIABLE: spec.id, "PYTHONUNBUFFERED": "1"}
    environment |= folder.read(SECRETS_FILE) or {}
    (folder.path / SECRETS_FILE).unlink(missing_ok=True)
    adopt_orphans()
    stopped, code = False, 1
    previous = signal.signal(signal.SIGTERM, _raise_stopped)
    process = None
    try:
        process = subprocess.Popen(
            spec.command, cwd=spec.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(
            target=_copy_log, args=(process.stdout, folder.log, secret_values(environment), echo), daemon=True
        )
        reader.start()
        code = process.wait()
    except Stopped:
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None:
            process.terminate()
            try:
                code = process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    except OSError as error:
        folder.log.write_text(f"could not start {spec.command[0]}: {error}\n")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_processes(spec.id, root=os.getpid())
        if process is not None:
            reader.join(timeout=5)
        folder.write("exit.json", {"code": code, "stopped": stopped, "ended": time.time()})
        signal.signal(signal.SIGTERM, previous)
    return code


def _raise_stopped(*_: object) -> NoReturn:
    raise Stopped


def _copy_log(output: IO[str], path: Path, secrets: list[str], echo: bool) -> None:
    with output, path.open("a", buffering=1) as log:
        for line in output:
            line = redact(line, secrets)
            log.write(line)
            if echo:
                sys.stdout.write(line)
                sys.stdout.flush()


def detach(folder: JobFolder) -> None:
    """Return in a process that is nobody's child; the caller's copy writes down which, then ends."""
    child = os.fork()
    if child:
        folder.write("supervisor.json", {"pid": child, "created": psutil.Process(child).create_time()})
        os._exit(0)
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--detach", action="store_true")
    arguments = parser.parse_args()
    folder = JobFolder(arguments.folder)
    if arguments.detach:
        detach(folder)
    return supervise(folder, echo=not arguments.detach)


if __name__ == "__main__":
    sys.exit(main())
