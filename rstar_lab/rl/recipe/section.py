"""Base class, error and number types of all recipe sections."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rstar_lab.errors import UserError
from rstar_lab.key_reads import record_reads
from rstar_lab.rl.plugins import NAME


class RecipeError(UserError):
    """A recipe is invalid. The message names the key."""


@record_reads
class Section(BaseModel):
    """A group of recipe keys. The docstring under each key is its description in docs/recipes.md."""

    # allow_inf_nan: infinity and NaN are valid YAML numbers, but not valid values of any key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


def _check_function(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a function of the form module:function")
    return name


Function = Annotated[str, AfterValidator(_check_function)]  # a user's module:function, see docs/extending.md


REWARDS = ("verify", "released")  # rewards that are not a function of the user


def _check_reward(name: str) -> str:
    if name not in REWARDS and not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not one of {', '.join(REWARDS)} or a module:function")
    return name


Reward = Annotated[str, AfterValidator(_check_reward)]


def is_own(name: str) -> bool:
    """Return whether a value of the recipe names a function of the user instead of a built-in."""
    return ":" in name
