"""A job's folder, RUNS_DIR/.jobs/ID: the submitted job (job.json), its log (log.txt) and its exit code (exit.json)."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar_lab.errors import DISK_FULL, UserError, os_error_message

SECRETS_FILE = "secrets.json"
REQUEUE_FILE = "requeue"  # written by the batch script when the allocation ends before the job

# Time for a stopped run to finish what it writes. Checkpoints are atomic, so a kill loses only the work since the last one.
GRACE_S = 10.0


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
    created: str
    run: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    handle: dict[str, Any] = field(default_factory=dict)
    sandbox_workers: int = 0
    action: str | None = None
    grid: str | None = None

    @property
    def python(self) -> str:
        """The interpreter of the job. It must have this path on every node, or in the image."""
        return self.command[0]


def jobs_folder(runs: Path) -> Path:
    """Return RUNS/.jobs. Creates it with the permissions of RUNS, so that all users of a shared runs folder can submit."""
    folder = runs / ".jobs"
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(runs.stat().st_mode & 0o7777)
    return folder


class JobFolder:
    """Reads and writes one job's folder. Every file is written to a temporary name and renamed."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, runs_dir: Path, job_id: str) -> "JobFolder":
        return cls(Path(runs_dir) / ".jobs" / job_id)

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def write(self, name: str, content: dict[str, Any], *, mode: int = 0o644) -> None:
        """Write a file. Raises UserError that names it if the disk or the user's quota is full."""
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1)
            temporary.rename(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UserError(os_error_message(error, self.path / name)) from error

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file, or None if it does not exist. Raises UserError if it is not JSON."""
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({error}); delete the job's folder") from error

    def create(self) -> None:
        """Create the folder, which only its owner can open. Raises UserError if it exists or cannot be created."""
        try:
            jobs_folder(self.path.parent.parent)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise UserError(os_error_message(error)) from error
            raise UserError(
                f"cannot create {error.filename or self.path}: {error.strerror}; the runs folder (--runs-dir, or storage.runs of the "
                "profile) must be on storage that this machine shares with the nodes of the job"
            ) from error

    def delete_secrets(self) -> None:
        """Delete the secrets that the submitter forwarded."""
        (self.path / SECRETS_FILE).unlink(missing_ok=True)

    def save(self, spec: JobSpec) -> None:
        """Write job.json. Creates the folder if there is none."""
        if not self.path.exists():
            self.create()
        self.write("job.json", asdict(spec))

    def spec(self) -> JobSpec:
        content = self.read("job.json")
        if content is None:
            raise UserError(
                f"no job {self.path.name} in {self.path.parent.parent}: `rstar-lab jobs list` shows the jobs of a runs folder"
            )
        try:
            return JobSpec(**content)
        except TypeError as error:
            raise UserError(f"{self.path / 'job.json'}: written by another version of rstar_lab ({error})") from error
