"""Entries of `rl.environments` in a recipe."""

from pydantic import Field, model_validator

from rstar_lab.rl.algorithm.roc import Penalty
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.section import Function, Positive, Reward, Section


class EnvironmentLimits(Section):
    """Limits of the rollouts of one environment. Default: those of `rl.limits`."""

    max_turns: Positive | None = None
    """Maximum model turns of a rollout. Default: `rl.limits.max_turns`."""
    max_response_tokens: Positive | None = None
    """Maximum tokens of a response. At most `rl.limits.max_response_tokens`, which is the default."""
    max_tool_chars: Positive | None = None
    """Maximum characters of a tool response. Default: `rl.limits.max_tool_chars`."""


class EnvironmentEntry(Section):
    """One of several tasks of a run: an environment, or tools and a reward."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the environment, unique in the recipe. It is used in problem files, metrics and curves."""
    environment: str | None = None
    """`module:name` of your environment class, an Inspect task or an OpenEnv server (docs/environments.md). Default: none;
    the entry is defined by `tools` and `reward`."""
    problems: Problems | None = None
    """Training problems. Default: the problems of the stage that name this environment."""
    tools: tuple[str, ...] = ()
    """Tools in addition to those of `environment`, as in `rl.tools`."""
    reward: Reward | None = None
    """Reward of an entry without `environment`: `verify`, `released`, `tests` or `module:function`. Default: `rl.reward`."""
    weight: float = Field(1.0, gt=0)
    """Share of the groups of a step, relative to the other entries."""
    limits: EnvironmentLimits = EnvironmentLimits()
    """Limits of its rollouts."""
    roc_penalties: tuple[Penalty | Function, ...] | None = None
    """Penalties by which RoC ranks its successful rollouts. Default: `rl.method.roc.penalties`."""

    @model_validator(mode="after")
    def _check_task(self) -> "EnvironmentEntry":
        if self.environment is not None and self.reward is not None:
            raise ValueError("reward: cannot be combined with environment, which computes the reward; remove reward")
        if self.environment is not None and not NAME.fullmatch(self.environment):
            raise ValueError(f"environment: {self.environment!r} is not module:name")
        return self
