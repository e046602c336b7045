"""The backend `ssh`: prepares a host (working tree, profile) and passes every operation to the backend of the job there."""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Base64Bytes

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile, Ssh, load_profile, parse_profile
from rstar_lab.jobs.backend import Backend, JobStatus
from rstar_lab.jobs.pack import pack_tar, tree_root
from rstar_lab.jobs.preflight import JobDescription
from rstar_lab.jobs.prepare import Submission
from rstar_lab.jobs.progress import progress_of_host
from rstar_lab.jobs.ssh import connection as ssh
from rstar_lab.jobs.ssh.mirror import foreign_run, pull, start_mirror
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.runs.files import lock_file
from rstar_lab.untrusted.files import check_type

# Preflight composes the trainer's configuration, which takes up to a minute on a slow file system.
SUBMIT_S = 300
RETRY_S = 60


@dataclass(frozen=True)
class LogPart:
    """The agent's answer about the log of a job."""

    data: Base64Bytes
    status: JobStatus
    exit_code: int | None


@dataclass(frozen=True)
class Submitted:
    """The agent's answer about a new job: what was printed."""

    messages: list[str]


@dataclass(frozen=True)
class Row:
    """The agent's answer about the state of a job."""

    id: str
    status: JobStatus
    progress: dict[str, Any]


class OverSsh(Backend):
    """Jobs on another host. `ssh.backend` of the job's profile runs them there; their log, exit code and runs are copied here."""

    name = "ssh"
    elsewhere = True

    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Raises UserError: a job is submitted on its host at once."""
        raise UserError(f"job {spec.id}: a prepared job cannot be started over ssh; submit it again")

    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Copy the new part of the job's log, and its exit code if it has ended; return its state. Raises
        ConnectionLost."""
        # Two notebooks may watch one job, and each byte must be appended once.
        with lock_file(folder.path / ".log.lock"), folder.log.open("ab") as log:
            while (part := ssh.ask(ssh.agent_of(spec.handle), "log", LogPart, job_id=spec.id, offset=log.tell())).data:
                log.write(part.data)
                log.flush()
            if part.status.ended and folder.exit() is None:
                # Written last: a job with exit.json has its complete log here.
                stopped = part.status is JobStatus.STOPPED
                folder.write("exit.json", {"code": part.exit_code, "stopped": stopped, "ended": time.time()})
        if not part.status.ended:
            start_mirror(folder, spec)
        return str(part.status)

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """End the job on the host. Raises ConnectionLost."""
        ssh.agent_of(spec.handle).request("stop", job_id=spec.id, timeout_s=150)
        self.state(folder, spec)

    def submit(self, job: Submission) -> JobFolder:
        """Submit a job on the profile's host, or on `job.host`.

        A repeated request after a lost connection does not submit twice. Raises UserError if the host cannot be reached,
        rejects the job, or lacks Python.
        """
        settings, handle = connect(job.machine, job.host, job.log)
        runs_dir = Path(job.runs_dir or "runs").absolute()
        for run_id in (f"{job.run_name}-sft", f"{job.run_name}-rl"):
            if problem := foreign_run(runs_dir / run_id, handle["ssh"]["host"], f"{handle['runs']}/{run_id}"):
                raise UserError(f"{problem}; submit with another --name or --runs-dir")
        spec = JobSpec(
            id=job.job_id, recipe=_absolute(job.recipe), backend=self.name, command=[settings.python], cwd=str(Path.cwd()),
            profile=_absolute(job.profile) if job.profile else job.machine.name, runs_dir=str(runs_dir),
            overrides=dict(job.overrides), run=None if job.command == "evaluate" else f"{job.run_name}-rl",
            handle=handle, action=job.command,
        )  # fmt: skip
        # Saved first: if this process dies while the host submits, the job can still be found here.
        folder = JobFolder.of(runs_dir, job.job_id)
        folder.create()
        folder.save(spec)
        try:
            answer = ssh.ask(
                ssh.agent_of(spec.handle), "submit", Submitted, timeout_s=SUBMIT_S, retry_s=RETRY_S, job_id=job.job_id,
                **_request(job, settings), command=job.command, name=job.run_name, preflight=job.preflight, arguments=list(job.arguments),
                secrets={name: os.environ[name] for name in job.machine.secrets if name in os.environ},
            )  # fmt: skip
        except UserError as error:
            if isinstance(error, ssh.ConnectionLost):
                unknown = f"It is unknown whether {job.job_id} was submitted"
                raise ssh.ConnectionLost(
                    f"{error}. {unknown}: `rstar-lab jobs list` shows it when the host answers"
                ) from error
            folder.delete()
            raise
        for message in answer.messages:
            job.log(f"{settings.host}: {message}")
        start_mirror(folder, spec)
        return folder

    def describe(self, job: Submission) -> JobDescription:
        """Run preflight on the host; return what the job requires."""
        settings, handle = connect(job.machine, job.host, lambda _: None)
        agent = ssh.agent_of(handle)
        found = ssh.ask(agent, "describe", dict, timeout_s=SUBMIT_S, **_request(job, settings), command=job.command)
        own = {"recipe": str(job.recipe), "profile": job.machine.name, "host": settings.host}
        return check_type(found | own, JobDescription, ssh.unreadable(agent))

    def rows(self, jobs: Sequence[JobSpec]) -> dict[str, dict[str, Any]]:
        """Read all jobs on one host with one request over one connection."""
        groups: dict[ssh.Agent, list[str]] = {}
        answers: dict[str, dict[str, Any]] = {}
        for spec in jobs:
            groups.setdefault(ssh.agent_of(spec.handle), []).append(spec.id)
        for host, ids in groups.items():
            try:
                answers |= {
                    row.id: {"status": str(row.status), "progress": progress_of_host(row.progress)}
                    for row in ssh.ask(host, "jobs", list[Row], ids=ids)
                    if row.id in ids
                }
            except UserError as error:
                answers |= {job_id: {"status": "unknown", "progress": {"line": str(error)}} for job_id in ids}
        return answers

    def place(self, spec: JobSpec) -> str:
        """Return the host, and the backend there."""
        return f"{spec.handle['ssh']['host']} ({spec.handle['ssh']['backend']})"

    def copy_runs(self, spec: JobSpec) -> None:
        """Copy the steps that the job has written since its runs were last copied. Raises ConnectionLost."""
        pull(spec)


def _request(job: Submission, settings: Ssh) -> dict[str, Any]:
    """Return recipe, profile and overrides in the agent's form: the content of files instead of their paths."""
    behind = job.machine.model_copy(update={"backend": settings.backend, "ssh": Ssh()})
    return {
        "recipe": str(job.recipe), "recipe_text": Path(job.recipe).read_text() if Path(job.recipe).is_file() else None,
        "profile_text": yaml.safe_dump(behind.model_dump(mode="json"), sort_keys=False), "overrides": job.overrides,
    }  # fmt: skip


def _absolute(name: str | Path) -> str:
    """Return the absolute path of an existing file; return any other name unchanged."""
    return str(Path(name).absolute()) if Path(name).is_file() else str(name)


PROFILE = "rstar-lab-profile:"  # precedes the profile in the output of the host


def connect(profile: Profile, host: str | None, log: Callable[[str], None]) -> tuple[Ssh, dict[str, Any]]:
    """Send the working tree to the profile's host, or to `host`; return the settings and the handle of a job there."""
    settings = ssh_settings(profile, host)
    remote, code = install_tree(ssh.Connection(settings), log)
    runs = profile.storage.runs if Path(profile.storage.runs).is_absolute() else f"{remote}/runs"
    return settings, {"ssh": settings.model_dump(), "code": code, "runs": runs}


def profile_of_host(host: str) -> Profile:
    """Return the profile in `rstar-lab/profile.yaml` on a host. Of its section `ssh`, only python, setup, remote_dir
    and backend are used, and its list of secrets is ignored.

    Without that file: the profile `laptop`, with Slurm if the host has sbatch. Raises UserError if the host cannot be reached or
    the file is not a profile.
    """
    settings = Ssh(host=host)
    file = f"{settings.remote_dir}/profile.yaml"
    look = f"echo {PROFILE}; if [ -f {file} ]; then cat {file}; elif command -v sbatch >/dev/null; then echo 'backend: slurm'; fi"
    # Text that login scripts print comes first.
    text = ssh.Connection(settings).run(look).rpartition(f"{PROFILE}\n")[2]
    if text in ("", "backend: slurm\n"):
        settings = settings.model_copy(update={"backend": "slurm" if text else "local"})
        return load_profile("laptop").model_copy(update={"backend": "ssh", "ssh": settings})
    profile = parse_profile(text, f"{host}: {file}")
    if profile.backend == "kuberay":
        raise UserError(f"{host}: {file}: backend must be local, ray, slurm or ssh")
    backend = profile.ssh.backend if profile.backend == "ssh" else profile.backend
    # The host cannot choose how it is reached, nor which variables of this machine are sent to it.
    found = profile.ssh.model_dump(include={"python", "setup", "remote_dir"})
    settings = Ssh(**found, host=host, backend=backend)
    return profile.model_copy(update={"backend": "ssh", "ssh": settings, "secrets": []})


def ssh_settings(profile: Profile, host: str | None) -> Ssh:
    """Return where to send a job: the profile's `ssh` section, with `host` in place of its host.

    With a profile for another backend, that backend runs the job on the host.
    """
    settings = profile.ssh.model_copy(update={"host": host} if host else {})
    return settings if profile.backend == "ssh" else settings.model_copy(update={"backend": profile.backend})


def install_tree(connection: ssh.Connection, log: Callable[[str], None] = print) -> tuple[str, str]:
    """Send the working tree to the host, if it does not have it. Returns the absolute paths of `remote_dir` and of the code.

    Each version of the tree has its own folder, which is named by its content and never changed, so running jobs keep
    their code.
    """
    archive, package = pack_tar(tree_root())
    version = hashlib.sha256(archive).hexdigest()[:16]
    remote_dir = connection.settings.remote_dir
    folder = shlex.quote(remote_dir.removeprefix("~/"))
    look = f"mkdir -p {folder}/code {folder}/runs; cd {folder}; pwd -P; [ -d code/{version} ] && echo present || echo missing"
    try:
        *_, path, presence = connection.run(look).splitlines()
        if presence == "missing":
            log(f"{connection.host}: receives {package}")
            unpack = (
                f"cd {shlex.quote(path)}/code; new=$(mktemp -d .{version}.XXXXXX); trap 'rm -rf $new' EXIT; tar -xzf - -C $new\n"
                f"mv -T $new {version} 2>/dev/null || [ -d {version} ]"
            )
            connection.run(unpack, content=archive, timeout_s=600)
    except ssh.Refused as error:
        raise UserError(
            f"cannot write to {remote_dir} on the host: {error}. Free space or quota there, or set ssh.remote_dir in the profile to "
            "a folder in which you can write"
        ) from error
    return path, f"{path}/code/{version}"
