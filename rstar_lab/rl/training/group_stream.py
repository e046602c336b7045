"""Groups of rollouts that are generated in the background of the updates, for the modes one_step_off and async.

The trainer takes a batch of complete groups, updates the policy, and reports the new weights; meanwhile the rollouts of
other groups continue. The staleness of a group at an update is the number of updates between the weights that started
the group and the weights that the update starts from.

one_step_off: the next batch is generated, as a whole and with one version of the weights, during the update of this one.
async: a new group starts whenever the limits allow it, and requests in flight continue under new weights.

With `wait`, no group exceeds `max_staleness` and none is dropped. Let B be the number of groups in a batch and u the
number of finished updates. Then at most (u + max_staleness + 1) B groups are started (the rule of AReaL, arXiv
2505.24298, section 5.1). An update waits for old groups if the groups that it would leave could not all be used in
time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams, trained_mask
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.rl import LimitedCorrection, WhenStale
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.step import BufferedGroups, MismatchError
from rstar_lab.rl.trajectory import Trajectory

FAR_UPDATES = 5  # number of consecutive updates above the limit that stops a run


@dataclass(slots=True)
class Group:
    """A group in progress or complete. version: policy version with which it started. done_at: time at which it was complete."""

    tasks: list[RolloutTask]
    version: int
    running: asyncio.Task[list[Trajectory]]
    done_at: float | None = None

    @property
    def complete(self) -> bool:
        return self.running.done()

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.running.result()


@dataclass(slots=True)
class GroupStream:
    """Generates groups in the background and returns them in batches; see the module docstring.

    next_group: returns the rollouts of the next group, or None if there is no further problem. run_group: generates
    them. batch_groups: groups of a batch. buffer_groups: maximum number of groups, in progress or complete, that no
    update has taken. capacity: rollouts that the engines run at the same time; while more are in progress, no group
    starts. last_group: number of groups to start in total, not counting dropped ones. whole_batches: True for
    one_step_off. version: version of the engines' weights. staleness: returns the number of updates since the weights
    of a version.
    """

    next_group: Callable[[], list[RolloutTask] | None]
    run_group: Callable[[list[RolloutTask]], Awaitable[list[Trajectory]]]
    batch_groups: int
    max_staleness: int
    when_stale: WhenStale
    buffer_groups: int
    capacity: int
    last_group: int
    whole_batches: bool
    version: int
    staleness: Callable[[int], int]
    open: list[Group] = field(default_factory=list)  # in the order in which they were started
    started: int = 0  # number of groups, not counting dropped ones
    taken: int = 0  # number of batches
    updates: int = 0  # number of batches whose update has ended and whose weights the engines serve
    error: BaseException | None = None

    def loaded(self, version: int) -> None:
        """Start further groups. Called when the update on the last batch has ended and the engines serve its weights."""
        self.version, self.updates = version, self.taken
        self.fill()

    def may_start(self) -> bool:
        """Return whether another group may start now."""
        if self.started >= self.last_group or len(self.open) >= self.buffer_groups:
            return False
        if self.whole_batches:
            return self.started < (self.taken + 1) * self.batch_groups
        if self.when_stale == "wait" and self.started >= (self.updates + self.max_staleness + 1) * self.batch_groups:
            return False
        return sum(len(group.tasks) for group in self.open if not group.complete) < self.capacity

    def fill(self) -> None:
        """Start groups while the limits allow it."""
        while self.error is None and self.may_start():
            tasks = self.next_group()
            if tasks is None:
                return
            running = asyncio.ensure_future(self.run_group(tasks))
            group = Group(tasks, self.version, running)
            self.open.append(group)
            self.started += 1
            running.add_done_callback(lambda _, group=group: self._on_end(group))  # type: ignore[misc]

    def _on_end(self, group: Group) -> None:
        group.done_at = asyncio.get_running_loop().time()
        if group.running.cancelled():
            return
        if error := group.running.exception():
            self.error = error
        elif not self.whole_batches:
            self.fill()

    async def take(self) -> BufferedGroups:
        """Wait until a batch is complete and return it, oldest groups first. Raises the error of a rollout."""
        dropped: list[Group] = []
        while True:
            if self.error:
                raise self.error
            if self.when_stale == "drop":
                dropped += self._drop()
            complete = [group for group in self.open if group.complete]
            groups = complete[: self.batch_groups]
            if len(groups) == self.batch_groups and self._rest_in_time(groups):
                break
            self.fill()
            waiting = [group.running for group in self.open if not group.complete]
            if not waiting and len(groups) < self.batch_groups:
                break  # no problem is left
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        now = asyncio.get_running_loop().time()
        self.open = [group for group in self.open if group not in groups]
        self.taken += 1
        if not self.whole_batches:
            self.fill()
        return BufferedGroups(
            [group.trajectories for group in groups],
            [group.trajectories for group in dropped],
            [self.staleness(group.version) for group in groups],
            [now - (group.done_at or now) for group in groups],
        )

    async def settle(self) -> None:
        """Wait until no group is in progress."""
        await asyncio.gather(*(group.running for group in self.open), return_exceptions=True)

    def _rest_in_time(self, batch: Sequence[Group]) -> bool:
        """Return whether the groups that an update on `batch` leaves can all be used before they are too old."""
        if self.when_stale != "wait" or self.whole_batches:
            return True
        rest = [self.staleness(group.version) for group in self.open if group not in batch]
        return rest_in_time(rest, self.batch_groups, self.max_staleness)

    def _drop(self) -> list[Group]:
        """Remove the complete groups that are too old, and start others."""
        stale = [group for group in self.open if group.complete and self.staleness(group.version) > self.max_staleness]
        self.open = [group for group in self.open if group not in stale]
        self.started -= len(stale)
        self.fill()
        return stale

    async def aclose(self) -> Sequence[Group]:
        """End the rollouts in progress. Returns their groups."""
        self.error = self.error or asyncio.CancelledError()
        for group in self.open:
            group.running.cancel()
        await asyncio.gather(*(group.running for group in self.open), return_exceptions=True)
        return self.open


def updates_since(version: int, versions: Sequence[int]) -> int:
    """Return the number of updates after the weights of `version`. versions: of all weights; see RolloutSource."""
    return sum(newer > version for newer in versions)


def rest_in_time(rest: Sequence[int], batch_groups: int, max_staleness: int) -> bool:
    """Return whether all groups that an update leaves in the buffer can still be used within `max_staleness`.

    rest: staleness of each such group at this update, in the order of their start. The next `batch_groups` of them are used
    one update later, the following ones two updates later, and so on.
    """
    return all(staleness + 1 + place // batch_groups <= max_staleness for place, staleness in enumerate(rest))


def trim(selection: Selection, is_stale: Callable[[int], bool]) -> tuple[Selection, float | None]:
    """Leave the tokens of stale versions out of the policy loss; rollouts without a remaining token in any term are dropped.

    Returns the selection and the share of the tokens of the policy loss that were left out (None without such tokens). The
    advantages stay those of the whole group. The loss mask still says which tokens the model generated.
    """
    kept: list[Trajectory] = []
    kept_streams: list[Streams] = []
    left_out, outside = dict(selection.left_out), [*selection.outside]
    before = after = 0
    for trajectory, streams in zip(selection.trajectories, selection.streams, strict=True):
        fresh_T = np.array([not is_stale(version) for version in trajectory.token_versions], dtype=np.float32)
        trimmed = streams.plus(Streams(loss_weight_T=fresh_T))
        in_loss, remaining = (int(trained_mask(trajectory, s).sum()) for s in (streams, trimmed))
        before, after = before + in_loss, after + remaining
        if in_loss and not remaining:
            left_out.setdefault(trajectory.traj_id, "masked/stale")
        if remaining or np.any(streams.ce_weight_T):
            kept.append(trajectory)
            kept_streams.append(trimmed)
        else:
            outside.append((trajectory, streams))
    share = 1 - after / before if before else None
    trimmed_selection = replace(selection, trajectories=kept, streams=kept_streams, left_out=left_out, outside=outside)
    return trimmed_selection, share


class CorrectionLimit:
    """Counts consecutive updates whose corrected_share exceeds `rl.correction.max_share`."""

    def __init__(self) -> None:
        self.far_updates = 0

    def check(self, share: float | None, rl: RlSection) -> None:
        """Count an update by its corrected_share (None: a step without one). Raises MismatchError at FAR_UPDATES in a row."""
        if share is None or not isinstance(rl.correction, LimitedCorrection):
            return
        self.far_updates = self.far_updates + 1 if share > rl.correction.max_share else 0
        if self.far_updates == FAR_UPDATES:
            raise MismatchError(
                f"rl.correction: {rl.correction.type} changed more than {rl.correction.max_share:.0%} of the tokens in "
                f"{FAR_UPDATES} updates in a row, last {share:.0%}: the engine samples from another policy than the trainer "
                "trains. Check engine.dtype and the weight sync, or use newer rollouts"
            )
