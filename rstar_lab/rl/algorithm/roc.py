"""GRPO-RoC: resampling of the rollouts of a group.

More rollouts are generated than are trained on. Incorrect rollouts are sampled uniformly; correct rollouts are sampled
in favour of those with few tool errors and a clean format.

Source: rStar2-Agent (arXiv 2508.20722), section 2.2.3. The rule of the paper's public release is implemented beside it.
This module imports numpy and the standard library only.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

# The paper divides by the penalty and does not define the case of penalty 0. Penalties below this floor count as equal;
# above it, the sampling probability is inversely proportional to the penalty. The floor is that of one error in 100
# calls, which is less than any other penalty in practice.
PENALTY_FLOOR = 0.01

Rule = Literal["paper", "released", "random"]  # of `resample`
SelectionRule = Literal["paper", "released", "random", "none"]  # of a recipe; none: no oversampling, whole groups
Penalty = Literal["errors", "format"]
# A rule of the user: (rewards, penalties, keep, rng) -> indices of the rollouts to keep.
UserRule = Callable[[np.ndarray, np.ndarray, int, np.random.Generator], Sequence[int]]
RULES: tuple[Rule, ...] = get_args(Rule)


def tool_error_penalty(errors: int, calls: int) -> float:
    """Return p_err, the share of tool calls that failed through the model's fault; 0.5 without a call (arXiv 2508.20722, section 2.2.3).

    Args:
        errors: Failed calls, as counted by `outcomes.count_errors`.
        calls: All calls that count, from the same function.
    """
    if not 0 <= errors <= calls:
        raise ValueError(f"errors must lie between 0 and calls, got {errors} errors in {calls} calls")
    return errors / calls if calls else 0.5


def format_penalty(answer_tags: int, turns: int) -> float:
    """Return p_format: 1 without an answer, else min(1, (answers - 1) / turns) (arXiv 2508.20722, section 2.2.3).

    Args:
        answer_tags: Number of `<answer>` tags.
        turns: Number of assistant turns.
    """
    if answer_tags < 0 or turns < 0:
        raise ValueError(f"answer_tags and turns must not be negative, got {answer_tags} and {turns}")
    return min(1.0, (answer_tags - 1) / turns) if answer_tags and turns else 1.0


def released_tool_error_penalty(tool_responses: Sequence[str]) -> float:
    """Return p_err as the public release computes it: the share of tool responses that contain the word "error"."""
    return tool_error_penalty(sum("error" in text.lower() for text in tool_responses), len(tool_responses))


def released_format_penalty(text: str, turns: int) -> float:
    """Return p_format as the public release computes it: 1 without an answer or with unpaired tags, else
    min(1, (answers - 1) / (turns - 1)).

    The release counts the headers of assistant turns in the response, which does not contain the header of the first
    turn. It also counts tags in tool responses. A rollout of one turn has penalty 1.

    Args:
        text: text of the response, tool responses included.
        turns: number of turns that end with the end-of-turn token.
    """
    pairs = sum("<answer>" in part for part in text.split("</answer>")[:-1])
    if not pairs or not text.count("<answer>") == text.count("</answer>") == pairs or turns < 2:
        return 1.0
    return min((pairs - 1) / (turns - 1), 1.0)


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal. All advantages of such a group are 0, so it has no gradient."""
    return len(rewards) == 0 or bool(np.ptp(np.asarray(rewards, dtype=float)) == 0)


def resample(
    rewards: Sequence[float],
    penalties: Sequence[float],
    keep: int,
    *,
    rule: Rule | UserRule = "paper",
    min_positive: int = 0,
    min_negative: int = 0,
    rng: np.random.Generator | None = None,
) -> list[int]:
    """Return the ascending indices of the `keep` rollouts of one group to train on; all indices if the group has no more.

    The rules:

    - `paper`: positives and negatives each keep their proportional share of `keep` (halves are rounded to even), and at least one rollout
      if there is any and `keep` is at least 2. If there are too few of one kind, more of the other are kept. Negatives are sampled
      uniformly. Positives are sampled one after the other without replacement, each with probability inversely proportional to
      max(penalty, PENALTY_FLOOR). Source: arXiv 2508.20722, section 2.2.3.
    - `released`: as microsoft/rStar: proportional shares without the minimum of one, the positives with the lowest penalties and the
      first negatives; ties in index order. Deterministic.
    - `random`: `keep` rollouts, uniformly. A control: oversampling without a preference.
    - A function: it receives (rewards, penalties, keep, rng) and returns `keep` different indices; it ignores the minima.

    Args:
        rewards: Reward of each rollout, (rollouts,). A rollout is positive if its reward is above 0, else negative.
        penalties: p_err + p_format of each rollout, (rollouts,), at least 0.
        keep: Number of rollouts to keep.
        rule: Name of a rule, or a function.
        min_positive: Smallest number of positives to keep, if the group has that many.
        min_negative: Smallest number of negatives to keep, if the group has that many.
        rng: Source of randomness. Default: a new generator with a random seed.

    Returns:
        Ascending indices into the group.

    Raises:
        ValueError: For an unknown rule, if lengths differ, if a reward or penalty is not finite or a penalty is negative, or if
            min_positive + min_negative exceeds `keep`.
    """
    reward, penalty = np.asarray(rewards, dtype=float), np.asarray(penalties, dtype=float)
    count = len(reward)
    if reward.ndim != 1 or penalty.shape != reward.shape:
        raise ValueError(
            f"rewards and penalties must be one-dimensional and of equal length, got {reward.shape} and {penalty.shape}"
        )
    if not np.isfinite(reward).all() or not (np.isfinite(penalty) & (penalty >= 0)).all():
        raise ValueError("rewards must be finite, penalties finite and at least 0")
    if keep < 0 or min_positive < 0 or min_negative < 0 or min_positive + min_negative > keep:
        raise ValueError(
            f"min_positive {min_positive} + min_negative {min_negative} must lie between 0 and keep, which is {keep}"
        )
    if not callable(rule) and rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if count <= keep:
        return list(range(count))

    rng = rng or np.random.default_rng()
    if callable(rule):
        return sorted(rule(reward, penalty, keep, rng))
    if rule == "random":
        return sorted(rng.choice(count, keep, replace=False).tolist())

    positives, negatives = np.flatnonzero(reward > 0), np.flatnonzero(reward <= 0)
    if rule == "paper":
        # 1 positive and 15 negatives, keep 8: the share is round(8 / 16) = 0, but a group without its only success has no
        # signal, so each side keeps one. A minimum of one side comes first; the other side then gets its one only if room
        # is left. Positives are served before negatives because RoC is about them.
        keep_positive = round(keep * len(positives) / count)
        least_negative = min(len(negatives), min_negative)
        least_positive = min(len(positives), max(min_positive, 1 if keep > 1 and least_negative < keep else 0))
        least_negative = min(len(negatives), max(min_negative, 1 if keep > 1 and least_positive < keep else 0))
        keep_positive = max(least_positive, min(keep_positive, keep - least_negative))
    else:
        keep_positive = _released_share(len(positives), len(negatives), keep, min_positive, min_negative)
    keep_negative = keep - keep_positive

    if rule == "paper":
        # Exponential arrival times of rate 1 / penalty: the first k to arrive are a weighted sample without replacement.
        arrival = rng.standard_exponential(len(positives)) * np.maximum(penalty[positives], PENALTY_FLOOR)
        chosen = positives[np.argsort(arrival)[:keep_positive]]
        negatives = rng.permutation(negatives)
    else:
        chosen = positives[np.argsort(penalty[positives], kind="stable")[:keep_positive]]
    return sorted(np.concatenate([chosen, negatives[:keep_negative]]).tolist())


def _released_share(positives: int, negatives: int, keep: int, min_positive: int, min_negative: int) -> int:
    count = positives + negatives
    keep_positive, keep_negative = round(positives * keep / count), round(negatives * keep / count)
    if keep_negative <= min(min_negative, negatives):
        keep_positive = keep - min(min_negative, negatives)
    if keep_positive <= min(min_positive, positives):
        keep_positive = min(min_positive, positives)
    return keep_positive
