"""Options of the algorithm as plain data. This module imports no torch, so that a recipe loads quickly."""

from dataclasses import dataclass
from typing import Literal

from rstar_lab.rl.algorithm.roc import Penalty, SelectionRule

Variant = Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"]
Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


Correction = Literal["none", "tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"]
PER_SEQUENCE: tuple[Correction, ...] = ("seq_tis", "seq_mask", "geo_mask")
TRUNCATED: tuple[Correction, ...] = ("tis", "seq_tis")  # the others drop
# Lower and upper bound of the ratio trainer / engine; see `correction` for the formulas and sources.
CORRECTION_BOUNDS: dict[Correction, tuple[float, float]] = {
    "tis": (0.0, 2.0), "seq_tis": (0.0, 2.0), "token_mask": (0.0, 2.0), "seq_mask": (0.0, 2.0),
    "geo_mask": (0.999, 1.001), "icepop": (0.5, 5.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Options of the training loss. See `objective.policy_loss` for the variants and `objective.aggregate` for the
    aggregations.

    horizon: constant length that `seq-mean-token-sum-norm` divides by; None: the width of the batch.
    correction, correction_bounds: off-policy correction, see `correction.correction_weights`.
    kl_coefficient: weight of the KL to the reference model; 0: no KL term.
    """

    variant: Variant = "grpo"
    aggregation: Aggregation = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    horizon: int | None = None
    correction: Correction = "none"
    correction_bounds: tuple[float, float] = (0.0, 2.0)
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """Options of the selection of rollouts for training.

    min_positive, min_negative: smallest number kept of each side, if the group has that many.
    rule: resampling rule; none keeps whole groups. group_size: rollouts kept per group. penalties: terms of the penalty
    by which RoC ranks correct rollouts. normalise_std: divide advantages by the standard deviation of the group.
    overlong_buffer: tokens before max_response_tokens over which the shaped reward falls by 1; 0: no shaping.
    drop_void_turns: leave out rollouts that have a turn without a well-formed call or an answer (SimpleTIR).
    """

    rule: SelectionRule = "paper"
    group_size: int = 16
    penalties: tuple[Penalty, ...] = ("errors", "format")
    min_positive: int = 0
    min_negative: int = 0
    normalise_std: bool = True
    max_response_tokens: int = 8192
    overlong_buffer: int = 0
    drop_void_turns: bool = False
