"""Several environments in one run: their settings, and which environment each problem of a step is drawn from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.environments.loading import EnvironmentClass, load_environment
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.reward.hidden_tests import Runner
from rstar_lab.rl.tools.base import Tool


@dataclass(frozen=True)
class RunEnvironment:
    """An entry of `rl.environments` with its environment and tools loaded.

    tools: tools by the name that the model uses. reward: as in RolloutContext. environment: None if the entry has only
    tools and a reward. limits: keys of `rl.limits` that the entry changes. instruction: see `RlSection.instruction`.
    """

    tools: Mapping[str, Tool]
    reward: Callable[[str, str], float]
    environment: EnvironmentClass | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    instruction: str | None = None


class Mixture(list[Problem]):
    """The problems of several environments, drawn in proportion to their weights.

    After n draws, an environment with share w of the weights has been drawn w * n times, rounded up or down.
    """

    def __init__(self, problems: Sequence[Problem], weights: Mapping[str, float]):
        """problems: problems of all environments. weights: weight of each environment, by name; 1 if not given."""
        self.weights = dict(weights)
        self.parts: dict[str, list[Problem]] = {}
        for problem in problems:
            self.parts.setdefault(problem.environment, []).append(problem)
        super().__init__(problem for part in self.parts.values() for problem in part)
        # For each draw so far: its environment, and how many draws that environment had before.
        self._draws: list[tuple[str, int]] = []
        self._drawn = dict.fromkeys(self.parts, 0)

    def draw(self, position: int) -> tuple[str, int]:
        """Return the environment of the draw at `position` (from 0), and how often it was drawn before."""
        shares = {name: self.weights.get(name, 1.0) for name in self.parts}
        total = sum(shares.values())
        while len(self._draws) <= position:
            count = len(self._draws) + 1
            name = max(shares, key=lambda name: shares[name] / total * count - self._drawn[name])
            self._draws.append((name, self._drawn[name]))
            self._drawn[name] += 1
        return self._draws[position]


def restricted(pool: Sequence[Problem], problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return only these problems of a pool. In a mixture, the weights of the environments stay the same."""
    return Mixture(problems, pool.weights) if isinstance(pool, Mixture) else problems


def load_environments(rl: RlSection) -> dict[str, EnvironmentClass]:
    """Return the user's environments of a recipe, by name. Raises UserError."""
    return {
        entry.name: load_environment(entry.name, entry.environment, rl.limits.tool_timeout_s)
        for entry in rl.environments
        if entry.environment is not None
    }


def make_environments(
    rl: RlSection,
    loaded: dict[str, EnvironmentClass],
    make_tools: Callable[[Sequence[str]], dict[str, Tool]],
    run: Runner | None = None,
) -> dict[str, RunEnvironment]:
    """Return the environments of a recipe, by name.

    loaded: see `load_environments`. make_tools: returns tools by their names in a recipe. run: see `make_reward`. Raises
    UserError if the recipe gives an environment a tool with the name of one that the environment has itself.
    """
    environments = {}
    for entry in rl.environments:
        environment, tools = loaded.get(entry.name), make_tools(entry.tools)
        own = environment.tools if environment else {}
        if both := own.keys() & tools.keys():
            raise UserError(
                f"rl.environments.{entry.name}.tools: the environment already has a tool {min(both)}; remove it here"
            )
        name = "verify" if environment else entry.reward or rl.reward
        reward = make_reward(name, rl.answer, rl.reward_timeout_s, run)
        limits = entry.limits.model_dump(exclude_none=True)
        environments[entry.name] = RunEnvironment(own | tools, reward, environment, limits, rl.instruction(name))
    return environments
