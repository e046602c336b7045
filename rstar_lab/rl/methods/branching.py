"""Branching rollouts (after ARPO, arXiv 2507.19849): a rollout is branched after a tool response that makes the model uncertain.

See `rollout.branching` for the rule and docs/algorithm.md for the differences from the paper.
"""

from typing import Any, ClassVar, Literal

from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.plugins import NAME


class Branching(MethodSection):
    """Branching (after ARPO, arXiv 2507.19849): branches a rollout after a tool response if the entropy at the start of the next
    turn exceeds that of its first turn by more than `entropy`. Branches replace up to half of the rollouts of a group. Not with
    `schedule.lockstep`. Local trainer only."""

    type: Literal["branching"] = "branching"
    """Name of the method."""
    entropy: float
    """Difference of the entropies in nats per token."""

    not_with_verl: ClassVar[str] = "verl's workers start all rollouts of a group at once; leave it out"

    @property
    def branch_entropy(self) -> float | None:
        return self.entropy

    def check(self, rl: Any) -> None:
        refused = "method.add: branching cannot be combined with"
        if rl.sync.lockstep:
            raise ValueError(f"{refused} schedule.lockstep (a branch starts in the middle of a batch)")
        if rl.sync.carry_over:
            raise ValueError(f"{refused} schedule.carry_over: set it to false")
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
