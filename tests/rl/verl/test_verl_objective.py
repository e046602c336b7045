"""Tests of the objective registered in verl against verl's own functions, on padded batches of uneven lengths."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rstar_lab.rl.algorithm import objective
from rstar_lab.rl.algorithm.correction import correction_weights
from rstar_lab.rl.recipe import RlSection

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
ours = pytest.importorskip("rstar_lab.rl.verl.objective")

pytestmark = pytest.mark.slow  # verl takes seconds to import
AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "group-token-mean",
]


def batch(rows=6, padding=2, width=9, seed=0):
    """Return rows of different lengths in groups of two and four. The last `padding` rows are masked."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (rows,), generator=random).tolist() + [0] * padding
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    log_probs = -torch.rand(rows + padding, width, generator=random)
    old = log_probs + 0.3 * torch.randn(log_probs.shape, generator=random)
    advantages = torch.randn(rows + padding, 1, generator=random).expand_as(log_probs) * mask
    groups = ["a", "a", *["b"] * (rows - 2)]
    return log_probs.requires_grad_(), old, advantages, mask, lengths[:rows], groups


def config(mask, *, global_batch_size, horizon=None):
    return SimpleNamespace(
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": int(mask.sum()),
            "global_batch_size": global_batch_size,
            "loss_scale_factor": horizon,
        },
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo", "kl_cov"])
def test_padding_rows_do_not_change_loss_and_gradient(aggregation, variant):
    log_probs, old, advantages, mask, tokens, groups = batch()
    weights = torch.tensor([*ours.row_weights(groups, tokens, aggregation, 8), 1.0, 1.0])
    spread = weights[:, None].expand_as(old)
    name = aggregation.replace("group-", "")
    loss, _ = core_algos.get_policy_loss_fn(ours.loss_name(variant))(
        old, log_probs, advantages, mask, name, config(mask, global_batch_size=8, horizon=9), spread
    )
    loss.backward()
    alone = log_probs.detach()[:6].requires_grad_()
    normaliser = objective.group_normaliser(tokens, groups) if aggregation == "group-token-mean" else None
    expected, _ = objective.policy_loss(
        alone,
        old[:6],
        advantages[:6],
        mask[:6],
        aggregation=aggregation,
        variant=variant,
        normaliser=normaliser,
        horizon=9,
    )
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(log_probs.grad[:6], alone.grad)
    assert log_probs.grad[6:].abs().max() == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:4])
def test_the_loss_equals_verls_for_aggregations_of_verl(aggregation):
    log_probs, old, advantages, mask, _, _ = batch(padding=0)
    full = config(mask, global_batch_size=6, horizon=9)
    loss, _ = core_algos.get_policy_loss_fn("rstar-grpo")(old, log_probs, advantages, mask, aggregation, full)
    ratio = (log_probs - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    verls = core_algos.agg_loss(losses, mask, aggregation, **full.global_batch_info)
    torch.testing.assert_close(loss, verls)


def test_without_row_weights_the_loss_would_count_padding():
    """The reason for row_weights: two of eight rows are padding, and verl divides by eight."""
    log_probs, old, advantages, mask, tokens, groups = batch()
    loss, _ = core_algos.get_policy_loss_fn("rstar-grpo")(
        old, log_probs, advantages, mask, "seq-mean-token-sum", config(mask, global_batch_size=8)
    )
    right, _ = objective.policy_loss(log_probs[:6], old[:6], advantages[:6], mask[:6], aggregation="seq-mean-token-sum")
    torch.testing.assert_close(loss * 8 / 6, right)
    assert ours.row_weights(groups, tokens, "seq-mean-token-sum", 8) == [8 / 6] * 6
    assert ours.row_weights(groups, tokens, "seq-mean-token-sum", 6) == [1.0] * 6
    assert ours.row_weights(groups, tokens, "token-mean", 8) == [1.0] * 6


def test_advantages_equal_the_local_trainers():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b", "b", "b"]
    mask = torch.ones(6, 4)
    scores = torch.zeros(6, 4)
    scores[:, -1] = torch.tensor(rewards)
    found, _ = core_algos.get_adv_estimator_fn("rstar")(
        token_level_rewards=scores, response_mask=mask, index=groups, config={}
    )
    expected = objective.group_advantages(rewards, groups)
    assert np.array_equal(found[:, 0].numpy(), expected.astype(np.float32))
    verls, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, np.array(groups, dtype=object))
    torch.testing.assert_close(found, verls)


def test_a_part_that_is_not_registered_is_an_error(monkeypatch):
    hooks = pytest.importorskip("rstar_lab.rl.verl.hooks")
    hooks.assert_registered()
    monkeypatch.delitem(core_algos.POLICY_LOSS_REGISTRY, "rstar-gspo")
    with pytest.raises(RuntimeError, match="policy loss"):
        hooks.assert_registered()


@pytest.mark.parametrize("correction", ["tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"])
def test_the_correction_of_uneven_rows_equals_that_of_the_padded_batch(correction, monkeypatch):
    """Rows are padded a few at a time. Rows without tokens (verl's padding) get weight 0 and count in no share."""
    monkeypatch.setattr(ours, "ROWS_AT_ONCE", 3)
    trainer, engine, _, mask, tokens, _ = batch()
    trainer, mask = trainer.detach(), mask.float()
    lengths = [*tokens, 4, 1]  # padding rows have tokens, but no mask
    bounds = (0.9 if correction in ("geo_mask", "icepop") else 0.0, 1.1)
    keys = RlSection(problems_per_step=2, correction=correction, correction_bounds=bounds)
    rows = [[row[:length] for row, length in zip(part, lengths, strict=True)] for part in (trainer, engine, mask)]
    weights, stats = ours.correct_rows(*rows, keys)
    expected, shares = correction_weights(
        trainer, engine, mask, correction=correction, bounds=keys.resolved_correction[1]
    )
    assert [len(row) for row in weights] == lengths
    for row, whole in zip(weights, expected, strict=True):
        torch.testing.assert_close(row, whole[: len(row)])
    assert stats == pytest.approx(shares) and 0 < stats["corrected_share"] < 1
    assert all(row.abs().sum() == 0 for row in weights[6:])


def test_the_correction_of_a_batch_without_trained_tokens_is_zero():
    keys = RlSection(problems_per_step=2, correction="tis")
    row = torch.zeros(3)
    weights, stats = ours.correct_rows([row], [row], [row], keys)
    assert weights[0].tolist() == [0, 0, 0] and stats == {"importance_weight": 0.0, "corrected_share": 0.0}
