import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def parrot(tmp_path_factory):
    """(folder, model) of parrot.py."""
    from parrot import make_parrot

    folder = tmp_path_factory.mktemp("model") / "parrot"
    return folder, make_parrot(folder)


@pytest.fixture(scope="session")
def served(parrot, tmp_path_factory):
    """Two real vLLM servers with the parrot: see served.py."""
    from served import two_servers

    with two_servers(parrot[0], tmp_path_factory.mktemp("served") / "log") as servers:
        yield servers
