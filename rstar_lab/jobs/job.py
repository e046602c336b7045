"""Submit a recipe as a job, and find the job again: from this notebook, from another one, or after a restart."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.backend import Backend, JobStatus
from rstar_lab.jobs.preflight import JobDescription
from rstar_lab.jobs.prepare import Submission, recipe_name
from rstar_lab.jobs.progress import parse_event
from rstar_lab.jobs.secrets import refuse_secrets
from rstar_lab.jobs.store import ForeignJob, JobFolder, JobSpec, check_name
from rstar_lab.runs.reader import find_runs_dir
from rstar_lab.untrusted.files import read_text
from rstar_lab.untrusted.text import echo

# Imported when they are first used: ray and kubernetes are large, and extras.
CLASSES = {
    "local": "rstar_lab.jobs.local:Local",
    "ray": "rstar_lab.jobs.ray_jobs:Ray",
    "slurm": "rstar_lab.jobs.slurm:Slurm",
    "kuberay": "rstar_lab.jobs.kuberay:KubeRay",
    "ssh": "rstar_lab.jobs.ssh.backend:OverSsh",
}


def backend_named(name: str) -> Backend:
    """Return a backend. Raises UserError for an unknown name."""
    if name not in CLASSES:
        raise UserError(f"backend {name!r} is unknown; choose local, ray, slurm, ssh or kuberay")
    module, _, attribute = CLASSES[name].partition(":")
    return getattr(import_module(module), attribute)()  # type: ignore[no-any-return]


def choose(profile: str | None, *, host: str | None = None, backend: str | None = None) -> tuple[Profile, Backend]:
    """Return the profile and the backend of a job. The arguments have the same meaning as in `submit`. Raises UserError for an unknown
    profile or backend, and for an unreachable host."""
    if profile is None and host:
        from rstar_lab.jobs.ssh.backend import profile_of_host

        machine = profile_of_host(host)
    else:
        machine = load_profile(profile or "laptop")
    return machine, backend_named("ssh" if host else backend or machine.backend)


class Job:
    """A submitted job. The job runs independently; this object reads its folder and queries its backend.

    problem: why the job can only be listed: it was submitted by another user or elsewhere, or its files are damaged. Its `spec`
    is then empty, and every method but `status_or_unknown` raises it.
    """

    def __init__(self, folder: JobFolder, *, problem: UserError | None = None):
        """Raises UserError if there is no such job, or if its files cannot be used and `problem` is not given."""
        self.folder, self.problem = folder, problem
        self.id = folder.path.name
        self.spec = folder.spec() if problem is None else JobSpec(self.id, "", "", "", [], "", "", {}, "")

    def __repr__(self) -> str:
        status = self.status_or_unknown()
        return f"Job({self.id!r}, recipe={self.spec.recipe!r}, backend={self.spec.backend!r}, status={status!s})"

    def status(self) -> JobStatus:
        """Return the job's status. Raises UserError if the backend has to be queried and cannot be reached."""
        if self.problem is not None:
            raise self.problem
        if (end := self.folder.exit()) is None:
            state = self.backend.state(self.folder, self.spec)
            # The job may have ended since the first check.
            end = self.folder.exit()
            if end is None:
                if JobStatus(state).ended:  # its supervisor was killed or never started
                    self.folder.secrets.unlink(missing_ok=True)
                return JobStatus(state)
        self.folder.secrets.unlink(missing_ok=True)
        if end.stopped:
            return JobStatus.STOPPED
        return JobStatus.FINISHED if end.code == 0 else JobStatus.FAILED

    def status_or_unknown(self) -> JobStatus:
        """Return the job's status: FOREIGN for a job of another user, UNKNOWN if its backend cannot be reached."""
        return self.status_and_problem()[0]

    def status_and_problem(self) -> tuple[JobStatus, str | None]:
        """Return `status_or_unknown`, and why the status cannot be read."""
        try:
            return self.status(), None
        except UserError as error:
            return JobStatus.FOREIGN if isinstance(error, ForeignJob) else JobStatus.UNKNOWN, str(error)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job's command; None before its end."""
        with contextlib.suppress(UserError):
            if self.problem is None and (end := self.folder.exit()):
                return end.code
        return None

    def logs(self, tail: int | None = None) -> str:
        """Return the job's output so far.

        Args:
            tail: Only the last lines. Default: all.
        """
        if self.problem is not None:
            raise self.problem
        if self.folder.exit() is None:
            with contextlib.suppress(UserError):  # without a connection, return the part that was copied before
                if self.backend.elsewhere:
                    self.status()  # copies the log
        if os.path.lexists(self.folder.log):
            text = read_text(self.folder.log, errors="replace")
        else:
            text = self.backend.logs(self.folder, self.spec) or ""
        return text if tail is None else "".join(text.splitlines(keepends=True)[-tail:])

    def follow(self, *, every_s: float = 0.5, timeout_s: float | None = None) -> Iterator[str]:
        """Yield the lines of the job's log, from the first one until the job ends.

        Args:
            every_s: Seconds between two reads.
            timeout_s: Give up after this time. Default: never.

        Raises:
            TimeoutError: After `timeout_s`; the job continues.
        """
        for lines in self._reads(every_s, timeout_s):
            yield from lines

    def _reads(self, every_s: float, timeout_s: float | None = None) -> Iterator[list[str]]:
        """Read the log every `every_s` seconds until the job ends; yield its new lines. Raises TimeoutError."""
        started, seen = time.monotonic(), list[str]()
        ended = lost = False
        while not ended:
            try:
                ended, lost = self.status().ended, False
            except UserError as error:
                if self.problem is not None or not self.backend.elsewhere:
                    raise
                # The job continues without the connection.
                if not lost:
                    echo(f"{error}; trying again", err=True)
                lost = True
            lines = self.logs().splitlines(keepends=True)
            complete = lines if ended or not lines or lines[-1].endswith("\n") else lines[:-1]
            # Before the job's own log exists, the output of the backend is shown.
            new = complete[len(seen) :] if complete[: len(seen)] == seen else complete
            seen = complete
            yield [line.rstrip("\n") for line in new]
            if timeout_s is not None and not ended and time.monotonic() > started + timeout_s:
                raise TimeoutError(f"job {self.id} is still {self.status_or_unknown()} after {timeout_s} s")
            if not ended:
                time.sleep(every_s)
        with contextlib.suppress(UserError):  # the process that copies the runs tries again
            self.backend.copy_runs(self.spec)

    def watch(self, *, timeout_s: float | None = None) -> JobStatus:
        """Print the job's progress until it ends; return its status. Ctrl-C stops the printing, not the job. `follow` has every line.

        Args:
            timeout_s: Give up after this time. Default: never.
        """
        progress = _Progress()
        try:
            for line in self.follow(timeout_s=timeout_s):
                progress.print(line)
        except KeyboardInterrupt:
            echo(f"\n{self._how_to_find()}")
        return self.status()

    async def watched(self) -> JobStatus:
        """Print the job's progress until it ends, as `watch` does, without blocking the event loop: `await job.watched()` in a
        notebook keeps the figures of `rstar_lab.analysis.watch` moving."""
        progress, reads = _Progress(), self._reads(1.0)
        try:
            while (lines := await asyncio.to_thread(next, reads, None)) is not None:
                for line in lines:
                    progress.print(line)
        except (asyncio.CancelledError, KeyboardInterrupt):
            echo(f"\n{self._how_to_find()}")
        return self.status()

    def _how_to_find(self) -> str:
        return (
            f"{self.id} continues; find it again with attach({self.id!r}) or `rstar-lab jobs logs {self.id} --follow`"
        )

    def wait(self, *, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job ends, without printing.

        Args:
            timeout_s: Give up after this time. Default: never.

        Raises:
            TimeoutError: After `timeout_s`; the job continues.
        """
        for _ in self.follow(timeout_s=timeout_s):
            pass
        return self.status()

    def stop(self) -> JobStatus:
        """End the job and every process it started. Does nothing if the job has ended.

        A job whose supervisor was killed counts as failed, but its processes may still be running; they are ended too.
        """
        if self.problem is not None:
            raise self.problem
        if self.folder.exit() is None:
            self.backend.stop(self.folder, self.spec)
            if self.folder.exit() is None:
                self.folder.write("exit.json", {"code": None, "stopped": True, "ended": time.time()})
        return self.status()

    @property
    def backend(self) -> Backend:
        """The backend that runs the job. Raises UserError if it is unknown."""
        return backend_named(self.spec.backend)

    @property
    def run_dir(self) -> Path | None:
        """The run's folder in the run store, or None before the run starts."""
        if self.spec.run is None:
            return None
        runs = Path(self.spec.runs_dir)
        candidates = [runs / self.spec.run, runs / f"{self.spec.run.removesuffix('-rl')}-sft"]
        with contextlib.suppress(OSError):  # a name that is too long
            return next((path for path in candidates if (path / "run.json").exists()), None)
        return None


def submit(
    recipe: str | Path,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    command: str | None = None,
    runs_dir: str | Path | None = None,
    name: str | None = None,
    backend: str | None = None,
    address: str | None = None,
    host: str | None = None,
    preflight: bool = True,
    log: Callable[[str], None] = print,
    job_id: str | None = None,
    grid: str | None = None,
    arguments: Sequence[str] = (),
) -> Job:
    """Run a recipe on the hardware of a profile, detached from this process.

    Args:
        recipe: File, or a name that `rstar-lab recipes` lists.
        profile: Name of a hardware profile, or a file. Default: `laptop`; with `host` the host's `rstar-lab/profile.yaml`, and if the
            host has no such file, `laptop` on Slurm or as a process of the host.
        overrides: Recipe keys such as {"rl.lr": 1e-5}, as `--set` takes them.
        command: `run` (everything the recipe describes, the default), `train`, `sft`; with the trainer of the profile. `verl`: `run` with
            the verl trainer, whatever the profile says. `evaluate`: `rstar-lab evaluate ARGUMENTS --recipe RECIPE`, on one node and
            without preflight.
        runs_dir: Every node must see it under this path. Default: `storage.runs` of the profile.
        name: Name of the run, whose folders are NAME-sft and NAME-rl. Default: the recipe's name.
        backend: local, ray, slurm, ssh or kuberay. Default: that of the profile.
        address: URL of Ray's dashboard.
        host: Run the job on this host, reached with ssh (HOST, USER@HOST or an alias of ~/.ssh/config); its runs are copied to `runs_dir`
            while they are written. Default: `ssh.host` of a profile with `backend: ssh`.
        preflight: Check recipe and profile first.
        log: Called with one line for each item that is sent.
        job_id: Id of the new job. Default: the run's name and the time.
        grid: Name of the grid to which the job belongs.
        arguments: Further arguments of `evaluate`: models, `--problems` and others. Paths must exist where the job runs.

    Returns:
        The job.

    Raises:
        UserError: For an unknown profile, a secret among the overrides, or a failed preflight.
    """
    chosen, request = _request(**locals())
    return Job(chosen.submit(request))


def preview(
    recipe: str | Path, profile: str | None = None, overrides: Mapping[str, Any] | None = None, **options: Any
) -> str:
    """Return the Slurm script, RayJob or Kubernetes manifest and the command of a job as text, without submitting it.

    The arguments are those of `submit`. Raises UserError.
    """
    chosen, request = _request(recipe, profile, overrides, **options)
    if not chosen.elsewhere:
        return chosen.preview(request)
    from rstar_lab.jobs.ssh.backend import ssh_settings

    settings = ssh_settings(request.machine, request.host)
    there = backend_named(settings.backend).preview(request)
    return f"sent over ssh to {settings.host}, where this is started:\n{there}"


def _request(
    recipe: str | Path,
    profile: str | None,
    overrides: Mapping[str, Any] | None,
    *,
    name: str | None = None,
    backend: str | None = None,
    host: str | None = None,
    job_id: str | None = None,
    **options: Any,
) -> tuple[Backend, Submission]:
    """Check the arguments of `submit` and return the backend and the request."""
    machine, chosen = choose(profile, host=host, backend=backend)
    overrides = dict(overrides or {}) | ({"name": name} if name else {})
    refuse_secrets(overrides)
    run_name = check_name(recipe_name(recipe, overrides), "name of the run")
    job_id = job_id or f"{run_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    check_name(job_id, "id of the job")
    request = Submission(recipe, profile, machine, overrides, run_name, job_id, host=host, **options)
    request.trainer_and_action()
    return chosen, request


def find_job_runs_dir(profile: str | None, runs_dir: str | Path = "", *, host: str = "") -> Path:
    """Return the folder of runs for the jobs of a notebook.

    `runs_dir` if it is given; else `storage.runs` of a profile whose nodes share it (an absolute path); else that of
    `find_runs_dir`, also for jobs sent with ssh, whose runs are copied to this machine.
    """
    machine = load_profile(profile or "laptop")
    shared = Path(machine.storage.runs)
    if runs_dir or host or backend_named(machine.backend).elsewhere or not shared.is_absolute():
        return find_runs_dir(runs_dir)
    return shared


def attach(job_id: str, *, runs_dir: str | Path = "runs") -> Job:
    """Return the job with this id.

    Args:
        job_id: Id of the job.
        runs_dir: Folder of runs.

    Raises:
        UserError: If there is none.
    """
    return Job(JobFolder.of(Path(runs_dir).absolute(), job_id))


def job_row(job: Job) -> dict[str, Any]:
    """Return the row of `rstar-lab jobs list` for a job, as JSON. status is "unknown" if the backend cannot be
    reached."""
    spec, (status, error) = job.spec, job.status_and_problem()
    return {
        "id": job.id, "status": str(status), "error": error, "recipe": spec.recipe, "profile": spec.profile,
        "backend": spec.backend, "created": spec.created, "exit_code": job.exit_code,
        "run": str(job.run_dir) if job.run_dir else None,
    }  # fmt: skip


def list_jobs(runs_dir: str | Path = "runs") -> list[Job]:
    """Return all jobs of a runs folder, oldest first, and before them those whose files cannot be used: jobs of other
    users, and damaged ones.
    These have a `problem`.

    Args:
        runs_dir: Folder of runs.
    """
    jobs = []
    for path in (Path(runs_dir).absolute() / ".jobs").glob("[!.]*"):
        try:
            jobs.append(Job(JobFolder(path)))
        except UserError as problem:
            if path.is_symlink() or path.is_dir():
                jobs.append(Job(JobFolder(path), problem=problem))
    return sorted(jobs, key=lambda job: (job.spec.created, job.id))


class _Progress:
    """Prints the log of a job: text as it is, one line per tenth of a phase, and what a phase says at its end."""

    def __init__(self) -> None:
        self._tenth: tuple[str, int] | None = None

    def print(self, line: str) -> None:
        """Print a line of the log."""
        event = parse_event(line)
        if event is None:
            echo(line)
        elif "done" in event:
            tenth = (event["event"], 10 * event["done"] // (event["total"] or 1))
            if tenth != self._tenth:
                echo(_progress_line(event))
            self._tenth = tenth
        else:
            for text in map(event.get, ("line", "nothing_learnt")):  # of the first step and of the end
                if isinstance(text, str):
                    echo(text)


def _progress_line(event: Mapping[str, Any]) -> str:
    parts = [f"reward {event['reward']:.3g}"] if event.get("reward") is not None else []
    if event.get("error_rate") is not None:
        parts.append(f"tool errors {event['error_rate']:.0%}")
    if event.get("loss") is not None and not parts:
        parts = [f"loss {event['loss']:.3f}"]
    return f"{event['event']} {event['done']}/{event['total']}  {' · '.join(parts)}".rstrip()


def describe(
    recipe: str | Path,
    profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    host: str | None = None,
    command: str | None = None,
) -> JobDescription:
    """Run preflight and return the requirements of the job, without submitting it. The arguments are those of `submit`.

    With a host, or a profile with `backend: ssh`, preflight runs there. Raises UserError for an unknown profile or an
    unreachable host.
    """
    chosen, request = _request(recipe, profile, overrides, host=host, command=command)
    return chosen.describe(request)
