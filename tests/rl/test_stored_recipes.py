"""A run folder may come from somebody else: no function, address or command that its recipe names is used."""

import json
import shutil

import pytest
from helpers.notebooks import GOLDEN

from rstar_lab.analysis import counterfactual
from rstar_lab.common.errors import UserError
from rstar_lab.rl.fork import fork
from rstar_lab.rl.overrides import parse_stored_recipe
from rstar_lab.runs import RunReader
from rstar_lab.untrusted.recipes import ForeignRecipe

OWN = "evil_module:run"
SECTIONS = ("name", "model", "seed", "rl", "stages", "engine", "sandbox", "evaluate")
ROLLOUTS = {"rl.reward": OWN, "rl.tools": [OWN], "rl.metrics": [OWN]}
USED = {
    "rl.method": {"type": OWN},
    "rl.method.loss": OWN,
    "rl.method.roc": {"rule": OWN},
    "rl.method.roc.penalties": [OWN],
    "rl.correction": {"type": OWN},
    "rl.environments": [{"name": "own", "environment": OWN}],
    "stages.0.rl": {"method": {"loss": OWN}},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of a run, beside a module that leaves a mark when it is imported."""
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\nrun = print\n")
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(GOLDEN / "tiny_fast-rl", tmp_path / "runs" / "tiny_fast-rl")
    return folder


def name(run, key, value):
    info = json.loads((run / "run.json").read_text())
    here = info["recipe"]
    *parents, last = key.split(".")
    for part in parents:
        here = here[int(part)] if part.isdigit() else here.setdefault(part, {})
    here[last] = value
    (run / "run.json").write_text(json.dumps(info))


def first_rollout(run):
    return RunReader(run).read("trajectories", ["traj_id", "step"]).slice(0, 1).to_pylist()[0].values()


@pytest.mark.parametrize("key", [*ROLLOUTS, *USED])
def test_no_command_imports_what_a_stored_recipe_names(run, tmp_path, key):
    name(run, "rl.old_log_probs", "trainer")  # which a correction requires
    name(run, key, (ROLLOUTS | USED)[key])
    with pytest.raises(UserError, match=r"names evil_module:run.*may come from somebody else|trigger"):
        fork(run, *first_rollout(run), model=tmp_path)
    if key in USED:
        with pytest.raises(UserError):
            counterfactual(run, 2, ["random"], draws=1, gradients=False)
    else:
        assert len(counterfactual(run, 2, ["random"], draws=1, gradients=False).summary) == 2
    assert not (tmp_path / "MARK").exists()


@pytest.mark.parametrize("tool", ["mcp+stdio:touch MARK", "mcp+http://127.0.0.1:9/x"])
def test_no_tool_server_of_a_stored_recipe_is_started_or_contacted(run, tmp_path, tool):
    name(run, "rl.tools", ["python", tool])
    with pytest.raises(UserError, match="may come from somebody else"):
        fork(run, *first_rollout(run), model=tmp_path)
    assert not (tmp_path / "MARK").exists()


def test_functions_that_the_user_names_are_used(run, tmp_path):
    name(run, "rl.method.roc", {"rule": OWN})
    name(run, "rl.tools", ["python", "mcp+stdio:touch MARK"])
    stored = RunReader(run).info["recipe"]
    with pytest.raises(UserError, match=r"functions=\['evil_module:run'\]"):
        parse_stored_recipe(stored, "run a", SECTIONS)
    recipe = parse_stored_recipe(stored, "run a", SECTIONS, [OWN, "mcp+stdio:touch MARK"], rollouts=True)
    assert recipe.rl.tools == ("python", "mcp+stdio:touch MARK")
    counterfactual(run, 2, ["random"], draws=1, gradients=False, functions=[OWN])
    assert (tmp_path / "MARK").exists()


def test_functions_are_found_whatever_the_stages_are_called(run):
    recipe = dict(RunReader(run).info["recipe"].for_display())
    stage = recipe["stages"][0]
    stages = [
        stage | {"name": "x", "rl": {"method": {"roc": {"penalties": ["tools.a:b", "errors"]}}}},
        stage | {"name": "x.method.roc.penalties", "rl": {"metrics": ["a:b", "c:d"]}},
    ]
    with pytest.raises(UserError, match=r"tools\.a:b"):
        parse_stored_recipe(ForeignRecipe(recipe | {"stages": stages}), "run a", SECTIONS)
