import importlib.util

import pytest

collect_ignore = [] if importlib.util.find_spec("verl") else ["verl", "test_released_reward.py"]


@pytest.fixture(scope="session")
def memorized_model(tmp_path_factory):
    """(folder, model) of helpers/memorized_model.py."""
    from helpers.memorized_model import make_memorized_model

    folder = tmp_path_factory.mktemp("model") / "memorized_model"
    return folder, make_memorized_model(folder)


@pytest.fixture(scope="module")
def served(memorized_model, tmp_path_factory):
    """Two real vLLM servers with the memorized_model. Some tests change their weights, so files do not share them."""
    from helpers.vllm_servers import two_servers

    with two_servers(memorized_model[0], tmp_path_factory.mktemp("served") / "log") as servers:
        yield servers
