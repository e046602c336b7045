from pathlib import Path

import pytest
from helpers.run_rows import rows
from helpers.ssh_server import SshServer, forget_agents

from rstar_lab.jobs.ssh.connection import Agent, Connection
from rstar_lab.runs import RunWriter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real SSH server, shared by the tests of a file."""
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    yield server
    forget_agents()
    server.stop()


@pytest.fixture
def settings(server, tmp_path):
    if server.process.poll() is not None:
        server.start()
    return server.settings(tmp_path / "far")


@pytest.fixture
def agent(settings, tmp_path):
    """An agent on the host, whose folder of runs is `tmp_path/far/runs`."""
    far = tmp_path / "far" / "runs"
    far.mkdir(parents=True)
    agent = Agent(Connection(settings), str(ROOT), str(far))
    yield agent
    agent.close()


@pytest.fixture
def write_steps():
    """A function that writes steps with a writer."""

    def write(writer, steps, seed=0):
        for step in steps:
            writer.write_step("rl", step, **rows(step), metrics={"reward": 0.5, "seed": seed})

    return write


@pytest.fixture
def write_run(write_steps):
    """A function that writes a run of some steps."""

    def write(runs, steps=3, seed=0, run_id="run"):
        with RunWriter.open(runs, run_id, kind="train", recipe={}, seed=0) as writer:
            write_steps(writer, range(1, steps + 1), seed)

    return write
