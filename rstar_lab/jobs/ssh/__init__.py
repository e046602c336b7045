"""Jobs on another machine, reached with ssh. On that host, the job runs with the backend local, ray or slurm. Its log
and its exit code are copied to this machine whenever its status is read, and its runs by `mirror`. The host needs the
package's dependencies, and no open port other than sshd's.
"""

import base64
import fcntl
import time
from collections.abc import Mapping
from typing import Any

from rstar_lab.hardware.profiles import Ssh
from rstar_lab.jobs.ssh.connection import Agent, Connection, ConnectionLost
from rstar_lab.jobs.store import JobFolder, JobSpec

__all__ = ["Agent", "Connection", "ConnectionLost", "agent", "agent_of", "logs", "state", "stop"]
# One agent per host, code and runs folder; all jobs of a board use it.
_agents: dict[tuple[str, str, str], Agent] = {}


def agent_of(spec: JobSpec) -> Agent:
    """Return this process's agent on the host of a job."""
    return agent(spec.handle)


def agent(handle: Mapping[str, Any]) -> Agent:
    """Return this process's agent for the handle of a job: its `ssh` settings, and the folders `code` and `runs` on the host."""
    settings = Ssh(**handle["ssh"])
    key = (settings.model_dump_json(), handle["code"], handle["runs"])
    if key not in _agents:
        _agents[key] = Agent(Connection(settings), handle["code"], handle["runs"])
    return _agents[key]


def state(folder: JobFolder, spec: JobSpec) -> str:
    """Copy the new part of the job's log, and its exit code if it has ended; return its state. Raises
    ConnectionLost."""
    with (folder.path / ".log.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two notebooks may watch one job, and each byte must be appended once
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


def stop(folder: JobFolder, spec: JobSpec) -> None:
    """End the job on the host. Raises ConnectionLost."""
    agent_of(spec).request("stop", job_id=spec.id, timeout_s=150)
    state(folder, spec)


def logs(folder: JobFolder, spec: JobSpec) -> str | None:
    """Return None: the log is copied by `state`."""
    return None


def forget_agents() -> None:
    """Close all agents of this process."""
    while _agents:
        _agents.popitem()[1].close()


def describe(spec: JobSpec) -> dict[str, Any]:
    """Return where the job runs: host, and its folder of runs and backend on that host."""
    return {"host": spec.handle["ssh"]["host"], "runs": spec.handle["runs"], "backend": spec.handle["ssh"]["backend"]}
