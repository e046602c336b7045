"""Off-policy corrections: each against a formula written with Python numbers, and against verl where it has one."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

from rstar_lab.rl.algorithm.config import CORRECTION_BOUNDS, LossConfig
from rstar_lab.rl.algorithm.objective import Terms, correction_weights, training_loss
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.step import MismatchError
from rstar_lab.rl.training.group_stream import CorrectionLimit

ROWS, WIDTH = 6, 9


@pytest.fixture
def batch():
    """Log-probs of trainer and engine, and a mask with holes. The last row has no token of the model."""
    generator = torch.Generator().manual_seed(3)
    engine = -torch.rand(ROWS, WIDTH, generator=generator) * 3
    trainer = engine + torch.randn(ROWS, WIDTH, generator=generator) * 0.8
    trainer[0] = engine[0] + 1e-4  # almost on-policy: geo_mask keeps it
    mask = torch.rand(ROWS, WIDTH, generator=generator) > 0.3
    mask[-1] = False
    return trainer, engine, mask


LEVELS = {"tis": "token", "seq_tis": "sequence", "token_mask": "token", "icepop": "token", "seq_mask": "sequence"}


@pytest.mark.parametrize("correction", CORRECTION_BOUNDS)
def test_weights_equal_verl_or_the_formula(batch, correction):
    trainer, engine, mask = batch
    low, high = CORRECTION_BOUNDS[correction]
    if correction in LEVELS:
        threshold = high if correction in ("tis", "seq_tis") else f"{max(low, 1e-9)}_{high}"
        expected, _ = compute_rollout_correction_weights(
            trainer - engine, mask.float(), rollout_is=LEVELS[correction], rollout_is_threshold=threshold
        )
    else:  # geo_mask keeps the rows whose geometric mean of the ratios lies within the bounds
        means = [math.exp(float((t - e)[m].mean())) for t, e, m in zip(trainer, engine, mask, strict=True)]
        expected = torch.tensor([[float(low <= mean <= high)] for mean in means]) * mask
    weights, stats = correction_weights(trainer, engine, mask, correction=correction, bounds=(low, high))
    torch.testing.assert_close(weights, expected)
    assert stats["importance_weight"] == pytest.approx(float(expected[mask].mean()), rel=1e-5)
    assert 0 < stats["corrected_share"] < 1, "the example has both kinds of tokens"


def test_gradient_of_a_dropped_token_is_zero(batch):
    trainer, engine, mask = batch
    current = trainer.clone().requires_grad_()
    config = LossConfig(correction="icepop", correction_bounds=(0.5, 2.0))
    loss, stats = training_loss(
        current, trainer, Terms(torch.ones_like(trainer), mask), config, engine_log_probs=engine
    )
    loss.backward()
    weights, _ = correction_weights(trainer, engine, mask, correction="icepop", bounds=(0.5, 2.0))
    torch.testing.assert_close(current.grad, -weights / mask.sum())
    assert stats["corrected_share"] > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"correction": {"type": "tis"}, "old_log_probs": "engine"}, "correction requires old_log_probs: trainer"),
        ({"correction": {"bounds": (0.5, 2.0)}}, r"correction.none.bounds\s+Extra inputs"),
        ({"correction": {"type": "icepop", "bounds": (2.0, 0.5)}}, "0 <= low < high"),
        ({"correction": {"type": "seq_tis", "bounds": (0.5, 2.0)}}, "has no lower bound"),
    ],
)
def test_keys_that_contradict_each_other_are_errors(keys, message):
    with pytest.raises(ValidationError, match=message):
        RlSection(**keys)


def test_only_updates_in_a_row_with_too_many_corrected_tokens_stop_a_run():
    rl, limit = RlSection(problems_per_step=2, correction={"type": "tis", "max_share": 0.5}), CorrectionLimit()
    for share in [0.6] * 4 + [0.5] + [0.6, None] * 4:  # 0.5 is allowed; a step without an update does not count
        limit.check(share, rl)
    with pytest.raises(MismatchError, match="tis changed more than 50% of the tokens in 5 updates in a row, last 60%"):
        limit.check(0.6, rl)


def test_the_correction_weights_neither_the_kl_nor_the_cross_entropy(batch):
    """The reference KL is a property of the current policy, whoever sampled the tokens."""
    trainer, engine, mask = batch
    reference = trainer - 0.3
    terms = Terms(torch.zeros_like(trainer), mask, reference_log_probs=reference, ce_weights=mask.float())
    config = dataclasses.replace(LossConfig(), kl_coefficient=0.7)
    corrected = dataclasses.replace(config, correction="tis", correction_bounds=(0.0, 2.0))
    gradients = []
    for loss_config in (config, corrected):
        current = (trainer + 0.2).requires_grad_()
        loss, stats = training_loss(current, trainer, terms, loss_config, engine_log_probs=engine)
        loss.backward()
        gradients.append((current.grad, stats[config.kl_metric], stats[config.ce_metric]))
    assert (
        correction_weights(trainer, engine, mask, correction="tis", bounds=(0.0, 2.0))[0] - mask.float()
    ).abs().max() > 0.1
    torch.testing.assert_close(gradients[0], gradients[1])
