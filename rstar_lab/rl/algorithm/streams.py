"""What the rollouts of a step contribute to the loss, token by token. Methods produce it; the trainers execute it.

The loss of a step has three terms, each with its own normaliser:

| term | stream | normaliser |
|---|---|---|
| policy loss | `advantage_T`, `loss_weight_T` | that of `rl.method.aggregation` over the tokens with a weight |
| cross-entropy | `ce_weight_T` | number of tokens with a weight |
| KL to another model | `reference_log_prob_T` | as the policy loss |

Imports numpy only, so that methods load without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rstar_lab.rl.trajectory import Trajectory

Stream = np.ndarray | float  # (response length,), or one number for all tokens of the response


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one rollout. Each is an array (response length,), or one number for all tokens of the response.

    Attributes:
        advantage_T: advantage of each token in the policy loss.
        loss_weight_T: weight of each token in the policy loss and in the KL; used on the tokens that the model generated.
            A token with weight 0 is not trained on and not counted. None: 1.
        ce_weight_T: weight of the cross-entropy of each token, also of tokens that the model did not generate. None: 0.
        reference_log_prob_T: log-prob of each token under another model. NaN: no KL for this token. None: no KL.
    """

    advantage_T: Stream = 0.0
    loss_weight_T: Stream | None = None
    ce_weight_T: Stream | None = None
    reference_log_prob_T: Stream | None = None

    def plus(self, other: "Streams") -> "Streams":
        """Return these streams with those of another method.

        Args:
            other: Its advantages and weights of the cross-entropy are added; weights of the policy loss are multiplied.

        Raises:
            ValueError: If both have a reference.
        """
        if self.reference_log_prob_T is not None and other.reference_log_prob_T is not None:
            raise ValueError("two methods have a reference model; remove one")
        ce = [weight for weight in (self.ce_weight_T, other.ce_weight_T) if weight is not None]
        loss = [weight for weight in (self.loss_weight_T, other.loss_weight_T) if weight is not None]
        reference = self.reference_log_prob_T if other.reference_log_prob_T is None else other.reference_log_prob_T
        return Streams(
            self.advantage_T + other.advantage_T,
            loss[0] if len(loss) == 1 else loss[0] * loss[1] if loss else None,
            ce[0] if len(ce) == 1 else ce[0] + ce[1] if ce else None,
            reference,
        )


def rollout_streams(advantages: np.ndarray) -> list[Streams]:
    """Return streams with one advantage per rollout. advantages: (rollouts,)."""
    return [Streams(advantage) for advantage in advantages.tolist()]


def trained_mask(trajectory: Trajectory, streams: Streams) -> np.ndarray:
    """Return True for the tokens of the response that the policy loss uses, (response length,)."""
    mask = np.asarray(trajectory.loss_mask, dtype=bool)
    return mask if streams.loss_weight_T is None else mask & (np.broadcast_to(streams.loss_weight_T, mask.shape) != 0)


def trained_tokens(trajectories: Sequence[Trajectory], streams: Sequence[Streams]) -> list[int]:
    """Return the number of tokens of each rollout that the policy loss uses."""
    return [
        t.model_tokens if stream.loss_weight_T is None else int(trained_mask(t, stream).sum())
        for t, stream in zip(trajectories, streams, strict=True)
    ]


def mean_advantage(trajectory: Trajectory, streams: Streams) -> float:
    """Return the mean advantage of the tokens of a rollout that the policy loss uses; 0 without such a token."""
    if np.ndim(streams.advantage_T) == 0:
        return float(streams.advantage_T)
    mask = trained_mask(trajectory, streams)
    return float(np.asarray(streams.advantage_T)[mask].mean()) if mask.any() else 0.0


def check_streams(trajectory: Trajectory, streams: Streams, where: str) -> Streams:
    """Return the streams as float32 arrays or numbers. Raises ValueError, which starts with `where`, for a wrong shape or a
    value that is not finite (NaN is allowed in `reference_log_prob_T`)."""
    length = len(trajectory.response_ids)
    checked: dict[str, Stream] = {}
    for name in Streams.__slots__:
        value = getattr(streams, name)
        if value is None:
            continue
        array = np.asarray(value, dtype=np.float64)
        if array.shape not in ((), (length,)):
            raise ValueError(f"{where} returned {name} of shape {array.shape}; expected a number or ({length},)")
        if not np.isfinite(array[~np.isnan(array)] if name == "reference_log_prob_T" else array).all():
            raise ValueError(f"{where} returned {name} with a value that is not finite")
        checked[name] = float(array) if array.ndim == 0 else array.astype(np.float32)
    return replace(streams, **checked)
