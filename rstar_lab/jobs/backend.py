"""What a backend of jobs does. `rstar_lab.jobs.job.backend_named` finds one by its name."""

import shlex
from abc import abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rstar_lab.hardware.profiles import Profile
from rstar_lab.jobs.preflight import JobDescription, preflight_rows, queue_state, summarize
from rstar_lab.jobs.prepare import Submission, plan_job, write_job
from rstar_lab.jobs.store import JobFolder, JobSpec


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"  # the backend cannot be reached, or the job's files are damaged
    FOREIGN = "foreign"  # the job belongs to another user, so its files are not read

    @property
    def ended(self) -> bool:
        return self in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED)


class Backend(Protocol):
    """Starts, queries and stops jobs. The methods that are not abstract are those of a backend of this machine; `OverSsh`
    replaces them to pass each operation to a backend on another host."""

    name: ClassVar[str]
    # Whether the job, its log and its runs are on another host, from which they are copied when it can be reached.
    elsewhere: ClassVar[bool] = False

    @abstractmethod
    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Start a job; return the data with which the other methods find it again. Raises UserError."""

    @abstractmethod
    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Return the state of a job that has no exit.json: a value of JobStatus. Raises UserError if it cannot be read."""

    @abstractmethod
    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """End a job and wait until it has ended. Raises UserError."""

    def logs(self, folder: JobFolder, spec: JobSpec) -> str | None:
        """Return the output of a job that has no log file, or None if there is none."""
        return None

    def submit(self, job: Submission) -> JobFolder:
        """Write the job's folder and start it. Raises UserError."""
        return write_job(job, self.name, self.start)

    def preview(self, job: Submission) -> str:
        """Return the script or manifest that `submit` would send, and the job's command, as text. Submits and writes nothing."""
        spec, _ = plan_job(job, self.name)
        folder = JobFolder.of(Path(spec.runs_dir), spec.id).path
        lines = [self.rendered(job.node_profile, spec, folder), f"command: {shlex.join(spec.command)}"]
        return "\n".join(filter(None, lines))

    def rendered(self, machine: Profile, spec: JobSpec, folder: Path) -> str:
        """Return what `start` would send, as text; empty for a process of this machine."""
        return ""

    def describe(self, job: Submission) -> JobDescription:
        """Run preflight where the job would run; return what the job requires."""
        trainer, _ = job.trainer_and_action()
        rows = preflight_rows(job.recipe, job.profile or "laptop", job.overrides, trainer)
        return summarize(str(job.recipe), job.machine, rows, queue_state(job.machine.backend))

    def rows(self, jobs: Sequence[JobSpec]) -> dict[str, dict[str, Any]]:
        """Return {job id: row of the board} of jobs that can be read with few requests. Others are read one by one."""
        return {}

    def place(self, spec: JobSpec) -> str:
        """Return where a job runs, for people."""
        return self.name

    def copy_runs(self, spec: JobSpec) -> None:
        """Copy new steps of the runs of a job that runs elsewhere. Raises UserError."""
        return
