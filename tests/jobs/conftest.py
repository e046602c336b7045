import pytest
from helpers.ssh_server import SshServer

from rstar_lab.jobs.ssh import forget_agents


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real SSH server, shared by the tests of a file."""
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    yield server
    forget_agents()
    server.stop()
