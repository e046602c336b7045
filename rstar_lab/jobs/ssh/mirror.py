"""Copy the runs of a job from its host, while they are written.

A copy is readable at any time. `rsync`, which both sides must have, copies the files of new steps first; the lines that commit them
are written last. Lines of steps that the run has removed are removed before their files.
"""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Base64Bytes

from rstar_lab.common.errors import UserError, file_errors
from rstar_lab.hardware.processes import start_detached
from rstar_lab.jobs.ssh.connection import Agent, ConnectionLost, agent_of, ask
from rstar_lab.jobs.store import NAME, JobFolder, JobSpec
from rstar_lab.runs.files import atomic_write, check_no_links, lock_file, open_regular, write_json
from rstar_lab.runs.info import MIRROR_FILE, read_mirror
from rstar_lab.runs.schema import LEVELS
from rstar_lab.untrusted.text import counted

if TYPE_CHECKING:
    from rstar_lab.jobs.job import Job

LOCK = ".mirror.lock"
EVERY_S = 2.0  # pause between two pulls
GIVE_UP_S = 600.0  # without an answer of the host; reading the status of the job starts the copying process again
# Messages of a host without rsync, and of rsync if a start-up file of the shell there prints text.
NO_RSYNC = re.compile(r"rsync: (command )?not found|command not found: rsync|unknown command:? '?rsync", re.IGNORECASE)
UNCLEAN = "is your shell clean"
# Errors of rsync that would occur again at the next attempt; the line names the file.
DENIED = re.compile(r"[^\n]*(Permission denied|No space left|Disk quota exceeded|Read-only file system)[^\n]*")
RUN_FILES = ("run.json", "rollup.parquet", "tokens.json")
NOT_COPIED = [f"--exclude={name}" for name in (".*", "/metrics.jsonl", f"/{MIRROR_FILE}")]
SENT = re.compile(r"files transferred: (\d+).*transferred file size: (\d+)", re.DOTALL)  # in rsync's statistics


@dataclass(frozen=True)
class Pulled:
    """Result of one pull of a run. bytes: size of the copied files; steps: committed steps that are new on this
    machine."""

    run_id: str
    steps: int
    total_steps: int
    files: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        per_step = f", {self.bytes / self.steps / 1e6:.2f} MB a step" if self.steps else ""
        return (
            f"{self.run_id}: {counted(self.steps, 'new step')} of {self.total_steps}, {counted(self.files, 'file')}, "
            f"{self.bytes / 1e6:.1f} MB{per_step}, {self.seconds:.1f} s"
        )


def pull(spec: JobSpec, *, checkpoints: bool = False, known: dict[str, str] | None = None) -> list[Pulled]:
    """Copy new files of the runs of a job; return one entry per run that was copied.

    checkpoints: also the checkpoints and models. known: states of the last pull, to skip runs that have not changed; updated.
    Raises ConnectionLost, UserError if the job does not run on another host.
    """
    if "ssh" not in spec.handle:
        raise UserError(f"job {spec.id} runs here (backend {spec.backend}): its runs are in {spec.runs_dir}")
    agent, pulled = agent_of(spec.handle), []
    known = {} if known is None else known
    problem = None
    for run_id, state in ask(agent, "runs_of", dict[str, str], job_id=spec.id).items():
        if known.get(run_id) != state:
            try:
                pulled.append(pull_run(agent, run_id, Path(spec.runs_dir), checkpoints))
            except NotACopy as error:
                problem = error
            known[run_id] = state
    if problem is not None:
        raise problem
    return pulled


def pull_run(agent: Agent, run_id: str, runs_dir: Path, checkpoints: bool) -> Pulled:
    """Copy the new files of one run. The order keeps the copy readable if the process is killed or the connection breaks.

    Raises NotACopy, and changes nothing, if the folder has another run.
    """
    if not NAME.fullmatch(run_id):  # such as `.jobs/ID`, the folder of a job
        raise UserError(f"the host names a run {run_id[:80]!r}, which cannot be copied")
    started, folder = time.monotonic(), runs_dir / run_id
    if problem := foreign_run(folder, agent.connection.host, f"{agent.runs}/{run_id}"):
        raise NotACopy(problem)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / LOCK):
        with file_errors(before=f"cannot copy to {folder}: "):
            check_no_links(folder)
        for attempt in range(3):
            remote = ask(agent, "committed", RemoteRun, run_id=run_id)
            if not (folder / MIRROR_FILE).exists():  # before run.json, so that an interrupted first copy can continue
                _mark(agent, remote, folder)
            try:
                files, size, new, total = _copy(agent, remote, folder, checkpoints)
            except RunChanged:
                if attempt == 2:
                    raise
                continue
            break
        _mark(agent, remote, folder)
    return Pulled(run_id, new, total, files, size, time.monotonic() - started)


def _mark(agent: Agent, remote: "RemoteRun", folder: Path) -> None:
    """Write which run the folder is a copy of, and its state. How the host is reached is in the file of the job: a run
    folder is passed on to other people, who must not be connected to where it says."""
    pulled = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder / MIRROR_FILE, {"host": agent.connection.host, "pulled": pulled, "status": remote.status})


class NotACopy(UserError):
    """The target folder contains another run of the same name, which a copy would overwrite."""


def foreign_run(folder: Path, host: str, source: str) -> str | None:
    """Return why a run cannot be copied from `source` on a host to a folder, or None if it can.

    Raises RunStoreError if mirror.json in the folder is damaged.
    """
    if mirror := read_mirror(folder):
        origin = mirror["host"]
        return None if origin == host else f"{folder} is a copy of a run on {origin}, not of {source} on {host}"
    if (folder / "run.json").exists():
        return f"{folder} is a run of this machine, not a copy of {source} on {host}"
    return None


@dataclass(frozen=True)
class RemoteRun:
    """The agent's answer about a run. metrics: the committed lines."""

    status: str
    metrics: Base64Bytes


class RunChanged(UserError):
    """The run removed or replaced files during the copy."""

    def __init__(self, run_id: str):
        super().__init__(f"run {run_id} changes while it is copied: copy it again with `rstar-lab jobs pull`")


def _copy(agent: Agent, remote: RemoteRun, folder: Path, checkpoints: bool) -> tuple[int, int, int, int]:
    """Copy what is new, and remove what the run has removed. Returns (files, their bytes, new steps, all steps)."""
    lines = remote.metrics.splitlines(keepends=True)
    metrics = folder / "metrics.jsonl"
    here = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    same = next((i for i, (a, b) in enumerate(zip(here, lines, strict=False)) if a != b), min(len(here), len(lines)))
    if same < len(here):  # the run was cut: remove its removed steps from the copy first
        _write(metrics, b"".join(here[:same]))
    options = [f"--include=/{name}" for name in RUN_FILES] + [f"--include=/{level}/***" for level in LEVELS]
    files, size = copy_files(agent, folder, "--delete-after", *options, "--exclude=*")
    if checkpoints:
        sent = copy_files(agent, folder, *(f"--exclude=/{level}" for level in LEVELS))
        files, size = files + sent[0], size + sent[1]
    if not ask(agent, "committed", RemoteRun, run_id=folder.name).metrics.startswith(remote.metrics):
        raise RunChanged(folder.name)  # it was cut
    _write(metrics, b"".join(lines))
    return files, size, len(lines) - same, len(lines)


def _write(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        with atomic_write(path) as file:
            file.write(data)


def copy_files(agent: Agent, folder: Path, *options: str) -> tuple[int, int]:
    """Copy new and changed files of a run of the host into its copy; return their number and bytes.

    Each file appears under its name only when it is complete. options: of rsync, which select files.
    """
    connection = agent.connection
    if not shutil.which("rsync"):
        raise UserError("rsync is not installed here: install it (`apt install rsync`) to copy runs from another host")
    # rsync writes each file under a hidden name and then renames it; readers ignore hidden files.
    # --modify-window=-1: a step that is written again within the same second can have the same size.
    command = ["rsync", "--recursive", "--times", "--modify-window=-1", "--stats", "--no-human-readable"]
    command += ["-e", shlex.join(["ssh", *connection.options()]), *NOT_COPIED, *options]
    command += ["--", f"{connection.host}:{shlex.quote(f'{agent.runs}/{folder.name}')}/", f"{folder}/"]
    # A file, not a pipe: the process that keeps the shared connection inherits stderr, so a pipe would never end.
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        errors.seek(0)
        code, message = done.returncode, errors.read().decode(errors="replace").strip()[-2000:]
    if code in (11, 23) and (denied := DENIED.search(message)):
        raise UserError(
            f"rsync from {connection.host}: {denied[0]}. Change the permissions of this file or of its folders, or free space on its disk"
        )
    if code in (23, 24):  # some files were gone
        raise RunChanged(folder.name)
    if code == 127 or NO_RSYNC.search(message):
        raise UserError(f"{connection.host} has no rsync, which copies the runs: install it there")
    if UNCLEAN in message:
        raise UserError(
            f"{connection.host}: a start-up file of the shell there prints text, which rsync cannot read; let it print in "
            "interactive shells only"
        )
    if code in (12, 30, 255):
        raise ConnectionLost(f"connection to {connection.host} lost: {message}")
    if code:
        raise UserError(f"rsync from {connection.host}: {message}")
    sent = SENT.search(done.stdout.decode(errors="replace"))
    return (int(sent[1]), int(sent[2])) if sent else (0, 0)


def follow(job: "Job", *, checkpoints: bool = False, log: Callable[[str], None] = print) -> None:
    """Pull the runs of a job until it has ended and everything is copied. A lost connection is opened again.

    checkpoints: as in `pull`. log: called with a line per copied run.
    Raises ConnectionLost if the host cannot be reached for GIVE_UP_S.
    """
    known: dict[str, str] = {}
    failure = ""  # what was logged last
    reached = time.monotonic()
    while True:
        ended = None
        try:
            ended = job.status().ended  # before the pull: if the job has ended, this pull copies everything
            for pulled in pull(job.spec, checkpoints=checkpoints, known=known):
                log(str(pulled))
            if ended:
                return
            failure, reached = "", time.monotonic()
        except (UserError, OSError) as error:
            lost, is_other_run = isinstance(error, ConnectionLost), isinstance(error, NotACopy)
            if time.monotonic() - reached > GIVE_UP_S if lost else not is_other_run and ended is not False:
                raise  # while the job runs, a full disk here, for example, may be free at the next attempt
            if failure != (new := "lost" if lost else str(error)):
                log(f"{error}: not copied" if is_other_run else f"{error}; trying again")
            failure = new
        time.sleep(EVERY_S)


def start_mirror(folder: JobFolder, spec: JobSpec) -> None:
    """Start a process that follows the job's runs and outlives this process. Does nothing if such a process is running."""
    lock = open_regular(folder.path / LOCK, os.O_RDWR | os.O_CREAT)
    with os.fdopen(lock, "rb"), contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the new process inherits the lock
        command = [sys.executable, "-m", "rstar_lab.cli", "jobs", "pull", spec.id]
        command += ["--runs-dir", spec.runs_dir, "--follow"]
        start_detached(command, folder.path / "mirror.txt", keeps=lock)
