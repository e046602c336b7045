"""Options of the algorithm as plain data. This module imports no torch, so that a recipe loads quickly."""

from dataclasses import dataclass
from typing import Literal

from rstar_lab.rl.algorithm.roc import Penalty, SelectionRule

Variant = Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"]
Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Options of the training loss. See `objective.policy_loss` for the variants and `objective.aggregate` for the
    aggregations.

    horizon: constant length that `seq-mean-token-sum-norm` divides by; None: the width of the batch.
    importance_cap: cap of the truncated importance weight trainer / engine; None: no importance weights.
    kl_coefficient: weight of the KL to the reference model; 0: no KL term.
    """

    variant: Variant = "grpo"
    aggregation: Aggregation = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    horizon: int | None = None
    importance_cap: float | None = None
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
