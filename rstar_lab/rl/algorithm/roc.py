"""GRPO-RoC's resampling: more rollouts than are trained on, failures kept as they come, successes kept if they are
clean.

Source: rStar2-Agent (arXiv 2508.20722), section 3.2; the rule of its public release is offered beside the paper's.
Numpy only.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

# The paper divides by the penalty and says nothing of a penalty of 0. Below this floor all count as equally clean;
# above it the probability is exactly inverse to the penalty. One error in a hundred calls is under any penalty that
# occurs.
PENALTY_FLOOR = 0.01

Rule = Literal["paper", "released", "random"]


def tool_error_penalty(errors: int, calls: int) -> float:
    """p_err: the share of tool calls that failed by the model's doing; 0.5 without a call. Both as `outcomes.count_errors`
    counts."""
    if not 0 <= errors <= calls:
        raise ValueError(f"errors must lie between 0 and calls, not {errors} of {calls}")
    return errors / calls if calls else 0.5


def format_penalty(answer_tags: int, turns: int) -> float:
    """p_format: 1 without an answer, else min(1, surplus answers / turns). `turns`: assistant turns."""
    if answer_tags < 0 or turns < 0:
        raise ValueError(f"answer_tags and turns must not be negative, not {answer_tags} and {turns}")
    return min(1.0, (answer_tags - 1) / turns) if answer_tags and turns else 1.0


def released_tool_error_penalty(tool_responses: Sequence[str]) -> float:
    """The release's p_err, for comparison only: the share of tool responses in which the word "error" occurs."""
    return tool_error_penalty(sum("error" in text.lower() for text in tool_responses), len(tool_responses))


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing: all advantages are 0. Ask again of what resampling kept."""
    return len(rewards) == 0 or bool(np.ptp(np.asarray(rewards, dtype=float)) == 0)


def resample(
    rewards: Sequence[float],
    penalties: Sequence[float],
    keep: int,
    *,
    rule: Rule = "paper",
    min_positive: int = 0,
    min_negative: int = 0,
    rng: np.random.Generator | None = None,
) -> list[int]:
    """The indices, ascending, of the `keep` rollouts of one group to train on, or of all where the group has no more.

    rewards: positive where > 0. penalties: p_err + p_format of each, at least 0. rng: None draws fresh randomness.
    min_positive, min_negative: so many of a side are kept, where it has them.

    paper: each side keeps its share of `keep` (halves to even), at least one where it has any and the rest allows it;
    where one side has too few the other fills up. Negatives uniformly. Positives one after the other without
    replacement, each with probability inversely proportional to max(penalty, PENALTY_FLOOR).
    released: as microsoft/rStar does: shares without the least one; the positives of the lowest penalties and the
    first negatives, ties in index order; nothing is random.
    random: any `keep`, uniformly: what oversampling alone does, as a control.

    Raises ValueError on lengths that differ, penalties that are negative or not finite, and minima that do not fit in
    `keep`.
    """
    reward, penalty = np.asarray(rewards, dtype=float), np.asarray(penalties, dtype=float)
    count = len(reward)
    if reward.ndim != 1 or penalty.shape != reward.shape:
        raise ValueError(
            f"rewards and penalties must be two lists of one length, not {reward.shape} and {penalty.shape}"
        )
    if not np.isfinite(reward).all() or not (np.isfinite(penalty) & (penalty >= 0)).all():
        raise ValueError("rewards must be finite, penalties finite and at least 0")
    if keep < 0 or min_positive < 0 or min_negative < 0 or min_positive + min_negative > keep:
        raise ValueError(
            f"min_positive {min_positive} + min_negative {min_negative} must lie between 0 and keep {keep}"
        )
    if rule not in ("paper", "released", "random"):
        raise ValueError(f"rule must be paper, released or random, not {rule!r}")
    if count <= keep:
        return list(range(count))

    rng = rng or np.random.default_rng()
    if rule == "random":
        return sorted(rng.choice(count, keep, replace=False).tolist())

    positives, negatives = np.flatnonzero(reward > 0), np.flatnonzero(reward <= 0)
    if rule == "paper":
        keep_positive = round(keep * len(positives) / count)
        least_negative = min(len(negatives), min_negative)
        least_positive = min(len(positives), max(min_positive, 1 if keep > 1 and least_negative < keep else 0))
        least_negative = min(len(negatives), max(min_negative, 1 if keep > 1 and least_positive < keep else 0))
        keep_positive = max(least_positive, min(keep_positive, keep - least_negative))
    else:
        keep_positive = _released_share(len(positives), len(negatives), keep, min_positive, min_negative)
    keep_positive = min(max(keep_positive, keep - len(negatives)), len(positives))
    keep_negative = keep - keep_positive

    if rule == "paper":
        # Arrival times of rate 1 / penalty: the first to arrive are a draw without replacement with those weights.
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
