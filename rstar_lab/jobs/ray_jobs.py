"""Jobs on a running Ray cluster, through its job API. The submitter and all nodes must see the runs folder."""

import contextlib
import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.container import mounted_folders, ray_container
from rstar_lab.hardware.processes import wait_until
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.backend import Backend
from rstar_lab.jobs.store import JobFolder, JobSpec

AGENT_TIMEOUT_S = 60
REQUEST_S, MAX_ANSWER_BYTES = 120, 256 * 2**20
STATES_S = 1.0  # maximum age in seconds of the states that are read with one request
# A job that ended without exit.json failed even if Ray reports success: its node died, or the runs folder is not shared.
STATES = {"PENDING": "queued", "RUNNING": "running", "SUCCEEDED": "failed", "STOPPED": "stopped", "FAILED": "failed"}
_states: dict[str, tuple[float, dict[str, str]]] = {}  # address -> time of the request, {job id: state}


class Ray(Backend):
    """Jobs of a running Ray cluster."""

    name = "ray"

    def start(self, folder: JobFolder, spec: JobSpec) -> dict[str, Any]:
        """Submit the supervisor as the job's entrypoint, in the packed tree and in the profile's container if it has one."""
        client, request = _client(spec), _request(load_profile(spec.profile), spec, folder.path)
        for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they log every upload to stderr
        deadline = time.monotonic() + AGENT_TIMEOUT_S
        while True:
            try:
                client.submit_job(submission_id=spec.id, **request)
                return {}
            except RuntimeError as error:
                # The job API is ready before the agent that starts jobs.
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise UserError(f"Ray rejected job {spec.id}: {_short(error)}") from error
                time.sleep(1)

    def rendered(self, machine: Profile, spec: JobSpec, folder: Path) -> str:
        """Return the request to Ray's job API."""
        return json.dumps(_request(machine, spec, folder), indent=1)

    def state(self, folder: JobFolder, spec: JobSpec) -> str:
        """Return the state of a job that has no exit.json. Raises UserError if the cluster does not answer or no longer
        knows the job."""
        if spec.id in (states := _states_of_jobs(spec)):
            return STATES[states[spec.id]]
        client = _client(spec)
        with _explain(f"Ray does not know job {spec.id}"):
            return STATES[client.get_job_status(spec.id).value]

    def stop(self, folder: JobFolder, spec: JobSpec) -> None:
        """Ask Ray to stop the job and wait until it has ended."""
        client = _client(spec)
        client.stop_job(spec.id)
        wait_until(lambda: client.get_job_status(spec.id).is_terminal(), 60)
        _states.pop(_address(spec), None)

    def logs(self, folder: JobFolder, spec: JobSpec) -> str | None:
        """Return the job's output that Ray has stored, for a job without a log file."""
        return _client(spec).get_job_logs(spec.id)


def _request(profile: Profile, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Return the arguments of `submit_job`: the supervisor in the packed tree, and in the profile's container if it has one."""
    code, secrets = str(folder / "code"), JobFolder(folder).secrets
    entrypoint = shlex.join([spec.python, "-m", "rstar_lab.jobs.supervisor", str(folder)])
    forwarded = [str(secrets)] if secrets.exists() else []
    if forwarded:
        # Sourced, because other users of the cluster can read the job's variables in Ray's dashboard.
        file = shlex.quote(forwarded[0])
        missing = f"error: this node cannot read {file}; set XDG_STATE_HOME to a folder that all nodes see"
        entrypoint = f"{{ [ -r {file} ] && . {file}; }} || {{ echo {shlex.quote(missing)}; exit 1; }}; {entrypoint}"
    # The trainer's ray.init repeats the profile's variables. By default Ray rejects a variable that the job also sets.
    variables = {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1", **spec.environment}
    runtime_env: dict[str, Any] = {"working_dir": code, "env_vars": variables}
    if profile.container is not None:
        # Ray allows no working_dir beside a container. The job's folder is mounted, so the job starts in it.
        entrypoint = f"cd {shlex.quote(code)} && {entrypoint}"
        mounts = [*mounted_folders(profile, spec.runs_dir, folder), *forwarded]
        runtime_env = {"container": ray_container(profile, mounts), "env_vars": {"PYTHONPATH": code, **variables}}
    metadata = {"recipe": spec.recipe, "profile": spec.profile}
    return {"entrypoint": entrypoint, "runtime_env": runtime_env, "metadata": metadata}


def _states_of_jobs(spec: JobSpec) -> dict[str, str]:
    """Return {job id: state} of the job's cluster, read at most STATES_S ago: one request however many jobs a board has."""
    read_at, states = _states.get(_address(spec), (-math.inf, {}))
    if time.monotonic() - read_at > STATES_S:
        client = _client(spec)
        with _explain(f"Ray at {_address(spec)} does not list its jobs"):
            states = {job.submission_id: str(job.status.value) for job in client.list_jobs() if job.submission_id}
        _states[_address(spec)] = time.monotonic(), states
    return states


def _limit(response: Any, **_: Any) -> None:
    """Read the answer of a request, at most MAX_ANSWER_BYTES in REQUEST_S. Raises requests.ConnectionError."""
    from requests import ConnectionError as RequestError

    content, end = bytearray(), time.monotonic() + REQUEST_S
    for chunk in response.iter_content(2**16):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES or time.monotonic() > end:
            raise RequestError(f"its answer is longer than {MAX_ANSWER_BYTES:,} bytes or {REQUEST_S} s")
    response._content = bytes(content)  # `requests` does not read it again


def _client(spec: JobSpec) -> Any:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_S, hooks={"response": _limit}, **options)

    # Pass the token explicitly: Ray reads its token settings when it is imported, possibly before they are set.
    path = spec.handle.get("token_path") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    token = os.environ.get("RAY_AUTH_TOKEN") or (Path(path).read_text().strip() if path and Path(path).exists() else "")
    headers = {"Authorization": f"Bearer {token}"} if token else None

    address = _address(spec)
    saved_address = os.environ.pop("RAY_ADDRESS", None)  # the client would prefer this variable to its argument
    hint = (
        "set address=http://HEAD:8265; if the cluster requires a token, also set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    )
    try:
        with _explain(f"no Ray job API at {address}", hint):
            return Client(address, headers=headers)
    finally:
        if saved_address is not None:
            os.environ["RAY_ADDRESS"] = saved_address


@contextlib.contextmanager
def _explain(problem: str, hint: str = "") -> Iterator[None]:
    """Convert an error of Ray to UserError. It raises RuntimeError, its own AuthenticationError, and errors of requests."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{problem}: {_short(error)}" + (f"; {hint}" if hint else "")) from error


def _address(spec: JobSpec) -> str:
    return spec.handle["address"] or os.environ.get("RAY_DASHBOARD_ADDRESS") or "http://127.0.0.1:8265"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
