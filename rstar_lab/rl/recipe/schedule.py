"""The section `rl.schedule`: how generation and updates follow each other (docs/async.md)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rstar_lab.rl.section import ByType, NotNegative, Positive, Section

Mode = Literal["sync", "one_step_off", "async"]
WhenStale = Literal["wait", "drop", "trim"]


class Sync(Section):
    """Generate the rollouts of a step, then update (paper)."""

    type: Literal["sync"] = "sync"
    """Name of the schedule."""
    lockstep: bool = False
    """Generate turns in fixed batches: the same machine, versions and seed give the same bits. `false`: every rollout proceeds on
    its own."""
    step_time_s: float | None = Field(None, gt=0)
    """Wall-clock limit of a step's rollouts in seconds. Unfinished rollouts are cut off and count as truncated, unless
    `carry_over` is set. Not with `lockstep`. Default: none."""
    carry_over: bool = False
    """Continue rollouts that `step_time_s` cut off in the next step, with their groups (arXiv 2501.12599). Requires
    `step_time_s` and `old_log_probs: engine`."""
    dynamic_sampling: NotNegative = 0
    """Maximum number of extra rounds in which new problems replace groups with equal rewards (arXiv 2503.14476).
    Default: 0, off."""

    @model_validator(mode="after")
    def _check_time(self) -> "Sync":
        if self.step_time_s is not None and self.lockstep:
            raise ValueError(
                "step_time_s cannot be combined with lockstep (a time limit makes lockstep runs irreproducible)"
            )
        if self.carry_over and self.step_time_s is None:
            raise ValueError("carry_over requires step_time_s, the time at which rollouts are cut")
        if self.carry_over and self.dynamic_sampling:
            raise ValueError(
                "carry_over cannot be combined with dynamic_sampling: the rewards of unfinished groups are unknown"
            )
        return self


class OffPolicy(Section):
    """A schedule that trains on rollouts of older weights."""

    allow_uncorrected: bool = False
    """Allow the schedule without a `correction`."""


class OneStepOff(OffPolicy):
    """Generate the next step's rollouts during the update, with the weights before it. Requires a `correction`."""

    type: Literal["one_step_off"] = "one_step_off"
    """Name of the schedule."""


class Async(OffPolicy):
    """Generation never stops; requests in flight continue under new weights (docs/async.md). Requires a `correction`."""

    type: Literal["async"] = "async"
    """Name of the schedule."""
    max_staleness: NotNegative = 1
    """Maximum number of updates between the weights with which a group starts and the weights that are
    trained on it. Default: our choice."""
    when_stale: WhenStale = "wait"
    """How `max_staleness` is enforced. `wait`: the generator delays new groups, and
    the trainer waits for slow groups; nothing is dropped. `drop`: drop groups that exceed the limit. `trim`: mask the
    tokens that exceed it."""
    buffer_groups: Positive | None = None
    """Maximum number of groups, in progress or complete, that no update has used yet. Default:
    `problems_per_step * (max_staleness + 1)`."""

    def groups(self, problems_per_step: int) -> int:
        """Return `buffer_groups`, or its default."""
        return self.buffer_groups or problems_per_step * (self.max_staleness + 1)


AnySchedule = Annotated[Sync | OneStepOff | Async, ByType()]
