"""One entry of `stages` in a recipe."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.section import Function, Positive, Section, merged


class HandOff(Section):
    """Conditions that end a stage before `steps`. They are checked after each step; one is enough."""

    solved_groups: float | None = Field(None, gt=0, le=1)
    """End when the share of groups with only correct rollouts, averaged over `window` steps, is at least this value."""
    truncation_plateau: float | None = Field(None, ge=0)
    """End when the share of truncated rollouts, averaged over `window` steps, differs by at most this value from its average over the
    `window` steps before."""
    window: Positive = 10
    """Number of steps in the averages of `solved_groups` and `truncation_plateau`. Default: our choice."""
    trigger: Function | None = None
    """Your own `module:function`, which receives the metrics of the stage's steps; the stage ends when it returns true
    (docs/extending.md)."""

    @model_validator(mode="after")
    def _check_condition(self) -> "HandOff":
        if self.solved_groups is None and self.truncation_plateau is None and self.trigger is None:
            raise ValueError("give at least one of solved_groups, truncation_plateau and trigger")
        return self


class DifficultyFilter(Section):
    """Difficulty filter before a stage: sample rollouts of the stage's problems from the newest policy and drop the easy
    problems (paper, stage 3), or those that are too hard."""

    samples: Positive = 8
    """Rollouts per problem. Default: paper, stage 3."""
    drop_from: float = Field(1.0, gt=0, le=1)
    """Drop problems with at least this pass rate. Default: paper, stage 3 (8 of 8)."""
    drop_below: float = Field(0.0, ge=0, lt=1)
    """Drop problems with a lower pass rate than this value; any small value drops those that are never solved. Default: 0, none."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "DifficultyFilter":
        if self.drop_below >= self.drop_from:
            raise ValueError("drop_below must be less than drop_from")
        return self


class Stage(Section):
    """One stage of RL. Besides these keys it accepts any key of `rl`, except those that cannot differ between stages.
    A section such as `limits` changes only the keys that it names; if it names another `type`, it replaces the section."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the stage, unique in the recipe."""
    problems: Problems | None = None
    """Training problems. Required unless entries of `rl.environments` have problems."""
    steps: Positive
    """Number of steps; with `hand_off` the maximum."""
    hand_off: HandOff | None = None
    """Conditions that end the stage early. Default: none."""
    filter: DifficultyFilter | None = None
    """Difficulty filter that runs before the stage. Default: none."""
    reset_optimizer: bool = False
    """Reset the moments of AdamW at the start of the stage (paper: stage 3)."""
    rl: dict[str, Any] = Field({})
    """Keys of `rl` that the stage changes. They are normally written beside `steps`."""

    @model_validator(mode="before")
    @classmethod
    def _collect_rl_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("rl", {}), Mapping):
            return data
        keys = {key: value for key, value in data.items() if key in RlSection.model_fields}
        own = {key: value for key, value in data.items() if key not in keys}
        return own | {"rl": merged(data.get("rl", {}), keys)}
