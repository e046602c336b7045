import pytest


@pytest.fixture(scope="session")
def parrot(tmp_path_factory):
    """(folder, model) of parrot.py."""
    from helpers.parrot import make_parrot

    folder = tmp_path_factory.mktemp("model") / "parrot"
    return folder, make_parrot(folder)


@pytest.fixture(scope="session")
def served(parrot, tmp_path_factory):
    """Two real vLLM servers with the parrot: see served.py."""
    from helpers.vllm_servers import two_servers

    with two_servers(parrot[0], tmp_path_factory.mktemp("served") / "log") as servers:
        yield servers
