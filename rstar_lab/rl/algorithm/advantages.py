"""Group advantages (GRPO, arXiv 2402.03300) and variants. Uses numpy only, so that the analysis package can import
it."""

from collections.abc import Sequence

import numpy as np

BUDGET_CLIP = 0.5  # largest relative change of an advantage by the tool budget; not from the paper


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence | np.ndarray,
    *,
    normalise_std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Return (reward - group mean) / (group standard deviation + eps) (GRPO, arXiv 2402.03300).

    Args:
        rewards: Reward of each rollout, (batch,).
        groups: Group id of each reward: list, array or tensor, (batch,).
        normalise_std: Divide by the standard deviation of the group's sample (n - 1). False: Dr.GRPO.
        eps: Added to the standard deviation.

    Returns:
        Advantages, (batch,) float64. A group of one has mean 0 and deviation 1, so its advantage is its reward.

    Raises:
        ValueError: If the lengths differ.
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


def maxrl_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence | np.ndarray,
    *,
    unshaped: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Return (reward - group mean) / group mean, (batch,) float64 (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 the gradient is that of the log of the pass rate, so problems with a low pass rate get a higher
    weight than under GRPO. A group whose mean is 0 gets 0. rewards, groups: as for `group_advantages`.
    unshaped: rewards before shaping, (batch,), whose group mean is the divisor: the mean of shaped rewards can be close to
    0, and the quotient is then unbounded. None: the rewards are not shaped. Raises ValueError for a negative divisor: the sign
    of the gradient would be wrong.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    centred = group_advantages(reward, groups, normalise_std=False)
    divided = reward if unshaped is None else np.asarray(unshaped, dtype=np.float64)
    mean = divided - group_advantages(divided, groups, normalise_std=False)
    if divided.size and divided.min() < 0:
        raise ValueError(f"rewards must be at least 0, one is {divided.min():g}")
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
    unshaped: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:
    """Return group advantages with a penalty on the tool calls of successful rollouts of easy problems, (batch,) float64.

    The penalty weight * sin(pi/2 * calls / max_calls) is subtracted from the reward (AdaTIR, arXiv 2601.14696). The
    change of an advantage is clipped to BUDGET_CLIP times its size, so it never changes sign, and it rises by at most
    that share.
    rewards, groups: as for `group_advantages`. calls: (batch,), numbers of tool calls; a number above max_calls counts
    as max_calls. easy: (batch,), True for the rollouts of easy problems. unshaped: rewards before shaping, (batch,), which say
    what is successful; None: the rewards are not shaped.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    successful = (reward if unshaped is None else np.asarray(unshaped)) > 0
    plain = group_advantages(reward, groups, normalise_std=normalise_std)
    share = np.minimum(np.asarray(calls, dtype=np.float64) / max_calls, 1.0)
    penalty = np.where(np.asarray(easy, dtype=bool) & successful, weight * np.sin(np.pi / 2 * share), 0.0)
    change = group_advantages(reward - penalty, groups, normalise_std=normalise_std) - plain
    bound = BUDGET_CLIP * np.abs(plain)
    return plain + np.clip(change, -bound, bound)


def optimal_token_advantages(
    centred: Sequence[float] | np.ndarray, groups: Sequence | np.ndarray, energies: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return reward minus the optimal baseline of each token (OTB, arXiv 2602.07078), an array (tokens,) per rollout.

    The baseline of the t-th token generated by the model is a weighted mean of the rewards of those rollouts of the
    group that have a t-th token. The weight of a rollout is the squared norm of its gradient up to that token, which is
    the cumulative sum of its energies. If only one rollout has a t-th token, the baseline is the group mean.

    centred: reward minus group mean, (batch,). energies: 1 - 2 p + (sum of the squared probabilities over the
    vocabulary) for each token generated by the model, (tokens,) per rollout; p is the probability of the token.
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
    """Return the group ids of an array or tensor as Python values; a sequence is returned unchanged."""
    # Iterating over a tensor gives tensors, which hash by identity.
    return groups.tolist() if hasattr(groups, "tolist") else groups
