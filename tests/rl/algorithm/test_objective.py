"""Tests that the objective equals verl's functions, or independent formulas for what verl does not support."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from rstar_lab.rl.algorithm import objective
from rstar_lab.rl.algorithm.advantages import optimal_token_advantages
from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.objective import (
    Terms,
    aggregate,
    group_advantages,
    group_normaliser,
    kl_loss,
    policy_loss,
    training_loss,
)  # fmt: skip
from rstar_lab.rl.methods.overlong_buffer import overlong_penalty

algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="the comparison with verl needs the extra `verl`")

VERL_AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
VERL_VARIANTS = {"grpo": "vanilla", "gspo": "gspo", "cispo": "cispo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"}


def batch(seed: int, sequences: int = 5, tokens: int = 7, spread: float = 0.4):
    """log_probs (with gradient), old_log_probs, advantages, mask, rollout_weights; interleaved masks, one sequence
    empty."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(sequences, tokens, generator=g)
    new = (old + spread * torch.randn(sequences, tokens, generator=g)).requires_grad_()
    advantages = torch.randn(sequences, 1, generator=g).expand(sequences, tokens).clone()
    mask = torch.rand(sequences, tokens, generator=g) < 0.7
    mask[0, 0], mask[-1] = True, False
    weights = torch.rand(sequences, tokens, generator=g) * 2
    return new, old, advantages, mask, weights


def verl_config(clip_low, clip_high, cov_share=0.2, cov_bounds=(0.05, 1.0), cov_kl=0.7):
    loss = PolicyLossConfig(
        clip_cov_ratio=cov_share,
        clip_cov_lb=cov_bounds[0],
        clip_cov_ub=cov_bounds[1],
        kl_cov_ratio=cov_share,
        ppo_kl_coef=cov_kl,
    )
    return FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2,
        clip_ratio_low=clip_low, clip_ratio_high=clip_high, clip_ratio_c=1e9, policy_loss=loss,
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
    clips=st.sampled_from([(0.2, 0.28), (0.1, 0.1), (0.0, 1.0)]),
    weighted=st.booleans(),
    share=st.sampled_from([0.2, 0.01]),  # 0.01 of all tokens is less than one token
)
@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
@pytest.mark.parametrize("variant", VERL_VARIANTS)
def test_policy_loss_equals_verl(variant, aggregation, seed, spread, clips, weighted, share):
    new, old, advantages, mask, weights = batch(seed, spread=spread)
    theirs = new.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    loss, stats = policy_loss(
        new, old, advantages, mask, clip_low=clips[0], clip_high=clips[1], aggregation=aggregation, variant=variant,
        rollout_weights=weights if weighted else None, cov_share=share, cov_bounds=(0.05, 1.0), cov_kl=0.7,
    )  # fmt: skip
    torch.manual_seed(seed)
    expected, metrics = algos.get_policy_loss_fn(VERL_VARIANTS[variant])(
        old, theirs, advantages, mask.float(), aggregation, verl_config(*clips, share), weights if weighted else None
    )
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    if variant != "kl_cov":
        assert stats["kl"] == pytest.approx(metrics["actor/ppo_kl"], rel=1e-4, abs=1e-5)
        assert stats["clip_share"] == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    assert stats["tokens"] == mask.sum()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5, -1.0]), st.sampled_from("abcd")), min_size=1, max_size=20),
    st.booleans(),
)
def test_group_advantages_equal_verl(rows, normalise_std):
    rewards, groups = [reward for reward, _ in rows], np.array([group for _, group in rows])
    tokens = torch.zeros(len(rows), 3)
    tokens[:, 1] = torch.tensor(rewards)
    expected, _ = algos.compute_grpo_outcome_advantage(
        tokens, torch.ones(len(rows), 3), groups, norm_adv_by_std_in_grpo=normalise_std
    )
    found = group_advantages(rewards, groups, normalise_std=normalise_std)
    assert found.shape == (len(rows),)
    np.testing.assert_allclose(found, expected[:, 0].numpy(), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 7)), min_size=1, max_size=9), st.integers(0, 99))
def test_otb_equals_verl_with_centred_rewards(rows, seed):
    """The masks have gaps, as those of rollouts with tool responses."""
    rng = np.random.default_rng(seed)
    groups, lengths = np.array([group for group, _ in rows]), [length for _, length in rows]
    mask = np.zeros((len(rows), 10))
    for row, length in zip(mask, lengths, strict=True):
        row[np.sort(rng.choice(10, length, replace=False))] = 1.0
    probs, squares = rng.uniform(0.01, 0.99, (2, *mask.shape))
    centred = group_advantages(rng.integers(0, 2, len(rows)), groups, normalise_std=False)
    rewards = np.zeros_like(mask)
    for row, own, reward in zip(rewards, mask, centred, strict=True):
        if own.any():
            row[own.nonzero()[0][-1]] = reward
    expected, _ = algos.compute_multi_turn_optimal_token_baseline_advantage(
        torch.tensor(rewards), torch.tensor(mask), groups, torch.tensor(probs).log(), torch.tensor(squares)
    )
    energies = [(1 - 2 * p + s)[own > 0] for p, s, own in zip(probs, squares, mask, strict=True)]
    found = optimal_token_advantages(centred, groups, energies)
    for row, own, values in zip(expected.numpy(), mask, found, strict=True):
        np.testing.assert_allclose(values, row[own > 0], atol=1e-6)


@pytest.mark.parametrize("aggregation", [*VERL_AGGREGATIONS, "group-token-mean"])
@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo"])
def test_losses_of_micro_batches_add_up(variant, aggregation):
    new, old, advantages, mask, weights = batch(3, sequences=8)
    groups = [0, 0, 1, 1, 1, 2, 2, 2]
    batch_normaliser = {
        "token-mean": float(mask.sum()),
        "group-token-mean": group_normaliser(mask.sum(-1).tolist(), groups),
    }.get(aggregation, float((mask.sum(-1) > 0).sum()))
    options = {"aggregation": aggregation, "variant": variant, "horizon": 7}

    def loss(rows, normaliser):
        part = normaliser[rows] if isinstance(normaliser, torch.Tensor) else normaliser
        pieces = [tensor[rows] for tensor in (new, old, advantages, mask)]
        return policy_loss(*pieces, rollout_weights=weights[rows], normaliser=part, **options)[0]

    parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
    (batch_gradient,) = torch.autograd.grad(loss(slice(0, 8), batch_normaliser), new)
    (summed,) = torch.autograd.grad(sum(loss(rows, batch_normaliser) for rows in parts), new)
    torch.testing.assert_close(summed, batch_gradient)
    if aggregation != "group-token-mean":
        (plain,) = torch.autograd.grad(loss(slice(0, 8), None), new)
        torch.testing.assert_close(plain, batch_gradient)


def test_group_token_mean_equals_the_papers_formula():
    """1 / groups x sum over groups of 1 / (tokens of the group) x sum over its tokens; a group without tokens does
    not count."""
    values, mask = torch.arange(12.0).reshape(4, 3), torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]])
    groups = ["a", "a", "b", "c"]
    found = aggregate(
        values, mask, aggregation="group-token-mean", normaliser=group_normaliser(mask.sum(-1).tolist(), groups)
    )
    assert found == pytest.approx(((0 + 1 + 2 + 3) / 4 + (7 + 8) / 2) / 2)
    with pytest.raises(ValueError, match="group_normaliser"):
        aggregate(values, mask, aggregation="group-token-mean")


@pytest.mark.parametrize("variant", list(VERL_VARIANTS))
def test_tokens_outside_the_mask_have_no_effect(variant):
    new, old, advantages, mask, weights = batch(5)
    junk = [
        torch.where(mask, tensor, bad)
        for tensor, bad in [(new.detach(), -math.inf), (old, math.nan), (advantages, math.nan)]
    ]
    weights_junk = torch.where(mask, weights, math.inf)
    junk[0].requires_grad_()
    options = {"variant": variant, "generator": torch.Generator().manual_seed(0)}
    clean_loss, clean_stats = policy_loss(new, old, advantages, mask, rollout_weights=weights, **options)
    options["generator"] = torch.Generator().manual_seed(0)
    loss, stats = policy_loss(*junk, mask, rollout_weights=weights_junk, **options)
    clean_loss.backward()
    loss.backward()
    torch.testing.assert_close(loss, clean_loss)
    torch.testing.assert_close(junk[0].grad, new.grad)
    assert stats == pytest.approx(clean_stats)


@pytest.mark.parametrize("variant", list(VERL_VARIANTS))
@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
def test_an_empty_batch_has_loss_0(variant, aggregation):
    new, old, advantages, mask, _ = batch(6)
    loss, stats = policy_loss(new, old, advantages, torch.zeros_like(mask), variant=variant, aggregation=aggregation)
    loss.backward()
    assert loss.item() == 0.0 and not new.grad.any() and stats["tokens"] == 0


@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
def test_kl_equals_verl(aggregation):
    new, reference, _, mask, _ = batch(10)
    theirs = new.detach().clone().requires_grad_()
    loss = kl_loss(new, reference, mask, aggregation=aggregation)
    expected = algos.agg_loss(algos.kl_penalty(theirs, reference, "k3"), mask.float(), aggregation)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(new.grad, theirs.grad)


def test_both_estimators_of_the_kl_pull_to_the_reference():
    """Close to the reference policy, both estimators have the same gradient at the start of an update."""
    new, _, _, mask, weights = batch(11)
    new = new.detach().double().requires_grad_()
    terms = Terms(torch.zeros_like(new), mask, reference_log_probs=new.detach() + 1e-5 * (weights - 1))
    gradients = []
    for estimator in ("k3", "policy_gradient"):
        config = LossConfig(kl_coefficient=0.3, kl_estimator=estimator)
        loss, _ = training_loss(new, new.detach(), terms, config)
        gradients += torch.autograd.grad(loss, new)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=0)
    assert gradients[0].any()


def test_unknown_names_and_wrong_shapes_are_errors():
    new, old, advantages, mask, _ = batch(0)
    with pytest.raises(ValueError, match="variant must be one of grpo"):
        policy_loss(new, old, advantages, mask, variant="ppo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aggregation must be one of token-mean"):
        policy_loss(new, old, advantages, mask, aggregation="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="advantages must have the shape"):
        policy_loss(new, old, advantages[:, 0], mask)
    assert objective.MAX_LOG_RATIO == 20.0


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_overlong_penalty_equals_dapos(tokens, penalty):
    """DAPO's own setting: 16,384 tokens expected, a buffer of 4,096 before the limit."""
    assert overlong_penalty(tokens, 20480, 4096) == pytest.approx(penalty)
    with pytest.raises(ValueError, match="buffer_tokens"):
        overlong_penalty(1, 10, 11)
