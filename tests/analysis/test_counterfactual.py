"""Tests of `analysis.counterfactual_lab` on the golden run and on a small run with checkpoints."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.notebooks import GOLDEN
from helpers.scripted_training import problem, train

from rstar_lab.analysis import counterfactual
from rstar_lab.analysis.counterfactual_lab import _PANELS, Counterfactual
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.recipe import RecipeError
from rstar_lab.rl.training.rollout_source import RolloutSource
from rstar_lab.rl.trajectory import ToolCallRecord
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.reader import RunReader

pytestmark = pytest.mark.slow

RUN = GOLDEN / "tiny_fast-rl"


def test_the_rule_of_the_run_selects_exactly_what_was_trained_on():
    result = counterfactual(RUN, [2, 5], ["paper rule", "released rule"], draws=3)
    for step in (2, 5):
        table = result.advantages(step)
        assert table["as trained"].notna().sum() > 0
        assert (table["as trained"].notna() == table["paper rule"].notna()).all()
        assert (table["as trained"] - table["paper rule"]).abs().max() < 1e-5
    changed = result.summary.set_index(["step", "rule"]).changed
    assert changed[2, "paper rule"] == 0 and changed[2, "released rule"] > 0


def test_kept_share_is_the_mean_over_draws():
    rows = counterfactual(RUN, 3, ["random", "released rule", "all rollouts"], draws=8, gradients=False).rows
    by_rule = {name: part for name, part in rows.groupby("rule")}
    assert by_rule["random"].kept_share.nunique() > 3
    assert set(by_rule["released rule"].kept_share) <= {0.0, 1.0}
    kept = by_rule["all rollouts"]
    assert kept.kept.sum() >= by_rule["random"].kept.sum()


def test_missing_gradients_are_explained():
    summary = counterfactual(RUN, 2, ["random"], draws=1).summary
    assert set(summary.note) == {"the run has no checkpoint"} and summary.loss.isna().all()


def test_steps_without_kept_rollouts_have_no_figure():
    result = counterfactual(RUN, 2, ["random"], draws=1)
    empty = Counterfactual(result.rows, result.summary.assign(**dict.fromkeys(_PANELS, np.nan)))
    with pytest.raises(RunStoreError, match="no rollout of these steps is kept"):
        _ = empty.figure


def test_wrong_input_is_named():
    with pytest.raises(RunStoreError, match="'papr' is unknown"):
        counterfactual(RUN, 2, ["papr"])
    with pytest.raises(RecipeError, match=r"clip_hihg: unknown key"):
        counterfactual(RUN, 2, [{"method.clip_hihg": 0.3}])
    with pytest.raises(RunStoreError, match="no trajectories of step 99"):
        counterfactual(RUN, 99, ["random"])


@pytest.fixture
async def run_with_checkpoints(tmp_path):
    problems = {"one": [problem(f"p{number}", 0.5) for number in range(4)]}
    stages = [{"name": "one", "steps": 3}]
    _, folder = await train(
        tmp_path / "runs",
        stages,
        problems,
        method={"roc": {"oversample": 2}},
        token_arrays="all",
        problems_per_step=4,
        keep_checkpoints=5,
    )
    return folder


async def test_the_gradient_is_that_of_the_actual_update(run_with_checkpoints):
    rules = [
        "paper rule",
        "random",
        {"method.aggregation": "seq-mean-token-mean"},
        {"method.loss": "cispo"},
        {"method.normalise_std": False},
    ]
    result = counterfactual(run_with_checkpoints, 3, rules)
    summary = result.summary.set_index("rule")
    assert set(summary.weights_step) == {2} and set(summary.note) == {""}
    trained = RunReader(run_with_checkpoints).metrics()[2]
    assert summary.gradient_norm["as trained"] == pytest.approx(trained["grad_norm"], rel=1e-3)
    assert summary.loss["as trained"] == pytest.approx(trained["loss"], abs=1e-4)
    assert summary.gradient_cosine["paper rule"] == pytest.approx(1, abs=1e-5)
    # With a ratio of 1, the gradients of grpo and cispo are equal.
    assert summary.without_effect["method.loss=cispo"] == "method.loss" and summary.without_effect["random"] == ""
    assert summary.gradient_cosine["method.loss=cispo"] == pytest.approx(1, abs=1e-4)
    assert 0 < summary.gradient_cosine["method.aggregation=seq-mean-token-mean"] < 0.9999
    assert not math.isnan(summary.gradient_cosine["random"]) and summary.gradient_cosine["random"] < 0.9999
    assert {"gradient cosine to the trained batch"} <= {
        note.text.replace("<br>", " ") for note in result.figure.layout.annotations
    }


async def test_rollouts_masked_for_a_failed_call_can_be_selected_again(tmp_path, monkeypatch):
    generate = RolloutSource.generate
    failed = ToolCallRecord(0, 0, "python", "", Outcome.SANDBOX_ERROR, "", 0.0, 0.0, 0)

    async def with_failures(*arguments, **keywords):
        rollouts = await generate(*arguments, **keywords)
        return [replace(t, calls=(failed,) if i % 4 == 0 else ()) for i, t in enumerate(rollouts)]

    monkeypatch.setattr(RolloutSource, "generate", with_failures)
    problems = {"one": [problem(f"p{number}", 0.5) for number in range(4)]}
    keys = {"token_arrays": "all", "problems_per_step": 4, "group_size": 8, "on_infrastructure_failure": "mask"}
    _, folder = await train(tmp_path / "runs", [{"name": "one", "steps": 2}], problems, **keys)
    assert RunReader(folder).metrics()[1]["class/masked/sandbox_error"] == 8
    result = counterfactual(folder, 2, [{"on_infrastructure_failure": "keep"}])
    trained, kept = result.summary.to_dict("records")
    assert kept["kept"] == trained["kept"] + 8 and kept["changed"] == pytest.approx(8 / kept["kept"])
    assert 0 < kept["gradient_cosine"] < 0.999 and not math.isnan(kept["gradient_norm"])


@pytest.mark.slow
async def test_rollouts_without_token_arrays_have_no_gradient(tmp_path):
    problems = {"one": [problem(f"p{number}", 0.5) for number in range(4)]}
    _, folder = await train(
        tmp_path / "runs",
        [{"name": "one", "steps": 2}],
        problems,
        method={"roc": {"oversample": 2}},
        token_arrays="kept",
        problems_per_step=4,
    )
    summary = counterfactual(folder, 2, ["random"]).summary.set_index("rule")
    assert summary.note["as trained"] == "" and summary.loss.notna()["as trained"]
    assert "token arrays" in summary.note["random"] and math.isnan(summary.loss["random"])


def test_terms_that_are_left_out_and_keys_without_effect_are_named():
    from rstar_lab.rl.recipe import RlSection
    from rstar_lab.rl.training.counterfactual import gradient_notes, keys_without_effect

    clip = {"method.clip_high": 0.4, "method.loss": "gspo", "group_size": 4}
    assert keys_without_effect(RlSection(), clip) == ["method.clip_high", "method.loss"]
    assert keys_without_effect(RlSection(old_log_probs="engine"), clip) == []
    assert gradient_notes(RlSection()) == []
    notes = gradient_notes(RlSection(method={"add": [{"type": "opd", "weight": 1}, {"type": "echo", "weight": 1}]}))
    assert [note.split(",")[0].split(":")[0] for note in notes] == ["without opd", "without the cross-entropy of echo"]


def test_the_cosine_of_equal_gradients_is_one():
    """Sums in float32 gave 1.0002 for 1.8 million parameters."""
    import torch

    from rstar_lab.rl.training.counterfactual import cosine

    gradient = torch.randn(1_800_000, generator=torch.Generator().manual_seed(0)) ** 5
    assert cosine(gradient, 3 * gradient) == pytest.approx(1.0, abs=1e-9)
    assert math.isnan(cosine(gradient, torch.zeros_like(gradient)))
