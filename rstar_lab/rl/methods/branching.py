"""Branching rollouts (after ARPO, arXiv 2507.19849, section 3.1): a rollout branches at a turn whose start is uncertain.

The first half of the rollouts of a group, the parents, start at once. Each of the others, the children, waits for its
own parent. When the token entropy at the start of a parent's turn is higher than that of its first turn by more than
the threshold, the child starts there: it shares the tokens before that turn and has copies of the tool sessions. A parent
branches once at most. If it ends without a branch, its child starts from the prompt, as without branching.

The number of rollouts of a group therefore does not change, and which rollouts branch does not depend on timing. In ARPO,
the rollouts of a problem share one budget of branches, and the probability of a branch rises linearly with the entropy.
See docs/algorithm.md for the differences from the paper.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from rstar_lab.rl.engine import Slots, SlotWrapper, WrittenTurn
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.trajectory import Trajectory

FIRST_TOKENS = 20  # tokens at the start of a turn whose entropy is compared


class Branching(MethodSection):
    """Branching (after ARPO, arXiv 2507.19849): branches a rollout where the entropy of a turn exceeds that of its first turn by
    more than `entropy` (docs/algorithm.md). Not with `schedule.lockstep`. Local trainer only."""

    type: Literal["branching"] = "branching"
    """Name of the method."""
    entropy: float
    """Difference of the entropies in nats per token."""

    not_with_verl: ClassVar[str] = "verl's workers start all rollouts of a group at once; leave it out"

    def wrap_slots(self, slots: Slots, tasks: Sequence[Any], servers: Mapping[str, Any]) -> Slots:
        planned = plan_branches(tasks, self.entropy)

        def wrapped(index: int, task: Any) -> SlotWrapper:
            branch = planned.get(task.traj_id)
            if branch is None:
                return SlotWrapper(slots(index, task))
            is_child = branch.child.traj_id == task.traj_id
            return ChildSlot(slots, index, branch) if is_child else ParentSlot(slots(index, task), branch)

        return wrapped

    def metrics(self, rollouts: Sequence[Trajectory]) -> Mapping[str, float]:
        branched = sum("branch_turn" in t.metrics for t in rollouts)
        return {"branches": branched} if branched else {}

    def check(self, rl: Any) -> None:
        refused = "method.add: branching cannot be combined with"
        if rl.sync.lockstep:
            raise ValueError(f"{refused} schedule.lockstep (a branch starts in the middle of a batch)")
        for entry in rl.environments:
            if entry.environment is not None:
                raise ValueError(f"{refused} environments.{entry.name}.environment, whose state cannot be copied")
        for tool in (*rl.tools, *(tool for entry in rl.environments for tool in entry.tools)):
            if ":" in tool and not NAME.fullmatch(tool):
                raise ValueError(f"{refused} the tool {tool}: the state of a server cannot be copied")

    def check_recipe(self, recipe: Any, rl: Any) -> None:
        if "jupyter" in rl.tools and recipe.sandbox.isolation == "gvisor":
            raise ValueError(
                "method.add: branching: sessions of sandbox.isolation: gvisor cannot be copied; use namespaces, or the tool python"
            )


def entropy_estimate(log_probs: Sequence[float]) -> float:
    """Return the mean entropy of the first tokens of a turn, in nats per token, estimated as their mean -log p.

    log_probs: of the sampled tokens, as the engine returns them. The estimate is unbiased, because E[-log p] is the entropy.
    """
    first = log_probs[:FIRST_TOKENS]
    return -sum(first) / len(first) if first else 0.0


class Branch:
    """The child of one parent: a rollout that may start at one of the parent's turns. child, parent: their tasks."""

    def __init__(self, child: Any, parent: Any, threshold: float):
        self.child, self.parent, self.threshold = child, parent, threshold
        self.turn: int | None = None  # turn of the parent at which the child starts
        self.decided = asyncio.Event()

    def should_start(self, first_turn: Sequence[float], turn: Sequence[float]) -> bool:
        """Return whether the child starts at a turn of the parent. Arguments: log-probs of the first turn and of this one."""
        if self.decided.is_set():
            return False
        return entropy_estimate(turn) - entropy_estimate(first_turn) > self.threshold

    async def start_at(self, turn: WrittenTurn) -> None:
        """Start the child before a turn of its parent. If a tool cannot be copied, it does not start here."""
        if not await turn.context.fork_tools(self.parent.traj_id, self.child.traj_id):
            return
        prefix = turn.before()
        self.turn = len(prefix.turns)
        self.child = replace(self.child, partial=prefix)
        self.decided.set()


class ParentSlot(SlotWrapper):
    """The slot of a parent: starts the child at the first turn that is uncertain enough."""

    def __init__(self, slot: Any, branch: Branch):
        super().__init__(slot)
        self.branch = branch

    async def on_written(self, turn: WrittenTurn) -> None:
        if self.branch.should_start(turn.first_log_probs, turn.log_probs):
            await self.branch.start_at(turn)  # before the tools of this turn run

    def leave(self) -> None:
        super().leave()
        self.branch.decided.set()  # the child starts from the prompt, unless it has started


class ChildSlot(SlotWrapper):
    """The slot of a child, which exists from its start on."""

    def __init__(self, slots: Slots, index: int, branch: Branch):
        super().__init__(None)
        self.slots, self.index, self.branch = slots, index, branch

    async def begin(self, task: Any) -> Any:
        await self.branch.decided.wait()
        self.slot = self.slots(self.index, self.branch.child)
        return self.branch.child

    def finish(self, trajectory: Trajectory) -> Trajectory:
        """Return the rollout with the metrics `branch_parent` (sample of the parent) and `branch_turn` (its first own turn), if it
        started at a turn of the parent."""
        if self.branch.turn is None:
            return trajectory
        origin = {"branch_parent": float(self.branch.parent.sample), "branch_turn": float(self.branch.turn)}
        return replace(trajectory, metrics={**trajectory.metrics, **origin})


def plan_branches(tasks: Sequence[Any], threshold: float) -> dict[str, Branch]:
    """Return a branch for each pair of rollouts, by the traj_id of the parent and by that of the child.

    In a group of n, rollout i is the parent of rollout i + ceil(n / 2).
    """
    planned: dict[str, Branch] = {}
    groups: dict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        groups[task.group_id].append(task)
    for group in groups.values():
        children = group[(len(group) + 1) // 2 :]
        for parent, child in zip(group, children, strict=False):
            planned[parent.traj_id] = planned[child.traj_id] = Branch(child, parent, threshold)
    return planned
