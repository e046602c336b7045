"""Group advantages (GRPO, arXiv 2402.03300) and variants. Uses numpy only, so that the analysis package can import
it."""

from collections.abc import Sequence

import numpy as np

BUDGET_CLIP = 0.5  # largest relative change of an advantage by the tool budget; our choice


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence | np.ndarray,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Return (reward - group mean) / (group standard deviation + eps), (batch,) float64.

    rewards: (batch,). groups: group id of each reward (list, array or tensor). The standard deviation is that of the
    sample (n - 1). A group of one has mean 0 and deviation 1, so its advantage is its reward. normalise_std: if False,
    do not divide by the standard deviation (Dr.GRPO). Raises ValueError if the lengths differ.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    if reward.ndim != 1 or len(groups) != len(reward):
        raise ValueError(
            f"rewards and groups must be one-dimensional and of equal length, got {reward.shape} and {len(groups)}"
        )
    advantages = np.empty_like(reward)
    indices_of: dict[object, list[int]] = {}
    for index, group in enumerate(hashable_groups(groups)):
        indices_of.setdefault(group, []).append(index)
    for indices in indices_of.values():
        group_rewards = reward[indices]
        mean, std = (group_rewards.mean(), group_rewards.std(ddof=1)) if len(indices) > 1 else (0.0, 1.0)
        advantages[indices] = (group_rewards - mean) / (std + eps if normalise_std else 1.0)
    return advantages


def maxrl_advantages(rewards: Sequence[float] | np.ndarray, groups: Sequence | np.ndarray) -> np.ndarray:
    """Return (reward - group mean) / group mean, (batch,) float64 (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 the gradient is that of the log of the pass rate, so problems with a low pass rate get a higher
    weight than under GRPO. A group whose mean is not positive gets 0. rewards, groups: as for `group_advantages`.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    centred = group_advantages(reward, groups, normalise_std=False)
    mean = reward - centred
    return np.divide(centred, mean, out=np.zeros_like(centred), where=mean > 0)


def tool_budget_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence | np.ndarray,
    calls: Sequence[int] | np.ndarray,
    easy: Sequence[bool] | np.ndarray,
    *,
    weight: float,
    max_calls: int,
    normalise_std: bool = True,
) -> np.ndarray:
    """Return group advantages with a penalty on the tool calls of successful rollouts of easy problems, (batch,) float64.

    The penalty weight * sin(pi/2 * calls / max_calls) is subtracted from the reward (AdaTIR, arXiv 2601.14696). The change of
    an advantage is clipped to BUDGET_CLIP times its size, so a success never gets a negative advantage for its calls, and the
    advantages of the others hardly rise. rewards, groups: as for `group_advantages`. calls, easy: (batch,); more than max_calls
    count as max_calls.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    plain = group_advantages(reward, groups, normalise_std=normalise_std)
    share = np.minimum(np.asarray(calls, dtype=np.float64) / max_calls, 1.0)
    penalty = np.where(np.asarray(easy, dtype=bool) & (reward > 0), weight * np.sin(np.pi / 2 * share), 0.0)
    change = group_advantages(reward - penalty, groups, normalise_std=normalise_std) - plain
    bound = BUDGET_CLIP * np.abs(plain)
    return plain + np.clip(change, -bound, bound)


def optimal_token_advantages(
    centred: Sequence[float] | np.ndarray, groups: Sequence | np.ndarray, energies: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return reward minus the optimal baseline of each token (OTB, arXiv 2602.07078), an array (tokens,) per rollout.

    The baseline of the model's t-th token is a weighted mean of the rewards of those rollouts of the group that have a
    t-th token. The weight of a rollout is the squared norm of its gradient up to that token, which is the cumulative
    sum of its energies. If only one rollout has a t-th token, the baseline is the group mean.

    centred: reward minus group mean, (batch,). energies: 1 - 2 p + (sum of the squared probabilities of the vocabulary)
    for each token of the model, (tokens,) per rollout; p is the probability of the token.
    """
    rewards, advantages = np.asarray(centred, dtype=np.float64), [np.full(len(energy), 0.0) for energy in energies]
    indices_of: dict[object, list[int]] = {}
    for index, group in enumerate(hashable_groups(groups)):
        indices_of.setdefault(group, []).append(index)
    for indices in indices_of.values():
        lengths = np.array([len(energies[i]) for i in indices])
        weights = np.zeros((len(indices), lengths.max()))
        for row, i in enumerate(indices):
            weights[row, : lengths[row]] = np.cumsum(energies[i], dtype=np.float64)
        baseline = rewards[indices] @ weights / (weights.sum(axis=0) + 1e-8)
        baseline[sorted(lengths)[-2] if len(indices) > 1 else 0 :] = 0.0
        for row, i in enumerate(indices):
            advantages[i] = rewards[i] - baseline[: lengths[row]]
    return advantages


def hashable_groups(groups: Sequence | np.ndarray) -> Sequence:
    """Return the group ids of an array or tensor as Python values; a sequence is returned as it is."""
    # Iterating over a tensor gives tensors, which hash by identity.
    return groups.tolist() if hasattr(groups, "tolist") else groups
