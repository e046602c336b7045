"""Tests of the simulation of whole steps, of `rstar-lab plan`, and of the comparison with published speed-ups."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.plan import make_plan, plot_plan
from benchmarks.published_async import PUBLISHED
from benchmarks.step_simulator import Costs, Workload, simulate
from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe

pytestmark = pytest.mark.slow

WORK = Workload(groups=32, group_size=8, mean_tokens=1000, max_tokens=4000, calls=2, tool_s=0.3)
ALONE = Workload(groups=4, group_size=1, mean_tokens=100, max_tokens=100, calls=0, tool_s=0, sigma=0.0)


def costs(engines: int = 4, update_s: float = 20.0, weights_s: float = 1.0) -> Costs:
    return Costs(engines, lambda batch: 0.01 + 0.0001 * batch, 256, update_s, weights_s)


def test_a_step_whose_time_is_known():
    # Four rollouts of 100 tokens on four engines: 100 x decode_s(1), then the update and the weight sync.
    run = simulate(ALONE, costs(), "sync")
    assert run.step_s == pytest.approx(100 * 0.0101 + 20 + 1)
    assert run.idle_trainer == pytest.approx(100 * 0.0101 / run.step_s)
    # In the background: the update covers the generation.
    run = simulate(ALONE, costs(), "one_step_off")
    assert run.step_s == pytest.approx(20 + 1) and run.idle_trainer == pytest.approx(0, abs=1e-9)
    # A trainer that is faster than the engine waits for it.
    assert simulate(ALONE, costs(update_s=0.1, weights_s=0.0), "async").idle_trainer > 0.7


def test_modes_differ_as_they_must():
    runs = {mode: simulate(WORK, costs(), mode) for mode in ("sync", "one_step_off", "async")}
    assert (runs["sync"].staleness_max, runs["one_step_off"].staleness_max) == (0, 1)
    assert runs["async"].staleness_max <= 1
    assert runs["one_step_off"].step_s < 0.9 * runs["sync"].step_s
    assert simulate(WORK, costs(), "async", max_staleness=3).staleness_max <= 3
    assert simulate(WORK, costs(), "sync") == runs["sync"], "the same seed gives the same run"


def test_colocated_engines_pause_during_the_update():
    small = Workload(groups=8, group_size=4, mean_tokens=1000, max_tokens=4000, calls=2, tool_s=0.3)
    sync, colocated, apart = (
        simulate(small, costs(), mode, max_staleness=2, colocated=shared)
        for mode, shared in (("sync", True), ("async", True), ("async", False))
    )
    assert apart.step_s < colocated.step_s < sync.step_s, "without the wait for the longest rollout, but in turn"
    assert colocated.idle_generator > 20 / colocated.step_s


def test_a_large_step_is_scaled_down_together_with_its_engines():
    large = Workload(groups=320, group_size=8, mean_tokens=1000, max_tokens=4000, calls=2, tool_s=0.3)
    assert simulate(large, costs(engines=40), "sync").step_s == pytest.approx(
        simulate(WORK, costs(), "sync").step_s, rel=0.15
    )


def test_published_speed_ups_of_two_systems_are_predicted_within_a_fifth():
    errors = {pair.name: pair.predict() / pair.published - 1 for pair in (PUBLISHED[0], PUBLISHED[-1])}
    assert len(errors) == 2 and all(abs(error) < 0.2 for error in errors.values()), errors


@pytest.fixture(scope="module")
def plan():
    return make_plan(load_recipe("qwen3_14b_h100x8", {}), load_profile("h100x8"), batches=[4, 8])


def test_plan_compares_modes_splits_and_batches(plan):
    assert {row.mode for row in plan.rows} == {"sync", "one_step_off", "async"}
    assert {row.problems_per_step for row in plan.rows} == {4, 8}
    assert all(row.trainer_gpus + row.generator_gpus == (16 if row.colocated else 8) for row in plan.rows)
    assert {row.mode for row in plan.rows if row.colocated} == {"sync", "async"}
    assert plan.rows[0].mode == "sync" and plan.rows[0].over_sync == 1.0
    best = plan.recommended
    assert best.fits and best.over_sync >= max(row.over_sync for row in plan.rows if row.fits) * 0.98
    assert plan.runnable is not None and plan.runnable.supported
    assert all(row.supported == row.colocated for row in plan.rows), "verl's engines share the GPUs of its trainer"
    shown = plot_plan(plan)
    assert sum(len(trace.x) for trace in shown.data) == sum(row.fits for row in plan.rows)


def test_plan_command_prints_a_table_or_json():
    arguments = ["plan", "qwen3_14b_h100x8", "--profile", "h100x8", "--set", "rl.problems_per_step=4"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0 and "recommended" in done.output and "…" not in done.output
    made = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert made["stage"] == "one" and made["recommended"] in made["rows"]
    assert made["runnable"]["colocated"]
    assert {"mode", "max_staleness", "trainer_gpus", "generator_gpus", "step_s", "over_sync"} <= made["rows"][0].keys()


def test_errors_of_plan_name_the_missing_input():
    recipe = load_recipe("qwen3_14b_h100x8", {})
    with pytest.raises(UserError, match="has no GPU"):
        make_plan(recipe, load_profile("laptop"))
    with pytest.raises(UserError, match="no stage 'four'"):
        make_plan(recipe, load_profile("h100x8"), stage="four")
    with pytest.raises(UserError, match="give numbers separated by commas"):
        CliRunner().invoke(app, ["plan", "qwen3_14b_h100x8", "--batches", "a,b"], catch_exceptions=False)
