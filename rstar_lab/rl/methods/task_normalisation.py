"""Task advantage normalisation (AgentRL, arXiv 2510.04206).

The advantages of all tokens of a task in a step get mean 0 and standard deviation 1, so that no task dominates the update. A
task is an entry of `rl.environments`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rstar_lab.rl.algorithm.hooks import Group
from rstar_lab.rl.algorithm.streams import Streams, trained_mask
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory

EPS = 1e-6


class TaskNormalisation(MethodSection):
    """Normalises the advantages of the tokens of each environment in a step to mean 0 and standard deviation 1 (AgentRL, arXiv
    2510.04206). Not with the method `otb`."""

    type: Literal["task_normalisation"] = "task_normalisation"
    """Name of the method."""

    def check(self, rl: Any) -> None:
        if rl.method.type == "otb":
            raise ValueError(
                "method.add: task_normalisation cannot be combined with method otb, which has advantages of its own"
            )

    def score(self, groups: Sequence[Group], streams: list[list[Streams]]) -> list[list[Streams]]:
        return normalise_tokens(groups, streams, lambda rollout: rollout.environment)


def normalise_tokens(
    groups: Sequence[Group], streams: list[list[Streams]], part_of: Callable[[Trajectory], str]
) -> list[list[Streams]]:
    """Return the streams with advantages that have mean 0 and standard deviation 1 over the trained tokens of each part of the
    step. part_of: returns the part of a rollout."""
    tokens: dict[str, list[np.ndarray]] = {}
    for group, scores in zip(groups, streams, strict=True):
        for rollout, stream in zip(group.rollouts, scores, strict=True):
            mask = trained_mask(rollout, stream)
            tokens.setdefault(part_of(rollout), []).append(np.broadcast_to(stream.advantage_T, mask.shape)[mask])
    moments = {}
    for part, arrays in tokens.items():
        values = np.concatenate(arrays)
        moments[part] = (values.mean(), values.std() + EPS) if len(values) else (0.0, 1.0)

    def normalised(rollout: Trajectory, stream: Streams) -> Streams:
        mean, std = moments[part_of(rollout)]
        return replace(stream, advantage_T=(stream.advantage_T - mean) / std)

    return [[*map(normalised, group.rollouts, scores)] for group, scores in zip(groups, streams, strict=True)]
