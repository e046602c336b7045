"""Read a recipe from YAML and apply `--set` overrides. Errors name the key and suggest a similar valid one."""

import difflib
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rstar_lab.hardware.profiles import Profile, resolve_recipe_paths
from rstar_lab.rl.recipe import Recipe, RecipeError, Stage
from rstar_lab.rl.recipe.explain import explain, release_line
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.section import NEAR, USER_FUNCTION, ByType
from rstar_lab.untrusted.files import DataError, YamlLoader, parse_yaml, read_text
from rstar_lab.untrusted.recipes import ForeignRecipe

RECIPES = Path(__file__).parent.parent / "recipes"
MAX_RECIPE_BYTES = 2**20  # PyYAML takes seconds to parse 1 MiB


class _UniqueKeyLoader(YamlLoader):
    """YAML loader that rejects a mapping with the same key twice; plain YAML silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, Hashable):
                if key in seen:
                    raise ValueError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice; remove one")
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """Read `010` as 10 and `48:00:00` as text; YAML 1.1 reads them as 8 and 172800."""
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        return int(text, 10) if re.fullmatch(r"[-+]?[0-9_]+", text) else super().construct_yaml_int(node)


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)


def load_recipe(
    source: str | Path, overrides: Mapping[str, Any] | None = None, profile: Profile | None = None
) -> Recipe:
    """Load a recipe from a file, or by the name of a shipped one.

    Args:
        source: File, or a name that `rstar-lab recipes` lists.
        overrides: Values by dotted key (`rl.lr`, `stages.0.steps`, `stages.one.steps`).
        profile: Hardware profile; relative paths are looked up in its storage folders (`resolve_recipe_paths`).

    Raises:
        RecipeError: Names the key.
    """
    path = recipe_file(source)
    try:
        data = parse_yaml(read_text(path, MAX_RECIPE_BYTES), path, _UniqueKeyLoader)
    except DataError as error:
        raise RecipeError(f"recipe {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"recipe {path}: the file must be a mapping of keys")
    for key, value in (overrides or {}).items():
        _set(data, key, value)
    data = {key: value for key, value in data.items() if value is not None}  # a section without keys has its defaults
    data.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem).strip("_") or "recipe")
    if profile is not None:
        data = resolve_recipe_paths(data, profile)
    return parse_recipe(data, where=str(source if path.parent == RECIPES else path))


def recipe_file(source: str | Path) -> Path:
    """Return the file of a recipe: the file itself, or that of a shipped recipe by its name. Raises RecipeError."""
    path = Path(source)
    if not path.suffix and not path.exists():
        path = RECIPES / f"{source}.yaml"
    if not path.is_file():
        problem = "is a folder, not a file" if path.is_dir() else "no such file"
        beside = {file.stem: str(file) for file in Path(source).parent.glob("*.yaml")}
        near = difflib.get_close_matches(Path(source).stem, [*beside, *shipped_recipes()], n=1, cutoff=NEAR)
        hint = f"did you mean {beside.get(near[0], near[0])}? " if near else ""
        raise RecipeError(f"recipe {source}: {problem}; {hint}shipped recipes: {', '.join(shipped_recipes())}")
    if path.suffix in (".csv", ".jsonl", ".parquet"):
        raise RecipeError(f"recipe {source}: not a recipe; `rstar-lab init --problems {source}` writes one")
    return path


def shipped_recipes() -> dict[str, str]:
    """Return the names of the shipped recipes, each with the first sentence of its comment."""
    recipes = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        comment = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        recipes[path.stem] = re.split(r"(?<=\.)\s", " ".join(comment))[0]
    return recipes


def parse_recipe(data: dict[str, Any], where: str = "recipe") -> Recipe:
    """Validate the content of a recipe file. Raises RecipeError that names the key."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"recipe {where}: {explain(error, Recipe, Stage)}") from error


def parse_stored_recipe(
    recipe: ForeignRecipe,
    where: str,
    sections: Sequence[str] = (),
    allowed: Collection[str] = (),
    *,
    rollouts: bool = False,
) -> Recipe:
    """Return sections of the recipe of a stored run, which may come from somebody else.

    Args:
        recipe: The recipe of the run.
        where: The run, for errors.
        sections: Default: all.
        allowed: Functions, commands, tools and addresses in it that the user has named, too.
        rollouts: Whether the caller rolls out; False leaves out `rl.reward`, `rl.tools` and `rl.metrics`.

    Raises:
        UserError: The recipe names others, or cannot be read.
    """
    ignored = () if rollouts else ("rl.reward", "rl.tools", "rl.metrics")
    return parse_recipe(recipe.accept(where, allowed, sections=sections, ignored=ignored), f"of {where}")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Return {dotted key: value} of `--set` arguments such as `rl.lr=1e-4`. Values are YAML. Raises RecipeError."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {pair}: give key=value, as in --set rl.lr=1e-4")
        if value[:1] in ("“", "”", "‘", "’"):
            raise RecipeError(f"--set {pair}: the value begins with a typographic quotation mark; type ' or \"")
        try:
            parsed = yaml.load(value, _UniqueKeyLoader)
            parsed = parsed if value.strip()[:1] in ("'", '"') else _number(parsed)
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {pair}: the value is not YAML: {' '.join(str(error).split())}") from None
        if isinstance(parsed, dict) and (
            joined := [name for name in parsed if ":" in str(name) and parsed[name] is None]
        ):
            raise RecipeError(
                f"--set {pair}: {joined[0]}: a value needs a space after the colon, in quotes for the shell"
            )
        overrides[key.strip()] = parsed
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
            raise RecipeError(release_line(dotted) or f"--set {dotted}: {part} is a value and has no keys below it")
    if isinstance(here, list):
        here[here.index(_item(here, last, dotted))] = value
        return
    if parents:
        _drop_keys_of_other_types(here, parents[-1], last, value)
    if dotted == "evaluate.sets" and isinstance(during := here.get("during"), dict):
        during.pop("sets", None)  # it names the sets that are replaced
    here[last] = value


def _drop_keys_of_other_types(section: dict[str, Any], name: str, key: str, value: Any) -> None:
    """If `key` selects the type of the section `rl.NAME`, remove the keys of the section that the new type does not have."""
    field = RlSection.model_fields.get(name)
    for union in [entry for entry in field.metadata if isinstance(entry, ByType)] if field else []:
        if key == union.key and section.get(key) != value:
            members = union.members(field.annotation) if field else {}
            chosen = members.get(str(value), members.get(USER_FUNCTION))
            for other in [other for other in section if chosen and other not in chosen.model_fields]:
                del section[other]


def _item(items: list[Any], part: str, dotted: str) -> Any:
    """Return an item of a list by its index, its name (a stage) or its type (an added method)."""
    names = []
    for index, item in enumerate(items):
        name = item.get("name", item.get("type", index)) if isinstance(item, dict) else index
        if part in (str(index), name):
            return item
        names.append(str(name))
    raise RecipeError(f"--set {dotted}: there is no item {part}; choose from {', '.join(names) or 'none'}")
