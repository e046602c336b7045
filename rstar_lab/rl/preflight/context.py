"""The input of every preflight check, and the results other than a message or a UserError."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.models.sources import get_model, is_named
from rstar_lab.rl.preflight.architecture import Architecture, architecture_of
from rstar_lab.rl.recipe import Recipe


class NotNeeded(Exception):
    """The check does not apply to this recipe or profile; it passes."""


class Skip(Exception):
    """The check needs something that cannot be reached from this machine."""


class Warn(Exception):
    """Unusual, but possibly intended."""


@dataclass(frozen=True)
class CheckContext:
    """The inputs of a check. verl_overrides: keys of verl's own configuration. model_name: the recipe's model before paths are
    resolved against the profile's storage."""

    recipe: Recipe
    profile: Profile
    verl_overrides: Mapping[str, Any]
    model_name: str = ""

    @property
    def model_dir(self) -> Path:
        """The folder of the model, which may not exist. For a model on the Hub: of its configuration and tokenizer. Raises
        UserError if a model by name cannot be found."""
        model = self.recipe.model
        return get_model(model, weights=False) if is_named(model) else Path(model)

    @property
    def architecture(self) -> Architecture:
        """The shape of the model. Raises UserError if config.json cannot be read, Skip if there is none."""
        shape = architecture_of(self.recipe.model)
        if shape is None:
            raise Skip(f"the shape of model {self.recipe.model} is unknown: the check `model` says why")
        return shape

    @property
    def gpu_profile(self) -> Profile:
        """The profile. Raises NotNeeded if it has no GPU."""
        if not self.profile.hardware.gpus:
            raise NotNeeded(f"profile {self.profile.name} has no GPU")
        return self.profile
