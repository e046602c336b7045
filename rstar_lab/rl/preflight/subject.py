"""What a check of preflight is handed, and what it may end with other than a message or a UserError."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rstar_lab.profiles import Profile
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.recipe import Recipe


class NotNeeded(Exception):
    """A check that has nothing to look at on this profile: it passes."""


class Skip(Exception):
    """What a check cannot see from here."""


class Warn(Exception):
    """What is odd, but may be meant."""


@dataclass(frozen=True)
class Subject:
    recipe: Recipe
    profile: Profile
    verl_overrides: Mapping[str, Any]

    @property
    def architecture(self) -> estimate.Architecture:
        found = estimate.architecture_of(self.recipe.model)
        if found is None:
            raise Skip(f"model {self.recipe.model} is not on this machine, and its shape is not a known one")
        return found

    @property
    def on_gpus(self) -> Profile:
        if not self.profile.hardware.gpus:
            raise NotNeeded(f"profile {self.profile.name} has no GPU")
        return self.profile
