"""Functions of the user in verl's processes: the same steps as under the local trainer."""

import pytest
from helpers.own_parts import example_recipe, write_module

from benchmarks.verl_parity import compare, prepare, train_locally, train_with_verl
from rstar_lab.runs.reader import RunReader


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_own_parts_reach_verls_workers_and_equal_the_local_trainer(tmp_path, monkeypatch):
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = prepare(tmp_path, mini_batches=2, **example_recipe()["rl"])
    ours = train_locally(recipe, tmp_path / "local")
    theirs = train_with_verl(recipe, tmp_path / "verl", "--set", "engine.scheduler=my_parts:RoundRobin")
    assert compare(ours, theirs).differences == []
    for mine, verls in zip(RunReader(ours).metrics(), RunReader(theirs).metrics(), strict=True):
        assert verls["metrics/longest"] == mine["metrics/longest"] > 0
        assert verls["importance_weight"] == pytest.approx(mine["importance_weight"], rel=1e-4)
