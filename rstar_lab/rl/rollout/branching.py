"""Branching of rollouts at turns with high entropy (method `branching`), after ARPO (arXiv 2507.19849, section 3.1).

The first half of the rollouts of a group, the parents, start at once. Each of the others, the children, waits for its
own parent. When the token entropy at the start of a parent's turn is higher than that of its first turn by more than
the threshold, the child
starts there: it shares the tokens before that turn and has copies of the tool sessions. A parent branches once at most. If it
ends without a branch, its child starts from the prompt, as without branching.

The number of rollouts of a group therefore does not change, and which rollouts branch does not depend on timing. In ARPO,
the rollouts of a problem share one budget of branches, and the probability of a branch rises linearly with the entropy.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.tools.base import ForkFailed
from rstar_lab.rl.trajectory import Trajectory

FIRST_TOKENS = 20  # tokens at the start of a turn whose entropy is compared

log = logging.getLogger(__name__)


def entropy_estimate(log_probs: Sequence[float]) -> float:
    """Return the mean entropy of the first tokens of a turn, in nats per token, estimated as their mean -log p.

    log_probs: of the sampled tokens, as the engine returns them. The estimate is unbiased, because E[-log p] is the entropy.
    """
    first = log_probs[:FIRST_TOKENS]
    return -sum(first) / len(first) if first else 0.0


class Branch:
    """The child of one parent: a rollout that may start at one of the parent's turns."""

    def __init__(self, child: RolloutTask, parent: RolloutTask, threshold: float):
        self.child, self.parent, self.threshold = child, parent, threshold
        self.turn: int | None = None  # turn of the parent at which the child starts
        self.decided = asyncio.Event()

    def should_start(self, first_turn: Sequence[float], turn: Sequence[float]) -> bool:
        """Return whether the child starts at a turn of the parent. Arguments: log-probs of the first turn and of this one."""
        if self.decided.is_set():
            return False
        return entropy_estimate(turn) - entropy_estimate(first_turn) > self.threshold

    async def start_at(self, prefix: Trajectory, context: RolloutContext) -> None:
        """Start the child at the end of a prefix of its parent. If a tool cannot be copied, it does not start here."""
        try:
            await context.fork_tools(self.parent.traj_id, self.child.traj_id)
        except ForkFailed as error:
            log.warning("branching: rollout %s did not branch: %s", self.parent.traj_id, error)
            return
        self.turn = len(prefix.turns)
        self.child = replace(self.child, partial=prefix)
        self.decided.set()

    def parent_ended(self) -> None:
        """Start the child from the prompt, unless it has started at a turn of the parent."""
        self.decided.set()

    def add_origin(self, trajectory: Trajectory) -> Trajectory:
        """Return the child's rollout with the metrics `branch_parent` (sample of the parent) and `branch_turn` (its first own
        turn), if it started at a turn of the parent."""
        if self.turn is None:
            return trajectory
        origin = {"branch_parent": float(self.parent.sample), "branch_turn": float(self.turn)}
        return replace(trajectory, metrics={**trajectory.metrics, **origin})


class Branches(NamedTuple):
    """The branches of several groups: by the traj_id of the parent, and by that of the child."""

    of_parent: dict[str, Branch]
    of_child: dict[str, Branch]


def plan_branches(tasks: Sequence[RolloutTask], threshold: float | None) -> Branches:
    """Return a branch for each pair of rollouts: in a group of n, rollout i is the parent of rollout i + ceil(n / 2).

    threshold: `entropy` of the method `branching`; None: no branches.
    """
    planned = Branches({}, {})
    if threshold is None:
        return planned
    groups: dict[str, list[RolloutTask]] = defaultdict(list)
    for task in tasks:
        groups[task.group_id].append(task)
    for group in groups.values():
        children = group[(len(group) + 1) // 2 :]
        for parent, child in zip(group, children, strict=False):
            planned.of_parent[parent.traj_id] = planned.of_child[child.traj_id] = Branch(child, parent, threshold)
    return planned
