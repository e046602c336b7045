"""Options of the algorithm as plain data. This module imports no torch, so that a recipe loads quickly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rstar_lab.rl.trajectory import Trajectory

Variant = Literal["grpo", "gspo", "cispo", "clip_cov", "kl_cov"]
Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["k3", "policy_gradient"]

Correction = Literal["none", "tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"]
PER_SEQUENCE: tuple[Correction, ...] = ("seq_tis", "seq_mask", "geo_mask")
TRUNCATED: tuple[Correction, ...] = ("tis", "seq_tis")  # the other corrections mask tokens
# Lower and upper bound of the ratio trainer / engine; see `objective.correction_weights` for the formulas and sources.
CORRECTION_BOUNDS: dict[Correction, tuple[float, float]] = {
    "tis": (0.0, 2.0), "seq_tis": (0.0, 2.0), "token_mask": (0.0, 2.0), "seq_mask": (0.0, 2.0),
    "geo_mask": (0.999, 1.001), "icepop": (0.5, 5.0),
}  # fmt: skip


# User functions. Tensors are (batch, tokens).
UserLoss = Callable[[Any, Any, Any, Any], Any]  # (log_probs, old_log_probs, advantages, mask) -> loss of each token
UserCorrection = Callable[[Any, Any, Any], Any]  # (trainer_log_probs, engine_log_probs, mask) -> weight of each token
UserPenalty = Callable[[Trajectory], float]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Options of the training loss. See `objective.policy_loss` for the variants and `objective.aggregate` for the
    aggregations.

    variant: a name, or a user function. clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    horizon: constant length that `seq-mean-token-sum-norm` divides by; None: the width of the batch. correction: a
    name, or a user function. correction_bounds: bounds of the ratio, see `objective.correction_weights`.
    kl_coefficient: weight of the KL to the reference model; 0: no KL term. kl_estimator: see `training_loss`.
    kl_metric, ce_metric: names of the metrics of the KL and of the cross-entropy. cov_share, cov_bounds, cov_kl: see
    `objective.policy_loss`.
    """

    variant: Variant | UserLoss = "grpo"
    aggregation: Aggregation = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    horizon: int | None = None
    correction: Correction | UserCorrection = "none"
    correction_bounds: tuple[float, float] = (0.0, 2.0)
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_metric: str = "reference_kl"
    ce_metric: str = "cross_entropy"
    cov_share: float = 2e-4
    cov_bounds: tuple[float, float] = (1.0, 5.0)
    cov_kl: float = 1.0
