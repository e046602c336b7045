"""Optimal token baseline (OTB, arXiv 2602.07078), in its variant for tool calls.

The advantage of the t-th token is r - b_t. b_t is the mean reward of those rollouts of the group that have a t-th token,
weighted by the squared norm of their gradient up to it: the cumulative sum of 1 - 2 p + (sum of the squared
probabilities of the vocabulary).
"""

from typing import Literal

from rstar_lab.rl.methods.method import Method


class Otb(Method):
    """Optimal token baseline (OTB in its variant for tool calls, arXiv 2602.07078): the advantage is the reward minus a separate
    baseline for each token, in which rollouts with large gradients have more weight. One more forward pass. Local trainer
    only."""

    type: Literal["otb"] = "otb"
    """Name of the method."""
