"""Jobs on another machine, reached with ssh. On that host, the job runs with the backend local, ray or slurm. Its log
and its exit code are copied to this machine whenever its status is read, and its runs by `mirror`. The host needs the
package's dependencies, and no open port other than sshd's.
"""

from collections.abc import Mapping
from typing import Any

from rstar_lab.hardware.profiles import Ssh
from rstar_lab.jobs.ssh.connection import Agent, Connection
from rstar_lab.jobs.store import JobSpec

# One agent per host, code and runs folder; all jobs of a board use it.
_agents: dict[tuple[str, str, str], Agent] = {}


def agent_of(spec: JobSpec) -> Agent:
    """Return this process's agent on the host of a job."""
    return agent_at(spec.handle)


def agent_at(handle: Mapping[str, Any]) -> Agent:
    """Return this process's agent for the handle of a job: its `ssh` settings, and the folders `code` and `runs` on the host."""
    settings = Ssh(**handle["ssh"])
    key = (settings.model_dump_json(), handle["code"], handle["runs"])
    if key not in _agents:
        _agents[key] = Agent(Connection(settings), handle["code"], handle["runs"])
    return _agents[key]


def forget_agents() -> None:
    """Close all agents of this process."""
    while _agents:
        _agents.popitem()[1].close()
