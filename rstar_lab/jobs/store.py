"""A job's folder, RUNS_DIR/.jobs/ID: the submitted job (job.json), its log (log.txt) and its exit code (exit.json)."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError

SECRETS_FILE = "secrets.json"
REQUEUE_FILE = "requeue"  # written by the batch script when the allocation ends before the job


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
        temporary = self.path / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
        temporary.rename(self.path / name)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file, or None if it does not exist. Raises UserError if it is not JSON."""
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({error}); delete the job's folder") from error

    def save(self, spec: JobSpec) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
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
