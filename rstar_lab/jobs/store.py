"""One job: the record of what its user submitted, and its folder RUNS_DIR/.jobs/ID with its log (log.txt) and exit code (exit.json).

The record is in the user's own state folder. It has the handle with which the job is queried and stopped, so a job folder that
comes from somebody else names nothing that is obeyed.
"""

import contextlib
import hashlib
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, StrictBool, StrictInt

from rstar_lab.common.errors import UserError, file_errors
from rstar_lab.untrusted.files import read_json

T = TypeVar("T")
REQUEUE_FILE = "requeue"  # written by the batch script when the allocation ends before the job

# Time for a stopped run to finish what it writes. Checkpoints are atomic, so a kill loses only the work since the last one.
GRACE_S = 20.0

# Names of runs and jobs become names of folders, Slurm jobs and Kubernetes resources.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")


class ForeignJob(UserError):
    """The job belongs to another user. Its files are not read."""


def check_name(name: str, what: str) -> str:
    """Return a name of a run or job. Raises UserError if it is too long or has a character that is not in NAME."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{what} {name[:80]!r}: use at most 150 letters, digits, dots, underscores and hyphens, and begin with a letter or "
            "digit"
        )
    return name


@dataclass(frozen=True)
class JobSpec:
    """One submitted job. handle: data with which the backend finds the job again; sandbox_workers: number per node, 0
    for no service.

    action: the `command` of submit; None for the default. grid: name of the grid of jobs to which this one belongs.
    """

    id: str
    recipe: str
    profile: str
    backend: str
    command: list[str]
    cwd: str
    runs_dir: str
    overrides: dict[str, Any]
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    run: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    handle: dict[str, Any] = field(default_factory=dict)
    sandbox_workers: StrictInt = 0
    action: str | None = None
    grid: str | None = None
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @property
    def python(self) -> str:
        """The interpreter of the job. It must have this path on every node, or in the image."""
        return self.command[0]


def state_folder() -> Path:
    """Return the folder of this user's records of jobs, and create it if it does not exist. Raises UserError."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "rstar-lab" / "jobs"
    with file_errors(folder, "; set XDG_STATE_HOME to a folder of yours", "cannot store your jobs: "):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def jobs_folder(runs: Path) -> Path:
    """Return RUNS/.jobs, and create it if it does not exist.

    It has the permissions of RUNS, so that all users of a shared runs folder can submit, and the sticky bit, so that no
    user can replace the jobs of another one. Raises UserError if others could replace them.
    """
    folder = runs / ".jobs"
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        raise UserError(
            f"{folder}: a link of {user_name(folder)}; your jobs would be written to where it leads. Delete it"
        )
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(runs.stat().st_mode & 0o7777 | stat.S_ISVTX)
    status = folder.stat()
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        with file_errors(folder, f"; other users can replace your jobs: its owner must run `chmod +t {folder}`"):
            folder.chmod(status.st_mode & 0o7777 | stat.S_ISVTX)
    return folder


def user_name(path: Path) -> str:
    """Return "user NAME" for the owner of a file, or its number if it has no name here."""
    user = path.lstat().st_uid
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(user).pw_name}"
    return f"user {user}"


@dataclass(frozen=True)
class JobExit:
    """How a job ended. code: exit code of its command, None if it was stopped before the command started."""

    code: StrictInt | None
    stopped: StrictBool


class JobFolder:
    """Reads and writes the folder and the record of one job."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, runs_dir: Path, job_id: str) -> "JobFolder":
        return cls(Path(runs_dir) / ".jobs" / job_id)

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def record(self) -> Path:
        """The user's own record of the job."""
        place = os.fsencode(os.path.realpath(self.path))
        return state_folder() / f"{hashlib.sha256(place).hexdigest()[:32]}.json"

    @property
    def secrets(self) -> Path:
        """Shell file that exports the forwarded secrets. The nodes of the job must see it under the same path."""
        return self.record.with_suffix(".env")

    def write(self, name: str, content: dict[str, Any], *, mode: int = 0o644) -> None:
        """Write a file of the folder. Raises UserError that names it if the disk or the user's quota is full."""
        _write(self.path / name, json.dumps(content, indent=1), mode)

    def read(self, name: str, kind: type[T]) -> T | None:
        """Return the content of a file of the folder, or None if it does not exist. Raises DataError."""
        return _read(self.path / name, kind)

    def exit(self) -> "JobExit | None":
        """Return how the job ended, or None before its end. Raises DataError if exit.json is damaged."""
        return self.read("exit.json", JobExit)

    def create(self) -> None:
        """Create the folder, which only its owner can open. Raises UserError if it exists or cannot be created."""
        shared = (
            "; the runs folder (--runs-dir, or storage.runs of the profile) must be on storage that this machine shares with the "
            "nodes of the job"
        )
        with file_errors(self.path, shared, "cannot create "):
            jobs_folder(self.path.parent.parent)
            self.path.mkdir(mode=0o700)

    def delete(self) -> None:
        """Delete the folder and the record of a job that did not start."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.record.unlink(missing_ok=True)
        self.secrets.unlink(missing_ok=True)

    def save(self, spec: JobSpec) -> None:
        """Write the record of the job, and job.json for the job's own processes. Creates the folder if there is none."""
        if not self.path.exists():
            self.create()
        self.write("job.json", asdict(spec) | {"handle": {}})
        _write(self.record, json.dumps(asdict(spec), indent=1), 0o600)

    def spec(self) -> JobSpec:
        """Return the job that this user has submitted.

        Raises ForeignJob if the folder belongs to another user, UserError if there is no job, or it was submitted elsewhere.
        """
        if not self.path.is_dir() or self.path.is_symlink():
            raise UserError(
                f"no job {self.path.name} in {self.path.parent.parent}: `rstar-lab jobs list` shows the jobs of a runs folder"
            )
        spec = _read(self.record, JobSpec)
        if spec is None and self.path.lstat().st_uid != os.geteuid():
            raise ForeignJob(f"{self.path.name} belongs to {user_name(self.path)}: only that user can query or stop it")
        if spec is None:
            raise UserError(
                f"job {self.path.name} was not submitted by you on this machine, so nothing that its folder names is used. "
                f"Query it where it was submitted; its log is {self.log}"
            )
        return spec

    def submitted_spec(self) -> JobSpec:
        """Return the content of job.json, for the job's own processes: they may not see the record, or run as another user."""
        spec = self.read("job.json", JobSpec)
        if spec is None:
            raise UserError(f"{self.path}: not the folder of a job")
        return spec


def write_exports(path: Path, values: Mapping[str, str]) -> None:
    """Write a shell file that exports variables. Only its owner can read it."""
    _write(path, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items()), 0o600)


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file to a temporary name and rename it, so that it is never written through a link."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with file_errors(path), contextlib.ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.rename(path)


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the content of a file, or None if it does not exist. Raises DataError."""
    hint = "; the file is damaged, or written by another version of rstar_lab. Delete it"
    return read_json(path, kind, hint=hint) if os.path.lexists(path) else None
