"""Optimal token baseline (OTB, arXiv 2602.07078), in its variant for tool calls.

The advantage of the t-th token is r - b_t. b_t is the mean reward of those rollouts of the group that have a t-th token,
weighted by the squared norm of their gradient up to it: the cumulative sum of 1 - 2 p + (sum of the squared
probabilities of the vocabulary).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from rstar_lab.rl.algorithm.advantages import group_advantages, optimal_token_advantages
from rstar_lab.rl.algorithm.hooks import ForwardPasses, Group
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams, mean_advantage, rollout_streams
from rstar_lab.rl.methods.method import Method
from rstar_lab.rl.trajectory import Trajectory


class Otb(Method):
    """Optimal token baseline (OTB for tool calls, arXiv 2602.07078): the reward minus a baseline for each token, in which
    rollouts with large gradients have more weight. One more forward pass. Local trainer only."""

    type: Literal["otb"] = "otb"
    """Name of the method."""

    forward_phase: ClassVar[str | None] = "measure_s"
    not_with_verl: ClassVar[str] = "verl's forward pass returns no sums over the vocabulary; use grpo"

    def check(self, rl: Any) -> None:
        super().check(rl)
        if rl.old_log_probs == "engine":
            raise ValueError("method otb requires old_log_probs: trainer, which computes the baselines")

    def score_group(self, group: Group, streams: list[Streams]) -> list[Streams]:
        """Return centred rewards, from which `forward` makes the advantages of the tokens."""
        return rollout_streams(group_advantages(group.rewards, [0] * len(group.rewards), normalise_std=False))

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        # The baselines are those of whole groups, also with rollouts that another method left out.
        trained, rewards = [*selection.trajectories], [*selection.advantages]
        for rollout, streams in selection.outside:
            trained.append(rollout)
            rewards.append(mean_advantage(rollout, streams))
        found, count = await passes.statistics(trained), len(selection.trajectories)
        masks = [np.asarray(t.loss_mask, dtype=bool) for t in trained]
        energies = [
            (1 - 2 * np.exp(log_probs) + squares)[mask]
            for log_probs, squares, mask in zip(found.log_probs, found.squares, masks, strict=True)
        ]
        of_tokens = optimal_token_advantages(rewards, [t.group_id for t in trained], energies)
        streams_of_kept = []
        for mask, values, old in zip(masks, of_tokens, selection.streams, strict=False):
            advantage_T = np.zeros(len(mask))
            advantage_T[mask] = values
            streams_of_kept.append(replace(old, advantage_T=advantage_T))
        measured = (found.log_probs[:count], found.entropies[:count])
        return replace(selection, streams=streams_of_kept, measured=measured)
