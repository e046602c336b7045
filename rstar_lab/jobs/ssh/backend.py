"""The backend `ssh`: passes every operation to the backend of the job on its host."""

import base64
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rstar_lab.errors import UserError
from rstar_lab.hardware.profiles import Profile, Ssh
from rstar_lab.jobs.backend import Backend
from rstar_lab.jobs.preflight import JobDescription
from rstar_lab.jobs.prepare import Submission
from rstar_lab.jobs.ssh import agent_at, agent_of
from rstar_lab.jobs.ssh.connection import Agent, ConnectionLost
from rstar_lab.jobs.ssh.host import check_run_names, connect
from rstar_lab.jobs.ssh.mirror import pull, start_mirror
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.runs.files import lock_file

# Preflight composes the trainer's configuration, which takes up to a minute on a slow file system.
SUBMIT_S = 300
RETRY_S = 60


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
        with lock_file(
            folder.path / ".log.lock"
        ):  # two notebooks may watch one job, and each byte must be appended once
            while True:
                size = folder.log.stat().st_size if folder.log.exists() else 0
                part = agent_of(spec).request("log", job_id=spec.id, offset=size)
                data = base64.b64decode(part["data"])
                if data:
                    with folder.log.open("ab") as log:
                        log.write(data)
                    continue
                status = str(part["status"])
                if status in ("finished", "failed", "stopped") and folder.read("exit.json") is None:
                    # Written last: a job with exit.json has its complete log here.
                    end = {"code": part["exit_code"], "stopped": status == "stopped", "ended": time.time()}
                    folder.write("exit.json", end)
                return status

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """End the job on the host. Raises ConnectionLost."""
        agent_of(spec).request("stop", job_id=spec.id, timeout_s=150)
        self.state(folder, spec)

    def logs(self, folder: JobFolder, spec: JobSpec) -> str | None:
        """Return None: the log is copied by `state`."""
        return None

    def submit(self, job: Submission) -> JobFolder:
        """Submit a job on the profile's host, or on `job.host`.

        A repeated request after a lost connection does not submit twice. Raises UserError if the host cannot be reached,
        rejects the job, or lacks Python.
        """
        settings, handle = connect(job.machine, job.host, job.log)
        runs_dir = Path(job.runs_dir or "runs").absolute()
        check_run_names(job.run_name, runs_dir, handle)
        spec = JobSpec(
            id=job.job_id,
            recipe=_absolute(job.recipe),
            profile=_absolute(job.profile) if job.profile else job.machine.name,
            backend=self.name,
            command=[settings.python],
            cwd=str(Path.cwd()),
            runs_dir=str(runs_dir),
            overrides=dict(job.overrides),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            run=None if job.command == "evaluate" else f"{job.run_name}-rl",
            handle=handle | {"own_profile": job.profile is None},
            action=job.command,
            arguments=job.arguments,
        )
        # Saved first: if this process dies while the host submits, the job can still be found here.
        folder = JobFolder.of(runs_dir, job.job_id)
        folder.create()
        folder.save(spec)
        try:
            answer = agent_of(spec).request(
                "submit", timeout_s=SUBMIT_S, retry_s=RETRY_S, job_id=job.job_id,
                **_request(job.recipe, job.machine, settings, job.overrides),
                command=job.command, name=job.run_name, preflight=job.preflight, arguments=job.arguments,
                secrets={name: os.environ[name] for name in job.machine.secrets if name in os.environ},
            )  # fmt: skip
        except ConnectionLost as error:
            raise ConnectionLost(
                f"{error}. It is unknown whether {job.job_id} was submitted: `rstar-lab jobs list` shows it when the host answers"
            ) from error
        except UserError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        for message in answer["messages"]:
            job.log(f"{settings.host}: {message}")
        start_mirror(folder, spec)
        return folder

    def describe(
        self,
        recipe: str | Path,
        profile: str | None,
        machine: Profile,
        overrides: Mapping[str, Any],
        *,
        host: str | None,
        command: str | None,
    ) -> JobDescription:
        """Run preflight on the host; return what the job requires."""
        settings, handle = connect(machine, host, lambda _: None)
        found = agent_at(handle).request(
            "describe", timeout_s=SUBMIT_S, **_request(recipe, machine, settings, overrides), command=command
        )
        return JobDescription(**found | {"recipe": str(recipe), "profile": machine.name, "host": settings.host})

    def rows(self, jobs: Sequence[JobSpec]) -> dict[str, dict[str, Any]]:
        """Read all jobs on one host with one request over one connection."""
        groups: dict[Agent, list[str]] = {}
        answers: dict[str, dict[str, Any]] = {}
        for spec in jobs:
            try:
                groups.setdefault(agent_of(spec), []).append(spec.id)
            except (KeyError, TypeError, ValueError, UserError) as error:  # a damaged job.json
                answers[spec.id] = {"status": "unknown", "progress": {"line": str(error)}}
        for host, ids in groups.items():
            try:
                answers |= {row["id"]: row for row in host.request("jobs", ids=ids) if row["id"] in ids}
            except UserError as error:
                answers |= {job_id: {"status": "unknown", "progress": {"line": str(error)}} for job_id in ids}
        return answers

    def place(self, spec: JobSpec) -> str:
        """Return the host, and the backend there."""
        return f"{spec.handle['ssh']['host']} ({spec.handle['ssh']['backend']})"

    def copy_log(self, folder: JobFolder, spec: JobSpec) -> None:
        """Copy the new part of the log. Raises ConnectionLost."""
        self.state(folder, spec)

    def copy_runs(self, spec: JobSpec) -> None:
        """Copy the steps that the job has written since its runs were last copied. Raises ConnectionLost."""
        pull(spec)

    def options_of(self, spec: JobSpec) -> dict[str, Any]:
        """Return the host of the job."""
        return {"host": spec.handle["ssh"]["host"]}


def _request(recipe: str | Path, profile: Profile, settings: Ssh, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return recipe, profile and overrides in the agent's form: the content of files instead of their paths."""
    behind = profile.model_copy(update={"backend": settings.backend, "ssh": Ssh()})
    return {
        "recipe": str(recipe), "recipe_text": Path(recipe).read_text() if Path(recipe).is_file() else None,
        "profile_text": yaml.safe_dump(behind.model_dump(mode="json"), sort_keys=False), "overrides": dict(overrides),
    }  # fmt: skip


def _absolute(name: str | Path) -> str:
    """Return the absolute path of an existing file; return any other name unchanged."""
    return str(Path(name).absolute()) if Path(name).is_file() else str(name)
