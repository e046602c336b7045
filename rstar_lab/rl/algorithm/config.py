"""Options of the algorithm as plain data. This module imports no torch, so that a recipe loads quickly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rstar_lab.rl.algorithm.roc import OwnRule, Penalty, SelectionRule
from rstar_lab.rl.trajectory import Trajectory

Variant = Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"]
Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

Correction = Literal["none", "tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"]
PER_SEQUENCE: tuple[Correction, ...] = ("seq_tis", "seq_mask", "geo_mask")
TRUNCATED: tuple[Correction, ...] = ("tis", "seq_tis")  # the other corrections mask tokens
# Lower and upper bound of the ratio trainer / engine; see `correction` for the formulas and sources.
CORRECTION_BOUNDS: dict[Correction, tuple[float, float]] = {
    "tis": (0.0, 2.0), "seq_tis": (0.0, 2.0), "token_mask": (0.0, 2.0), "seq_mask": (0.0, 2.0),
    "geo_mask": (0.999, 1.001), "icepop": (0.5, 5.0),
}  # fmt: skip


# User functions. Tensors are (batch, tokens).
OwnLoss = Callable[[Any, Any, Any, Any], Any]  # (log_probs, old_log_probs, advantages, mask) -> loss of each token
OwnCorrection = Callable[[Any, Any, Any], Any]  # (trainer_log_probs, engine_log_probs, mask) -> weight of each token
OwnPenalty = Callable[[Trajectory], float]
OwnAdvantage = Callable[[Any, list[Trajectory]], Any]  # (rewards, trajectories) -> advantage of each rollout


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Options of the training loss. See `objective.policy_loss` for the variants and `objective.aggregate` for the
    aggregations.

    variant: a name, or a user function. clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    horizon: constant length that `seq-mean-token-sum-norm` divides by; None: the width of the batch. correction: a
    name, or a user function. correction_bounds: bounds of the ratio, see `correction.correction_weights`.
    kl_coefficient: weight of the KL to the reference model; 0: no KL term.
    """

    variant: Variant | OwnLoss = "grpo"
    aggregation: Aggregation = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    horizon: int | None = None
    correction: Correction | OwnCorrection = "none"
    correction_bounds: tuple[float, float] = (0.0, 2.0)
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """Options of the selection of rollouts for training.

    rule: resampling rule; none keeps whole groups. group_size: rollouts kept per group. penalties: terms of the penalty
    by which RoC ranks correct rollouts. rule and penalties may be user functions. min_positive, min_negative: smallest
    number of correct and of incorrect rollouts to keep, if the group has that many. advantage: user function; None:
    group advantages, divided by the standard deviation of the group if normalise_std.
    overlong_buffer: tokens before max_response_tokens over which the shaped reward falls by 1; 0: no shaping.
    drop_void_turns: leave out rollouts that have a turn without a well-formed call or an answer (SimpleTIR).
    drop_control_tokens: leave out rollouts in which the model wrote a misplaced control token
    (`Codec.has_misplaced_control_token`).
    keep_equal: also train on groups whose rewards are all equal, with advantage 0.
    tool_budget: weight of the penalty on tool calls, see `advantages.tool_budget_advantages`; 0: no penalty.
    tool_budget_from: pass rate from which a problem counts as easy. max_turns: number of calls with the full penalty.
    environment_penalties: penalties of the rollouts of an environment, by its name; other rollouts use `penalties`.
    """

    rule: SelectionRule | OwnRule = "paper"
    group_size: int = 16
    penalties: tuple[Penalty | OwnPenalty, ...] = ("errors", "format")
    advantage: OwnAdvantage | None = None
    min_positive: int = 0
    min_negative: int = 0
    normalise_std: bool = True
    max_response_tokens: int = 8192
    overlong_buffer: int = 0
    drop_void_turns: bool = False
    drop_control_tokens: bool = False
    keep_equal: bool = False
    tool_budget: float = 0.0
    tool_budget_from: float = 0.5
    max_turns: int = 10
    environment_penalties: Mapping[str, tuple[Penalty, ...]] = field(default_factory=dict)
