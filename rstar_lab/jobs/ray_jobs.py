"""Jobs on a Ray cluster, through its job API. The runs folder must be seen by the submitter and by the cluster's nodes."""

import os
import time
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.jobs.store import JobFolder, JobSpec

AGENT_S = 60
ENDED = {"SUCCEEDED": "failed", "STOPPED": "stopped", "FAILED": "failed"}


def start(folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
    """Submit the supervisor as the job's entrypoint, with the packed tree as its working directory."""
    client = _client(spec)
    deadline = time.monotonic() + AGENT_S
    while True:
        try:
            client.submit_job(
                entrypoint=f"{spec.python} -m rstar_lab.jobs.supervisor {folder.path}",
                submission_id=spec.id,
                runtime_env={"working_dir": str(folder.path / "code"), "env_vars": spec.environment},
                metadata={"recipe": spec.recipe, "profile": spec.profile},
            )
            return {}
        except RuntimeError as error:
            # The job API answers before the agent that starts jobs is up.
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise UserError(f"Ray refused job {spec.id}: {_short(error)}") from error
            time.sleep(1)


def state(folder: JobFolder, spec: JobSpec) -> str:
    status = str(_client(spec).get_job_status(spec.id).value)
    if status == "PENDING":
        return "queued"
    if status == "RUNNING":
        return "running"
    # Ended without the supervisor's word: its node died, or the runs folder is not shared.
    return ENDED[status]


def stop(folder: JobFolder, spec: JobSpec) -> None:
    """Ask Ray to stop the job, and wait until it has."""
    client = _client(spec)
    client.stop_job(spec.id)
    deadline = time.monotonic() + 60
    while not client.get_job_status(spec.id).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.2)


def logs(folder: JobFolder, spec: JobSpec) -> str | None:
    return _client(spec).get_job_logs(spec.id)


def _client(spec: JobSpec) -> Any:
    from ray.job_submission import JobSubmissionClient

    # Ray's client sends a token only where the environment said so when Ray was imported, which may have been long ago.
    path = spec.handle.get("token_path") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    token = os.environ.get("RAY_AUTH_TOKEN") or (Path(path).read_text().strip() if path and Path(path).exists() else "")
    headers = {"Authorization": f"Bearer {token}"} if token else None

    address = spec.handle.get("address") or os.environ.get("RAY_DASHBOARD_ADDRESS") or "http://127.0.0.1:8265"
    elsewhere = os.environ.pop("RAY_ADDRESS", None)  # the client would prefer it to the address it is given
    try:
        return JobSubmissionClient(address, headers=headers)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError and its own AuthenticationError
        raise UserError(
            f"no Ray job API at {address}: {_short(error)}. Give address=http://HEAD:8265; a cluster with tokens also needs "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here"
        ) from error
    finally:
        if elsewhere is not None:
            os.environ["RAY_ADDRESS"] = elsewhere


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
