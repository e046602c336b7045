"""Tests of the algorithm options in the trainer: each against a formula, or by its effect on a run."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.scripted_training import metrics_without_times, problem, tiny, train, weights
from helpers.trajectories import BATCH

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams, trained_mask
from rstar_lab.rl.methods.otb import Otb
from rstar_lab.rl.models import packed_attention
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.section import merged
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.driver import LocalPasses
from rstar_lab.rl.training.log_probs import micro_batches, token_statistics
from rstar_lab.rl.training.update import Learner
from rstar_lab.runs.reader import RunReader

CPU = torch.device("cpu")
GROUPS = [replace(t, group_id=f"g{i // 3}") for i, t in enumerate(BATCH)]
ADVANTAGES = [1.0, -0.5, -0.5, 0.7, 0.7, -1.4]


def tokens_of(model, temperature: float = 1.0) -> list[torch.Tensor]:
    """Return the log-probs of the model tokens of each rollout, one sequence at a time."""
    found = []
    for t in GROUPS:
        logits = model(torch.tensor([t.prompt_ids + t.response_ids])).logits[0].float() / temperature
        targets = torch.tensor(t.response_ids)[:, None]
        own = logits.log_softmax(-1)[len(t.prompt_ids) - 1 : -1].gather(1, targets)[:, 0]
        found.append(own[torch.tensor(t.loss_mask)])
    return found


def as_rollouts(log_probs: list[torch.Tensor]):
    """Return the rollouts with these engine log-probs on their model tokens."""
    rollouts = []
    for t, values in zip(GROUPS, log_probs, strict=True):
        full = torch.zeros(len(t.response_ids))
        full[torch.tensor(t.loss_mask)] = values.detach()
        rollouts.append(replace(t, log_probs=full.tolist()))
    return rollouts


def update(rl: RlSection, rollouts, *, model=None, reference=None):
    """Run an update that does not change the weights. Returns (metrics, gradient)."""
    learner = Learner(model or tiny())
    learner.begin_stage(rl, reset=False, reference=reference)
    assert learner.model.is_gradient_checkpointing == rl.gradient_checkpointing
    gradients: list[torch.Tensor] = []
    assert learner.optimizer is not None

    def record_gradient() -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))

    learner.optimizer.step = record_gradient  # type: ignore[assignment, method-assign]
    metrics = learner.update(Selection.of(rollouts, ADVANTAGES), rl, lr_scale=1.0, seed=5).metrics
    return metrics, gradients[0]


def rl_of(**keys) -> RlSection:
    defaults = {"max_grad_norm": 1e9, "micro_batch_tokens": 60, "limits": {"max_response_tokens": 40}}
    return RlSection(**merged(defaults, keys))


def gradient_of(loss: torch.Tensor, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_entropy_is_recorded_in_every_mini_batch():
    rollouts = as_rollouts(tokens_of(tiny()))
    recorded = []
    for mini_batches in (1, 2):
        rl = rl_of(old_log_probs="engine", mini_batches=mini_batches, lr=1e-6)
        learner = Learner(tiny())
        learner.begin_stage(rl, reset=False, reference=None)
        recorded.append(learner.update(Selection.of(rollouts, ADVANTAGES), rl, lr_scale=1.0, seed=5))
    one, two = recorded
    for expected, entropy, t in zip(one.entropies, two.entropies, rollouts, strict=True):
        assert np.isfinite(entropy).tolist() == t.loss_mask
        np.testing.assert_allclose(entropy, expected, atol=1e-2)
    # Log-probs of later mini-batches would be those of weights that an optimizer step has changed.
    assert [values is not None for values in two.log_probs] == [True] * 3 + [False] * 3


def test_kl_to_the_reference_equals_the_formula():
    model, reference = tiny(), tiny(seed=1).requires_grad_(False)
    own, other = tokens_of(model), tokens_of(reference)
    rollouts = as_rollouts(own)
    count = sum(len(values) for values in own)
    kl = torch.stack([((r - p).exp() - (r - p) - 1).sum() for p, r in zip(own, other, strict=True)]).sum() / count
    policy = -sum((a * p).sum() for a, p in zip(ADVANTAGES, own, strict=True)) / count
    metrics, gradient = update(rl_of(method={"kl_coefficient": 0.3}), rollouts, reference=reference)
    assert metrics["reference_kl"] == pytest.approx(kl.item(), rel=1e-4) and metrics["reference_kl"] > 0.001
    torch.testing.assert_close(gradient, gradient_of(policy + 0.3 * kl, model), atol=1e-5, rtol=1e-4)


def test_statistics_add_up_over_micro_batches():
    rollouts = as_rollouts([values - 0.5 for values in tokens_of(tiny())])
    one_batch, _ = update(rl_of(old_log_probs="engine", micro_batch_tokens=10_000), rollouts)
    parts, _ = update(rl_of(old_log_probs="engine", micro_batch_tokens=1), rollouts)
    assert parts["tokens"] == one_batch["tokens"] == sum(t.model_tokens for t in rollouts)
    assert parts == pytest.approx(one_batch, rel=1e-4)
    assert one_batch["ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-4)


def test_fp32_head_is_more_precise_than_bf16():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # large logits, like those of a trained model
    (micro,) = micro_batches(GROUPS, 10_000, CPU)
    with torch.no_grad():
        exact, _ = token_statistics(model, micro)
        with torch.autocast("cpu", torch.bfloat16):
            rough, _ = token_statistics(model, micro)
            hidden = model.model(input_ids=micro.ids_BT).last_hidden_state
            better, _ = token_statistics(model, micro, fp32_head=True)
        logits = hidden.float() @ model.lm_head.weight.T
    targets = micro.ids_BT[:, 1:, None]
    expected = logits.log_softmax(-1)[:, :-1].gather(2, targets)[..., 0] * micro.mask_BT[:, 1:]
    torch.testing.assert_close(better[:, 1:], expected, atol=1e-5, rtol=1e-5)
    assert (better - expected.new_zeros(better.shape)).dtype == torch.float32
    assert not torch.equal(rough, better) and (exact - better).abs().mean() < (exact - rough).abs().mean()


@pytest.mark.slow
def test_bf16_and_checkpointing_change_the_gradient_little(monkeypatch):
    rollouts = as_rollouts(tokens_of(tiny()))
    _, exact = update(rl_of(), rollouts)
    _, again = update(rl_of(gradient_checkpointing=True), rollouts)
    torch.testing.assert_close(again, exact, atol=1e-6, rtol=1e-4)
    _, rough = update(rl_of(precision="bf16"), rollouts)
    assert rough.dtype == torch.float32 and not torch.equal(rough, exact)
    assert torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.98
    # Responses that share their prompt, with a mask: on a CPU, attention in bf16 is computed by matrix products.
    masked, products = [], packed_attention._products
    monkeypatch.setattr(packed_attention, "_products", lambda *a: (masked.append(a[3].any()), products(*a))[1])
    together = [replace(rollout, prompt_ids=rollouts[0].prompt_ids) for rollout in rollouts]
    _, exact = update(rl_of(micro_batch_tokens=600), together)
    assert not masked
    _, rough = update(rl_of(precision="bf16", micro_batch_tokens=600), together)
    assert masked and torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.98


@pytest.mark.parametrize(("mini_batches", "place"), [(1, 0), (2, 0), (2, -1)])
def test_a_gradient_that_is_not_finite_is_not_applied(mini_batches, place):
    rollouts = as_rollouts(tokens_of(tiny()))
    selection = Selection.of(rollouts, ADVANTAGES)
    selection.streams[place] = Streams(float("nan"))
    model, rl = tiny(), rl_of(mini_batches=mini_batches)
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    with pytest.raises(UserError, match="the gradient of the update is nan"):
        learner.update(selection, rl, lr_scale=1.0, seed=0)
    for before, after in zip(tiny().parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after) if place == 0 else torch.isfinite(after).all()


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_rollout_without_model_tokens_does_not_shrink_the_gradient(aggregation):
    rollouts, rl = as_rollouts(tokens_of(tiny())), rl_of(method={"aggregation": aggregation})
    expected, gradient = update(rl, rollouts)
    empty = replace(rollouts[0], traj_id="empty", response_ids=[], loss_mask=[], log_probs=[])
    learner = Learner(tiny())
    learner.begin_stage(rl, reset=False, reference=None)
    found = learner.update(Selection.of([*rollouts, empty], [*ADVANTAGES, 1.0]), rl, lr_scale=1.0, seed=5).metrics
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_every_stream_reaches_its_term_of_the_loss():
    """Advantages and weights per token, cross-entropy on any token, and KL: the gradient equals that of the formulas."""
    model, rng = tiny(), np.random.default_rng(3)
    rollouts = as_rollouts(tokens_of(model))
    streams = [
        Streams(
            rng.normal(size=len(t.response_ids)),
            rng.choice([0.0, 0.5, 1.0], len(t.response_ids)),
            rng.choice([0.0, 0.2], len(t.response_ids)),
            rng.normal(-5, 1, len(t.response_ids)),
        )
        for t in rollouts
    ]
    weighted = sum(int((own.ce_weight_T != 0).sum()) for own in streams)
    trained = sum(int(trained_mask(t, own).sum()) for t, own in zip(rollouts, streams, strict=True))
    loss = torch.zeros(())
    for t, own in zip(rollouts, streams, strict=True):
        logits = model(torch.tensor([t.prompt_ids + t.response_ids])).logits[0].float()
        log_probs = logits.log_softmax(-1)[len(t.prompt_ids) - 1 : -1].gather(1, torch.tensor(t.response_ids)[:, None])
        row = log_probs[:, 0]
        gap = torch.tensor(own.reference_log_prob_T) - row.detach()
        of_token = (torch.tensor(own.advantage_T) + 0.3 * gap) * row * torch.tensor(own.loss_weight_T)
        loss = loss - of_token[torch.tensor(t.loss_mask)].sum() / trained
        loss = loss - (torch.tensor(own.ce_weight_T) * row).sum() / weighted
    expected = gradient_of(loss, model)
    rl = rl_of(method={"add": [{"type": "opd", "weight": 0.3}]})
    learner = Learner(tiny())
    learner.begin_stage(rl, reset=False, reference=None)
    gradients = []
    learner.optimizer.step = lambda: gradients.append(  # type: ignore[union-attr, method-assign]
        torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    )
    metrics = learner.update(Selection(rollouts, streams), rl, lr_scale=1.0, seed=0).metrics
    torch.testing.assert_close(gradients[0], expected.float(), atol=1e-5, rtol=1e-4)
    assert metrics["tokens"] == trained and {"teacher_kl", "cross_entropy"} <= metrics.keys()


# Training runs with scripted rollouts

STAGE = [{"name": "one", "steps": 3}]
MIXED = [problem(f"easy{i}", 1.0) for i in range(4)] + [problem(f"mixed{i}", 0.5) for i in range(4)]


@pytest.mark.slow
async def test_dynamic_sampling_replaces_groups_also_after_a_kill(tmp_path):
    _, plain = await train(tmp_path / "plain", STAGE, {"one": MIXED})
    assert min(line["groups"] - line["equal_groups"] for line in metrics_without_times(plain)) < 2, "nothing to refill"
    _, uninterrupted = await train(tmp_path / "uninterrupted", STAGE, {"one": MIXED}, schedule={"dynamic_sampling": 10})
    assert [line["groups"] - line["equal_groups"] for line in metrics_without_times(uninterrupted)] == [2, 2, 2]
    assert [line["kept"] for line in metrics_without_times(uninterrupted)] == [8, 8, 8]
    assert max(line["groups"] for line in metrics_without_times(uninterrupted)) > 2
    position = json.loads((uninterrupted / "checkpoints/step=000003/trainer.json").read_text())["position"]
    assert position == sum(line["groups"] for line in metrics_without_times(uninterrupted))
    _, capped = await train(tmp_path / "capped", STAGE, {"one": MIXED[:4]}, schedule={"dynamic_sampling": 2})
    assert [line["groups"] for line in metrics_without_times(capped)] == [6, 6, 6] and all(
        line["kept"] == 0 for line in metrics_without_times(capped)
    )

    for stop in (1, 2):
        await train(tmp_path / "cut", STAGE, {"one": MIXED}, schedule={"dynamic_sampling": 10}, stop_after=stop)
    _, cut = await train(tmp_path / "cut", STAGE, {"one": MIXED}, schedule={"dynamic_sampling": 10})
    assert metrics_without_times(cut) == metrics_without_times(uninterrupted)
    assert weights(cut / "checkpoints/step=000003") == weights(uninterrupted / "checkpoints/step=000003")


@pytest.mark.slow
async def test_solved_problems_stay_retired_after_a_resume(tmp_path):
    stages = [{"name": "one", "steps": 8}]
    trainer, uninterrupted = await train(tmp_path / "uninterrupted", stages, {"one": MIXED}, retire_from=0.9)
    drawn = RunReader(uninterrupted).read("trajectories", columns=["step", "problem_id"]).to_pylist()
    steps: dict[str, set[int]] = {}
    for row in drawn:
        steps.setdefault(row["problem_id"], set()).add(row["step"])
    assert {f"easy{i}" for i in range(4)} <= set(trainer.state.retired)
    assert all(len(steps[f"easy{i}"]) == 1 for i in range(4))
    assert any(len(steps[f"mixed{i}"]) > 1 for i in range(4))
    await train(tmp_path / "cut", stages, {"one": MIXED}, retire_from=0.9, stop_after=3)
    _, cut = await train(tmp_path / "cut", stages, {"one": MIXED}, retire_from=0.9)
    assert metrics_without_times(cut) == metrics_without_times(uninterrupted)


async def test_a_stage_ends_when_all_its_problems_are_retired(tmp_path):
    trainer, run_dir = await train(tmp_path, STAGE, {"one": MIXED[:2]}, retire_from=0.9)
    assert len(metrics_without_times(run_dir)) == 1 and trainer.state.finished
    assert RunReader(run_dir).info["result"]["stages"][0]["ended_by"] == "retired"


@pytest.mark.slow
async def test_the_reference_model_is_that_of_the_stage_start_after_a_kill(tmp_path):
    stages = [{"name": "one", "steps": 2}, {"name": "two", "steps": 2}]
    problems = {"one": MIXED[4:], "two": MIXED[4:]}
    _, uninterrupted = await train(tmp_path / "uninterrupted", stages, problems, method={"kl_coefficient": 0.1})
    kl = [line["reference_kl"] for line in metrics_without_times(uninterrupted)]
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[2] == pytest.approx(0, abs=1e-9)
    assert kl[1] > 1e-7 and kl[3] > 1e-7
    for stop in (1, 2, 3):
        await train(tmp_path / "cut", stages, problems, method={"kl_coefficient": 0.1}, stop_after=stop)
    _, cut = await train(tmp_path / "cut", stages, problems, method={"kl_coefficient": 0.1})
    assert metrics_without_times(cut) == metrics_without_times(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", pytest.param("otb", marks=pytest.mark.soak)])
def test_two_processes_update_like_one(advantage):
    rl = rl_of(old_log_probs="trainer", mini_batches=2, lr=1e-3, max_grad_norm=1.0, method={"type": advantage})
    rollouts = as_rollouts(tokens_of(tiny()))
    seen = []
    for count in (1, 2):
        learner = Learner(tiny())
        with HelperProcesses(count) as helpers:
            learner.lead(helpers.lead("rstar_lab.rl.training.update:run_update_helper"), rl)
            learner.begin_stage(rl, reset=False, reference=None)
            updates = []
            for step in range(2):
                selection = Selection.of(rollouts, ADVANTAGES)
                if advantage == "otb":
                    passes = LocalPasses(learner, rl, None, None)
                    selection = asyncio.run(Otb().forward(selection, rollouts, passes))
                updates.append(learner.update(selection, rl, lr_scale=1.0, seed=step))
            learner.dismiss()
        seen.append((updates, torch.cat([p.detach().flatten() for p in learner.model.parameters()])))
    (alone, weights), (shared, same) = seen
    torch.testing.assert_close(same, weights, atol=1e-4, rtol=1e-3)  # AdamW amplifies small differences of the gradient
    assert (weights - torch.cat([p.detach().flatten() for p in tiny().parameters()])).abs().max() > 1e-4
    for one, other in zip(alone, shared, strict=True):
        assert other.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-5)
        for mine, theirs in zip(one.log_probs, other.log_probs, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(
                    torch.tensor(theirs), torch.tensor(mine), equal_nan=True, atol=1e-4, rtol=1e-4
                )
