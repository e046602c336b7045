"""Base class, error, number types and typed unions of all recipe sections."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from rstar_lab.common.errors import UserError
from rstar_lab.rl.plugins import NAME


class RecipeError(UserError):
    """A recipe is invalid. The message names the key."""


class Section(BaseModel):
    """A group of recipe keys. The docstring under each key is its description in docs/recipe-keys.md."""

    # allow_inf_nan: infinity and NaN are valid YAML numbers, but not valid values of any key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


NEAR = 0.75  # similarity of a name that is suggested: a wrong suggestion is worse than none
USER_FUNCTION = "own"  # tag of the member of a union that a `module:function` of the user selects

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


REWARDS = ("verify", "released")  # built-in rewards that compare with the answer
TESTS = "tests"  # the reward of programs, see reward.hidden_tests


def _named(*built_in: str) -> AfterValidator:
    """Return a check that a value is one of these names, or a `module:function` of the user."""
    one_of = (
        f"one of {', '.join(built_in)} or a module:function" if built_in else "a function of the form module:function"
    )

    def check(name: str) -> str:
        if name not in built_in and not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not {one_of}")
        return name

    return AfterValidator(check)


Function = Annotated[str, _named()]  # a user's module:function, see docs/extending.md
Reward = Annotated[str, _named(*REWARDS, TESTS)]


def is_user_function(name: str) -> bool:
    """Return whether a value of the recipe names a function of the user instead of a built-in."""
    return ":" in name


@dataclass(frozen=True)
class ByType:
    """Annotation of a union of sections: the value of one key selects the section, so that a key of another type is an error.

    The key of a built-in section is a Literal; a section whose key is a `Function` accepts every `module:function`. The
    default of the key in the first section is used if the key is not given, unless the key is required.
    """

    key: str = "type"
    required: bool = False

    def members(self, union: Any) -> dict[str, type[Section]]:
        """Return the sections of a union by the value of the key; the one for a user's `module:function` is called USER_FUNCTION."""
        found: dict[str, type[Section]] = {}
        for section in get_args(union) or (union,):
            annotation = section.model_fields[self.key].annotation
            names = get_args(annotation) if get_origin(annotation) is Literal else (USER_FUNCTION,)
            found |= dict.fromkeys(names, section)
        return found

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        members = self.members(union)
        default = None if self.required else next(iter(members.values())).model_fields[self.key].get_default()

        def tag(value: Any) -> str:
            name = getattr(value, self.key) if isinstance(value, Section) else value.get(self.key, default)
            return name if name in members else USER_FUNCTION

        def check(value: Any) -> Any:
            if isinstance(value, Section):
                return value
            names = [name for name in members if name != USER_FUNCTION]
            if not isinstance(value, Mapping):
                example = f"{{{self.key}: {value if value in names else names[0]}}}"
                raise PydanticCustomError("by_type", "give a mapping such as {example}", {"example": example})
            name = value.get(self.key, default)
            if isinstance(name, str) and (name in members or (USER_FUNCTION in members and NAME.fullmatch(name))):
                return value
            choice = ", ".join(names) + (" or a module:function" if USER_FUNCTION in members else "")
            text = f"{name!r} is not one of {choice}" if self.key in value else f"required: one of {choice}"
            if near := difflib.get_close_matches(str(name), names, n=1, cutoff=NEAR):
                text += f"; did you mean {near[0]}?"
            raise PydanticCustomError("by_type", "{text}", {"text": text, "key": self.key})

        choices = {name: handler.generate_schema(section) for name, section in members.items()}
        return core_schema.no_info_before_validator_function(check, core_schema.tagged_union_schema(choices, tag))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with changed keys. Mappings are merged key by key, unless the change names another type of section."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            replaces = any(name in value and value[name] != old.get(name) for name in ("type", "format"))
            result[key] = value if replaces else merged(old, value)
        else:
            result[key] = value
    return result
