"""Read a recipe from YAML, with `--set` overrides; name the key and the nearest known one in every error."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rstar_lab.profiles import Profile
from rstar_lab.rl.problems import FIELDS
from rstar_lab.rl.recipe import Recipe, RecipeError, RlSection, Stage
from rstar_lab.storage_paths import resolve_recipe_paths

RECIPES = Path(__file__).parent.parent / "recipes"


def load_recipe(
    source: str | Path, overrides: Mapping[str, Any] | None = None, profile: Profile | None = None
) -> Recipe:
    """Read a recipe by path, or by name one that ships; overrides are dotted keys (`rl.lr`, `stages.0.steps`).

    profile: look up relative paths in its storage folders (`storage_paths`).
    Raises RecipeError that names the key.
    """
    path = Path(source)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{source}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise RecipeError(f"recipe {source}: no such file, and none that ships ({known})")
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"recipe {path}: a mapping of keys is expected")
    data.setdefault("name", path.stem)
    for key, value in (overrides or {}).items():
        _set(data, key, value)
    if profile is not None:
        data = resolve_recipe_paths(data, profile)
    return parse_recipe(data, where=str(path))


def parse_recipe(data: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe that has been read. Raises RecipeError that names the key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise RecipeError(f"recipe {where}: " + "; ".join(dict.fromkeys(lines))) from error


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`--set rl.lr=1e-4` and the like; values are YAML."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {pair}: give key=value, as in --set rl.lr=1e-4")
        overrides[key.strip()] = _number(yaml.safe_load(value))
    return overrides


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-4 as text.
    try:
        return float(value) if isinstance(value, str) and any(c.isdigit() for c in value) else value
    except ValueError:
        return value


def _set(data: Any, dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    here = data
    for part in parents:
        if isinstance(here, list):
            here = _item(here, part, dotted)
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, dict | list):
            raise RecipeError(f"--set {dotted}: {part} has no keys")
    if isinstance(here, list):
        here[here.index(_item(here, last, dotted))] = value
    else:
        here[last] = value


def _item(items: list[Any], part: str, dotted: str) -> Any:
    """A stage by its number or its name."""
    for number, item in enumerate(items):
        if part == str(number) or (isinstance(item, dict) and item.get("name") == part):
            return item
    raise RecipeError(f"--set {dotted}: there is no item {part}")


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] != "extra_forbidden":
        return (
            f"{key}: {error['msg'].removeprefix('Value error, ')}"
            if key
            else error["msg"].removeprefix("Value error, ")
        )
    near = difflib.get_close_matches(location[-1], _known_keys(location[:-1]), n=1, cutoff=0.5)
    return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")


def _known_keys(parents: list[str]) -> list[str]:
    model: Any = Recipe
    for part in parents:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        options = [annotation, *get_args(annotation)]
        options += [inner for option in options for inner in get_args(option)]
        model = next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
        if model is None:
            return list(FIELDS)
    keys = list(model.model_fields)
    return keys + list(RlSection.model_fields) if model is Stage else keys
