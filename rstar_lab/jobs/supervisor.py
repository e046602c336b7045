"""Run the command of one job on any backend.

    python -m rstar_lab.jobs.supervisor JOB_FOLDER

It starts the job's sandbox service if the job needs one, writes the log without secrets, records the exit code, and ends every
process of the job.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

from rstar_lab.common.errors import UserError, exit_with_message
from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.hardware.processes import JOB_VARIABLE, end_processes, wait_or_kill
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.jobs.sandbox_service import wait_for_service
from rstar_lab.jobs.secrets import redact, secret_values
from rstar_lab.jobs.store import GRACE_S, REQUEUE_FILE, JobFolder, JobSpec
from rstar_lab.untrusted.text import counted

PR_SET_CHILD_SUBREAPER = 36


class Stopped(Exception):
    """SIGTERM arrived: the job should end."""


def supervise(folder: JobFolder, spec: JobSpec) -> int:
    """Run the job in `folder` until it ends and return its exit code. On a cluster, print its output too.

    If the job ends because its allocation ends (the batch script has written the requeue file), no exit.json is
    written, because Slurm runs the job again.
    """
    environment = {**os.environ, **spec.environment, JOB_VARIABLE: spec.id, "PYTHONUNBUFFERED": "1"}
    names = load_profile(spec.profile).secrets
    # Descendants whose parent dies become children of this process, so that they can be found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(os.umask(0o077) | 0o002)  # no other user may write into the run, whatever the caller's umask is
    stopped, code, echo = False, 1, spec.backend != "local"
    previous = signal.signal(signal.SIGTERM, _raise_stopped)
    process = reader = None
    try:
        command = spec.command
        if spec.sandbox_workers:
            service = wait_for_service(folder, _start_service(folder, spec, environment))
            environment |= service["environment"]
            command = [*command, "--set", f"sandbox.url={service['url']}"]
        process = subprocess.Popen(
            command, cwd=spec.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(
            target=_copy_log, args=(process.stdout, folder.log, secret_values(environment, names), echo), daemon=True
        )
        reader.start()
        code = process.wait()
        if code < 0:
            reader.join(timeout=5)
            killed = f"error: the command of the job was killed by {signal.Signals(-code).name}"
            reason = ", perhaps because the memory was full" if code == -signal.SIGKILL else ""
            _append(folder.log, f"{killed}{reason}; submit the job again to continue\n", echo)
    except Stopped:
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None:
            process.terminate()
            code = wait_or_kill(process, GRACE_S)
    except (UserError, OSError) as error:
        _append(folder.log, f"error: {error}\n", echo)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_processes(spec.id, root=os.getpid())
        if reader is not None:
            reader.join(timeout=5)
        if not (stopped and (folder.path / REQUEUE_FILE).exists()):
            folder.write("exit.json", {"code": code, "stopped": stopped, "ended": time.time()})
        signal.signal(signal.SIGTERM, previous)
    return code


def _start_service(folder: JobFolder, spec: JobSpec, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Start the job's sandbox service. On Slurm the batch script has started it, because only the script can reach the
    other nodes."""
    if spec.backend == "slurm":
        return None
    command = [sys.executable, "-m", "rstar_lab.jobs.sandbox_service", str(folder.path)]
    command += ["--workers", str(spec.sandbox_workers)]
    command += ["--host", "127.0.0.1"] if spec.backend == "local" else ["--all-ray-nodes"]
    with folder.log.open("ab") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _raise_stopped(*_: object) -> NoReturn:
    raise Stopped


def _append(path: Path, text: str, echo: bool) -> None:
    with path.open("a") as log:
        log.write(text)
    if echo:
        sys.stdout.write(text)


def _copy_log(output: IO[str], path: Path, secrets: list[str], echo: bool) -> None:
    """Append the job's output to its log without secrets, until it ends.

    Output that cannot be written, for example because the disk is full, is discarded. If nothing read its output, the job would block.
    """
    lost = 0
    with output, path.open("ab", buffering=0) as log:
        for line in output:
            line = redact(line, secrets)
            note = f"\n[{counted(lost, 'line')} of output could not be written]\n" if lost else ""
            data = (note + line).encode()
            try:
                lost = 0 if log.write(data) == len(data) else lost + 1
            except OSError:
                lost += 1
            if echo:
                sys.stdout.write(line)
                sys.stdout.flush()


def main(path: str) -> int:
    """Run the job in a folder; return its exit code."""
    folder = JobFolder(Path(path))
    with exit_with_message():
        spec = folder.submitted_spec()
    raise_open_files()
    return supervise(folder, spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
