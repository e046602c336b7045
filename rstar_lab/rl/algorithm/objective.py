"""The objective: group advantages, the clipped policy loss and its published variants, all on tensors of (batch,
tokens).

Source: rStar2-Agent (arXiv 2508.20722), equation 1 and section 3.2, on GRPO (2402.03300) with DAPO's asymmetric clip
(2503.14476): no KL term, no entropy term, clip 0.2 below and 0.28 above. Values and gradients equal verl 0.9.1's
functions of the same meaning (the tests compare them), except that there is no dual clip.

Off by default, each by its published formula: gspo (2507.18071), cispo (2506.13585), clip_cov and kl_cov (2505.22617),
Dr.GRPO (2503.20783: `normalise_std=False` with `seq-mean-token-sum-norm`), truncated importance sampling between
engine and trainer (fengyao.notion.site/off-policy-rl: `truncated_weights`), KL to a reference (`kl_loss`).
"""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

Variant = Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"]
Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
MAX_LOG_RATIO = 20.0  # e^20: past it only the gradient's sign means anything
MAX_LOG_SEQUENCE_RATIO = 10.0  # gspo's, on the mean over a sequence


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence | np.ndarray,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation of its group + eps), as float64 of the shape of `rewards`,
    (batch,).

    groups: what tells the groups apart, one entry a reward (a list, array or tensor). The deviation is the sample's
    (n - 1). A group of one has mean 0 and deviation 1: its reward is its advantage. normalise_std=False: Dr.GRPO's,
    without the division.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    if reward.ndim != 1 or len(groups) != len(reward):
        raise ValueError(f"rewards and groups must be two lists of one length, not {reward.shape} and {len(groups)}")
    advantages = np.empty_like(reward)
    members: dict[object, list[int]] = {}
    for index, group in enumerate(_hashable(groups)):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        of_group = reward[indices]
        mean, std = (of_group.mean(), of_group.std(ddof=1)) if len(indices) > 1 else (0.0, 1.0)
        advantages[indices] = (of_group - mean) / (std + eps if normalise_std else 1.0)
    return advantages


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregation: Aggregation = "token-mean",
    variant: Variant = "grpo",
    rollout_weights: Tensor | None = None,
    normaliser: float | Tensor | None = None,
    horizon: int | None = None,
    cov_share: float = 2e-4,
    cov_bounds: tuple[float, float] = (1.0, 5.0),
    cov_kl: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise, a scalar, and what to log about it.

    log_probs: of the policy that is trained, with gradient; old_log_probs: of the one that rolled out; advantages;
    mask: True (or 1) on the model's own tokens; rollout_weights: see `truncated_weights`; all (batch, tokens). What
    stands where the mask is 0 has no influence, be it NaN. aggregation, normaliser, horizon: see `aggregate`.

    grpo: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r the token's ratio exp(log_probs - old_log_probs).
    gspo: the same with the sequence's ratio, exp of the mean log-ratio over its tokens; gradient through each token.
    cispo: -A log_probs times the clipped ratio, which is a constant to the gradient: no token drops out.
    clip_cov: grpo without a random `cov_share` of the tokens whose covariance of log-prob and advantage lies within
    `cov_bounds`. kl_cov: -A r, plus `cov_kl` |log-ratio| on the `cov_share` of tokens of the highest covariance; no
    clip. generator: draws clip_cov's tokens; None uses torch's own. Both covariances are taken over the tokens handed
    in.

    Stats, over the masked tokens: tokens, clip_share, ratio_mean, ratio_max, kl (mean of old - new log-prob), kl_k3
    (never negative); clip_share is the share of tokens whose gradient the clip cut (cispo: whose weight it cut).
    Raises ValueError on shapes that differ or unknown names.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}, not {variant!r}")
    for name, tensor in [("old_log_probs", old_log_probs), ("advantages", advantages), ("mask", mask)]:
        if tensor.shape != log_probs.shape:
            raise ValueError(
                f"{name} must have the shape of log_probs, {tuple(log_probs.shape)}, not {tuple(tensor.shape)}"
            )
    own = mask.bool()
    log_probs = log_probs.masked_fill(~own, 0.0)
    log_ratio = log_probs - old_log_probs.masked_fill(~own, 0.0)
    advantages = advantages.masked_fill(~own, 0.0)

    if variant == "gspo":
        mean_log_ratio = (log_ratio.sum(-1, keepdim=True) / own.sum(-1, keepdim=True).clamp(min=1)).detach()
        log_ratio_used = (log_probs - log_probs.detach() + mean_log_ratio).clamp(max=MAX_LOG_SEQUENCE_RATIO)
    else:
        log_ratio_used = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio_used.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    plain, clipped = -advantages * ratio, -advantages * clipped_ratio
    cut = clipped > plain

    if variant == "cispo":
        losses = -clipped_ratio.detach() * advantages * log_probs
        cut = ratio != clipped_ratio
    elif variant == "clip_cov":
        covariance = _covariance(log_probs, advantages, own)
        low, high = cov_bounds
        candidates = ((covariance > low) & (covariance < high) & own & ~cut).nonzero()
        limit = max(int(cov_share * own.sum()), 1)
        dropped = candidates[torch.randperm(len(candidates), generator=generator)[:limit].to(candidates.device)]
        losses = torch.maximum(plain, clipped)
        cut = torch.zeros_like(own)
        cut[dropped[:, 0], dropped[:, 1]] = True
        losses = losses.masked_fill(cut, 0.0)
    elif variant == "kl_cov":
        covariance = _covariance(log_probs, advantages, own)
        share = max(int(cov_share * own.sum()), 1) if own.any() else 0
        highest = covariance.masked_fill(~own, -torch.inf).flatten().topk(share).indices
        cut = torch.zeros_like(own)
        cut.view(-1)[highest] = True
        losses = plain + torch.where(cut, cov_kl * log_ratio.abs(), 0.0)
    else:
        losses = torch.maximum(plain, clipped)

    if rollout_weights is not None:
        losses = losses * rollout_weights.masked_fill(~own, 0.0)
    loss = aggregate(losses, own, aggregation=aggregation, normaliser=normaliser, horizon=horizon)
    return loss, _stats(log_ratio.detach(), ratio.detach(), cut, own)


def aggregate(
    values: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    normaliser: float | Tensor | None = None,
    horizon: int | None = None,
) -> Tensor:
    """One number of values (batch, tokens). With the whole batch's normaliser, micro-batches add up to it exactly.

    | aggregation | value | normaliser (None: of what is handed in) |
    |---|---|---|
    | token-mean | sum over tokens / tokens | the batch's masked tokens |
    | group-token-mean | mean over groups of token-mean: the paper's 1 / (tokens of the group) | `group_normaliser`,
    (batch,); needed | | seq-mean-token-sum | mean over sequences of sums | the batch's sequences that have a token |
    | seq-mean-token-mean | mean over sequences of means | the same |
    | seq-mean-token-sum-norm | the first over `horizon`, a constant length (None: the width handed in) | the same |
    """
    mask = mask.bool()
    values = values.masked_fill(~mask, 0.0)
    if aggregation == "token-mean":
        return values.sum() / _at_least_one(mask.sum() if normaliser is None else normaliser)
    if aggregation == "group-token-mean":
        if not isinstance(normaliser, Tensor) or normaliser.shape != mask.shape[:1]:
            raise ValueError(
                "group-token-mean needs normaliser=group_normaliser(tokens, groups), taken over the whole batch"
            )
        return (values.sum(-1) / normaliser.to(values.device)).sum()
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, not {aggregation!r}")
    tokens = mask.sum(-1)
    sequences = values.sum(-1)
    if aggregation == "seq-mean-token-mean":
        sequences = sequences / tokens.clamp(min=1)
    loss = sequences.sum() / _at_least_one((tokens > 0).sum() if normaliser is None else normaliser)
    return loss / (horizon or mask.shape[-1]) if aggregation == "seq-mean-token-sum-norm" else loss


def group_normaliser(tokens: Sequence[int], groups: Sequence[Hashable]) -> Tensor:
    """For group-token-mean: (tokens of the sequence's group) x (groups that have a token), (batch,).

    tokens: masked tokens of each sequence of the whole batch; a micro-batch takes its rows of the result.
    """
    groups = _hashable(groups)
    totals: dict[Hashable, int] = {}
    for group, count in zip(groups, tokens, strict=True):
        totals[group] = totals.get(group, 0) + count
    counted = max(1, sum(total > 0 for total in totals.values()))
    return torch.tensor([float(max(1, totals[group]) * counted) for group in groups])


def truncated_weights(
    trainer_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """min(trainer / engine probability, cap) of each token, or of its whole sequence: the `rollout_weights` of
    `policy_loss`.

    Both log-probs are of the weights that rolled out, (batch, tokens); the result has no gradient and is 0 off the
    mask.
    """
    own = mask.bool()
    log_ratio = (trainer_log_probs - engine_log_probs).detach().masked_fill(~own, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(f"level must be token or sequence, not {level!r}")
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap) * own


def kl_loss(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    aggregation: Aggregation = "token-mean",
    normaliser: float | Tensor | None = None,
    horizon: int | None = None,
) -> Tensor:
    """KL(policy || reference) of the sampled tokens, aggregated as the policy loss is; add it to that times a
    coefficient.

    Source of the estimators: joschu.net/blog/kl-approx.html; k3 is the one GRPO uses.
    """
    own = mask.bool()
    log_ratio = (reference_log_probs - log_probs).masked_fill(~own, 0.0)
    match estimator:
        case "k1":
            values = -log_ratio
        case "k2":
            values = 0.5 * log_ratio.square()
        case "k3":
            log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            values = (log_ratio.exp() - log_ratio - 1).clamp(-10.0, 10.0)
        case _:
            raise ValueError(f"estimator must be k1, k2 or k3, not {estimator!r}")
    return aggregate(values, own, aggregation=aggregation, normaliser=normaliser, horizon=horizon)


def _hashable(groups: Sequence | np.ndarray | Tensor) -> Sequence:
    # The elements of a tensor are tensors, each unlike every other.
    return groups.tolist() if isinstance(groups, np.ndarray | Tensor) else groups


def _at_least_one(count: float | Tensor) -> float | Tensor:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def _covariance(log_probs: Tensor, advantages: Tensor, own: Tensor) -> Tensor:
    """Each token's part in the covariance of log-prob and advantage; 0 off the mask."""
    count = own.sum().clamp(min=1)
    centred = log_probs.detach() - log_probs.detach().sum() / count
    return ((advantages - advantages.sum() / count) * centred).masked_fill(~own, 0.0)


def _stats(log_ratio: Tensor, ratio: Tensor, cut: Tensor, own: Tensor) -> dict[str, float]:
    count = own.sum()
    safe = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {
        "clip_share": (cut & own).sum() / count.clamp(min=1),
        "ratio_mean": (ratio * own).sum() / count.clamp(min=1),
        "ratio_max": ratio.masked_fill(~own, 0.0).max() if ratio.numel() else ratio.sum(),
        "kl": (-safe * own).sum() / count.clamp(min=1),
        "kl_k3": ((safe.exp() - 1 - safe) * own).sum() / count.clamp(min=1),
    }
    numbers = torch.stack([count.float(), *(value.float() for value in values.values())]).tolist()  # one transfer
    return dict(zip(["tokens", *values], numbers, strict=True))
