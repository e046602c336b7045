"""ECHO (arXiv 2605.24517): the model also learns to predict what its tools return.

The loss gets weight * mean of -log p over the tokens of tool responses and of texts of the environment in the mini-batch,
without the template around them and without responses that report a failure of the sandbox. Groups with equal rewards are
kept for this term; they are in no other term, so the policy loss is that without ECHO. Rollouts that RoC dropped are not
used, as in the other terms.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.trajectory import Trajectory


class Echo(MethodSection):
    """ECHO (arXiv 2605.24517): adds the cross-entropy of the tokens of tool responses to the loss."""

    type: Literal["echo"] = "echo"
    """Name of the method."""
    weight: float = Field(gt=0)
    """Weight of the mean cross-entropy."""

    equal_groups: ClassVar[Literal["drop", "cross_entropy", "train"]] = "cross_entropy"
    reads_outputs: ClassVar[bool] = True

    def score_rollout(self, rollout: Trajectory, streams: Streams) -> Streams | None:
        weight_T = np.zeros(len(rollout.response_ids), dtype=np.float32)
        for turn in rollout.turns:
            for start, end in turn.outputs:
                weight_T[start:end] = self.weight
        return streams.plus(Streams(ce_weight_T=weight_T if weight_T.any() else 0.0))

    def loss_options(self, config: LossConfig) -> LossConfig:
        return replace(config, ce_metric="tool_output_loss")
