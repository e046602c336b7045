"""Create the environments of a run from its recipe."""

from collections.abc import Callable, Sequence

from rstar_lab.errors import UserError
from rstar_lab.rl.environments.loading import EnvironmentClass, load_environment
from rstar_lab.rl.environments.mixture import RunEnvironment
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.reward.hidden_tests import Runner
from rstar_lab.rl.tools.base import Tool


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
    UserError if a tool of an entry has the name of a tool of its environment.
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
