"""Optimal token baseline (OTB, arXiv 2602.07078), in its variant for tool calls.

The advantage of the t-th token is r - b_t. b_t is the mean reward of those rollouts of the group that have a t-th token,
weighted by the squared norm of their gradient up to it: the cumulative sum of 1 - 2 p + (sum of the squared
probabilities of the vocabulary).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from rstar_lab.rl.algorithm.advantages import optimal_token_advantages
from rstar_lab.rl.algorithm.hooks import ForwardPasses
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.methods.grpo import GrpoHooks
from rstar_lab.rl.methods.method import Method
from rstar_lab.rl.trajectory import Trajectory


class Otb(Method):
    """Optimal token baseline (OTB in its variant for tool calls, arXiv 2602.07078): the advantage is the reward minus a separate
    baseline for each token, in which rollouts with large gradients have more weight. One more forward pass. Local trainer
    only."""

    type: Literal["otb"] = "otb"
    """Name of the method."""


class OtbHooks(GrpoHooks):
    """Centred rewards, from which a forward pass makes the advantages of the tokens; see `optimal_token_advantages`."""

    forward_phase = "measure_s"

    def __init__(self) -> None:
        super().__init__(normalise_std=False)

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        found, trained = await passes.statistics(selection.trajectories), selection.trajectories
        masks = [np.asarray(t.loss_mask, dtype=bool) for t in trained]
        energies = [
            (1 - 2 * np.exp(log_probs) + squares)[mask]
            for log_probs, squares, mask in zip(found.log_probs, found.squares, masks, strict=True)
        ]
        of_tokens = optimal_token_advantages(selection.advantages, [t.group_id for t in trained], energies)
        streams = []
        for mask, values, old in zip(masks, of_tokens, selection.streams, strict=True):
            advantage_T = np.zeros(len(mask))
            advantage_T[mask] = values
            streams.append(replace(old, advantage_T=advantage_T))
        return replace(selection, streams=streams, measured=(found.log_probs, found.entropies))
