"""Tests of the objective registered in verl against verl's own functions, on padded batches of uneven lengths."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from rstar_lab.rl.algorithm import objective
from rstar_lab.rl.algorithm.objective import correction_weights
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.verl import hooks
from rstar_lab.rl.verl import objective as ours

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


def streams_of(groups, padding):
    """Return streams of each row, of all kinds, and None for the padding."""
    rng = np.random.default_rng(1)
    rows = [Streams(float(rng.normal())) for _ in groups]
    rows[1] = replace(rows[1], loss_weight_T=0.0)
    rows[2] = replace(rows[2], loss_weight_T=0.5)
    return [*rows, *[None] * padding]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo", "kl_cov"])
@pytest.mark.parametrize("parts", [[8], [3, 5]])
def test_the_loss_equals_the_local_trainers_for_any_padding_and_split(aggregation, variant, parts):
    """Two of eight rows are padding. The parts of a mini-batch, on one or several ranks, add up to its loss."""
    if variant == "kl_cov" and len(parts) > 1:
        pytest.skip("its covariance is over the micro-batch")
    log_probs, old, _, mask, tokens, groups = batch()
    method = {"loss": variant, "aggregation": aggregation, "kl_coefficient": 0.3}
    rl = RlSection(method=method, limits={"max_response_tokens": 9})
    reference = old + 0.2
    loss_of = pickle.loads(pickle.dumps(ours.StreamLoss(rl)))
    streams = streams_of(groups, 2)
    made = ours.stream_tensors(streams, [row.float() for row in mask], [*groups, "c", "d"], rl)
    tensors = {name: torch.stack(rows) for name, rows in made.items()}
    tensors |= {"response_mask": mask, "old_log_probs": old, "ref_log_prob": reference}
    found, start = torch.zeros(()), 0
    for size in parts:
        rows = slice(start, start + size)
        loss, stats = loss_of.loss(log_probs[rows], {name: tensor[rows] for name, tensor in tensors.items()})
        found, start = found + loss, start + size
    found.backward()
    alone = log_probs.detach()[:6].requires_grad_()
    weights = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])[:, None].expand_as(alone)
    trained = [0 if i == 1 else count for i, count in enumerate(tokens)]
    by_group = objective.group_normaliser(trained, groups) if aggregation == "group-token-mean" else None
    advantages = torch.tensor([own.advantage_T for own in streams[:6]])[:, None].expand_as(alone)
    terms = objective.Terms(
        advantages, mask[:6] & (weights != 0), weights, reference_log_probs=reference[:6], normaliser=by_group
    )
    expected, _ = objective.training_loss(alone, old[:6], terms, rl.loss_config)
    expected.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(log_probs.grad[:6], alone.grad)
    assert log_probs.grad[6:].abs().max() == 0 and log_probs.grad[1].abs().max() == 0
    assert "reference_kl" in stats


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:4])
def test_the_loss_equals_verls_for_aggregations_of_verl(aggregation):
    log_probs, old, _, mask, _, groups = batch(padding=0)
    rl = RlSection(method={"aggregation": aggregation}, limits={"max_response_tokens": 9})
    streams = [Streams(float(i) - 2.5) for i in range(6)]
    made = ours.stream_tensors(streams, [row.float() for row in mask], groups, rl)
    tensors = {name: torch.stack(rows) for name, rows in made.items()} | {"response_mask": mask, "old_log_probs": old}
    loss, _ = ours.StreamLoss(rl).loss(log_probs, tensors)
    ratio, advantages = (log_probs - old).exp(), tensors["advantages"]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    batch_info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 6, "loss_scale_factor": 9}
    torch.testing.assert_close(loss, core_algos.agg_loss(losses, mask, aggregation, **batch_info))


def test_streams_per_token_and_the_cross_entropy_reach_the_loss():
    log_probs, old, _, mask, _, groups = batch()
    rl, rng = RlSection(), np.random.default_rng(2)
    shape = tuple(log_probs.shape[1:])
    advantages, weights = rng.normal(size=(6, *shape)), rng.choice([0.0, 0.5], (6, *shape))
    streams = [Streams(a, ce_weight_T=w) for a, w in zip(advantages, weights, strict=True)]
    made = ours.stream_tensors([*streams, None, None], [row.float() for row in mask], [*groups, "c", "d"], rl)
    tensors = {name: torch.stack(rows) for name, rows in made.items()} | {"response_mask": mask, "old_log_probs": old}
    loss, stats = ours.StreamLoss(rl).loss(log_probs, tensors)
    ratio, of_token = (log_probs - old).exp()[:6], torch.tensor(advantages, dtype=torch.float32)
    policy = torch.maximum(-of_token * ratio, -of_token * ratio.clamp(0.8, 1.28))[mask[:6]].sum() / mask.sum()
    # The cross-entropy is over all tokens with a weight, also those that the model did not generate.
    entropy = -(torch.tensor(weights, dtype=torch.float32) * log_probs[:6]).sum() / int((weights != 0).sum())
    torch.testing.assert_close(loss, policy + entropy)
    assert stats["cross_entropy"] == pytest.approx(entropy.item(), rel=1e-5)


def test_a_teacher_changes_the_advantages_as_in_the_local_trainer():
    log_probs, old, _, mask, _, groups = batch()
    rl = RlSection(method={"add": [{"type": "opd", "weight": 0.3}]})
    rng = np.random.default_rng(3)
    teacher = rng.normal(-1, 0.5, size=tuple(log_probs.shape))
    teacher[0, 1] = np.nan
    streams = [Streams(float(i) - 2.5, reference_log_prob_T=row) for i, row in enumerate(teacher[:6])]
    masks = [row.float() for row in mask]
    made = ours.stream_tensors([*streams, None, None], masks, [*groups, "c", "d"], rl)
    rows, metrics = ours.teacher_advantages(made["advantages"], [*streams, None, None], [*old], masks, rl.loss_config)
    made["advantages"] = rows
    tensors = {name: torch.stack(rows) for name, rows in made.items()} | {"response_mask": mask, "old_log_probs": old}
    loss, _ = ours.StreamLoss(rl).loss(log_probs, tensors)
    terms = objective.Terms(
        torch.arange(6.0)[:, None].expand(6, log_probs.shape[1]) - 2.5,
        mask[:6],
        reference_log_probs=torch.tensor(teacher[:6], dtype=torch.float32),
    )
    expected, stats = objective.training_loss(log_probs[:6], old[:6], terms, rl.loss_config)
    torch.testing.assert_close(loss, expected)
    assert metrics["teacher_kl"] == pytest.approx(stats["teacher_kl"], rel=1e-5)


def test_a_rollout_without_model_tokens_is_left_out():
    rl, mask = RlSection(method={"aggregation": "seq-mean-token-mean"}), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    streams = [Streams(1.0), Streams(np.zeros(0))]  # its engine failed: verl gives it one masked token
    made = ours.stream_tensors(streams, [mask[0], mask[1][:1]], ["a", "a"], rl)
    assert made[ours.POLICY_WEIGHTS][0].tolist() == [0.5, 0.5] and made[ours.POLICY_WEIGHTS][1].tolist() == [0.0]


def test_a_part_that_is_not_registered_is_an_error(monkeypatch):
    hooks.assert_registered()
    monkeypatch.delitem(core_algos.ADV_ESTIMATOR_REGISTRY, "rstar")
    with pytest.raises(RuntimeError, match="advantage"):
        hooks.assert_registered()


@pytest.mark.parametrize("correction", ["tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"])
def test_the_correction_of_uneven_rows_equals_that_of_the_padded_batch(correction, monkeypatch):
    """Rows are padded a few at a time. Rows without tokens (verl's padding) get weight 0 and count in no share."""
    monkeypatch.setattr(ours, "ROWS_AT_ONCE", 3)
    trainer, engine, _, mask, tokens, _ = batch()
    trainer, mask = trainer.detach(), mask.float()
    lengths = [*tokens, 4, 1]  # padding rows have tokens, but no mask
    bounds = (0.9 if correction in ("geo_mask", "icepop") else 0.0, 1.1)
    keys = RlSection(problems_per_step=2, correction={"type": correction, "bounds": bounds})
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
