"""Typed unions of recipe sections."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from rstar_lab.rl.methods import AnyMethod, Grpo, Maxrl, UserMethod
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.section import ByType, Section


class Recipe(Section):
    method: AnyMethod = Grpo()


class Circle(Section):
    shape: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(Section):
    shape: Literal["square"] = "square"
    side: float = 1.0


class Drawing(Section):
    shapes: tuple[Annotated[Circle | Square, ByType("shape", required=True)], ...] = ()


def method(**keys: Any) -> Any:
    return Recipe(method=keys).method  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Grpo()),
        ({"clip_low": 0.1}, Grpo(clip_low=0.1)),
        ({"type": "maxrl", "loss": "gspo"}, Maxrl(loss="gspo")),
        ({"type": "mine:advantage"}, UserMethod(type="mine:advantage")),
        ({"add": [{"type": "echo", "weight": 0.1}]}, Grpo(add=(Echo(weight=0.1),))),
    ],
)
def test_the_type_selects_the_section_and_survives_a_dump(keys: dict[str, Any], expected: Section) -> None:
    recipe = Recipe(method=keys)  # type: ignore[arg-type]
    assert recipe.method == expected
    assert type(recipe.method) is type(expected)
    assert Recipe(**recipe.model_dump()) == recipe == Recipe.model_validate_json(recipe.model_dump_json())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"type": "grop"},
            "'grop' is not one of grpo, maxrl, otb, reinforce_pp or a module:function; did you mean grpo?",
        ),
        ({"type": 3}, "3 is not one of grpo, maxrl, otb, reinforce_pp or a module:function"),
        ({"add": [{"weight": 0.1}]}, "required: one of overlong_buffer, repetition"),
        ({"add": ["echo"]}, "give a mapping such as {type: echo}"),
        ({"add": [{"type": "void_turns"}] * 2}, "void_turns is given twice"),
        ({"add": [{"type": "opd", "weight": 1}, {"type": "sdpo", "weight": 1}]}, "opd and sdpo cannot be combined"),
    ],
)
def test_a_wrong_type_is_explained(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        method(**keys)
    assert message in error.value.errors()[0]["msg"]


def test_another_key_than_type_can_select() -> None:
    assert Drawing(shapes=[{"shape": "square", "side": 2}]).shapes == (Square(side=2),)  # type: ignore[arg-type]
