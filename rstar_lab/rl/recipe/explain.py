"""Errors of a recipe in words: the key, what is wrong, and the nearest valid key."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from rstar_lab.rl.problems import FIELDS
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.section import NEAR, ByType, Section

PAGE = "docs/coming-from-rstar.md"
ROOTS = (
    "augmentation", "data", "actor_rollout_ref", "algorithm", "reward_model", "trainer", "critic", "ray_init",
    # Beginnings of keys as docs/coming-from-rstar.md shortens them
    "down_sampling_config", "rollout", "actor", "multi_turn", "val_kwargs", "custom_reward_function",
)  # fmt: skip
# `verl.KEY` sets the keys of these sections that have no counterpart.
VERL_ROOTS = ("data", "actor_rollout_ref", "algorithm", "trainer")
_WORDS = yaml.load(Path(__file__).with_name("words.yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
RELEASE_KEYS: dict[str, str] = _WORDS["release"]
# Words that TRL, the Trainer of Hugging Face, verl and OpenRLHF use for keys of a recipe, and the keys.
SYNONYMS: dict[str, str] = {word: keys for keys, words in _WORDS["synonyms"].items() for word in words}


def synonym_line(key: str) -> str | None:
    """Return the line of an error about a word of another trainer; None if the last part of the key is not such a word.

    key: dotted. The keys of its own section come first: `sft.learning_rate` is `sft.lr`.
    """
    *sections, word = key.lower().replace("-", "_").split(".")
    found = SYNONYMS.get(word)
    if found is None:
        return None
    if found.startswith("- "):
        return f"{key}: unknown key; {found.removeprefix('- ')}"
    keys = found.split(", ")
    near = {"rl": ("rl", "stages"), "stages": ("stages", "rl")}.get(sections[0], sections[:1]) if sections else ()
    own = [ours for ours in keys if ours.split(".")[0] in near]
    chosen = [ours for ours in own or keys if ours != key]
    return f"{key}: unknown key; here it is {' or '.join(chosen)}" if chosen else None


def advice(key: str) -> str | None:
    """Return what to set instead of a key of the release; None if the key is not one."""
    parts = key.lstrip("+~").split(".")
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    return next((RELEASE_KEYS[suffix] for suffix in suffixes if suffix in RELEASE_KEYS), None)


def release_line(key: str) -> str | None:
    """Return the line of an error about a key of the release; None if the key is not one."""
    return f"{key}: a key of microsoft/rStar; {found} ({PAGE})" if (found := advice(key)) else None


def _unknown_release_line(key: str) -> str:
    """Return the line of an error about a key in a section of the release that the release does not set."""
    bare = key.lstrip("+~")
    verl = f"; under verl, set verl.{bare}" if "." in bare and bare.split(".")[0] in VERL_ROOTS else ""
    return f"{key}: a key of microsoft/rStar; it has no counterpart{verl} ({PAGE})"


def leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of the values in a mapping."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key


def explain(error: ValidationError, root: type[Section], stage: type[Section] | None = None) -> str:
    """Return the errors of a section in one line, each with its dotted key.

    root: the section that was validated. stage: the section of a stage, which also accepts the keys of `rl`.
    """
    return "; ".join(dict.fromkeys(_line(item, root, stage) for item in error.errors()))


def _line(item: Any, root: type[Section], stage: type[Section] | None) -> str:
    place = _Place(root, item["loc"])
    key = ".".join((*place.parts, *filter(None, (item.get("ctx", {}).get("key"),))))
    message = item["msg"].removeprefix("Value error, ").split(" or instance of ")[0]
    if item["type"] != "extra_forbidden":
        message += _remedy(item, place)
        return f"{key}: {message}" if key else message
    name = place.parts[-1]
    if owners := [kind for kind, other in place.others.items() if name in other.model_fields]:
        return f"{key}: not a key of {place.kind}; it belongs to {', '.join(owners)}"
    unset = list(leaves(key, item["input"]))
    if place.section is root and name.lstrip("+~") in ROOTS:
        return "; ".join(release_line(leaf) or _unknown_release_line(leaf) for leaf in unset)
    keys = {known: known for known in (place.section.model_fields if place.section else FIELDS)}
    if place.section in (RlSection, stage):
        keys |= _keys_inside(RlSection) | {known: known for known in RlSection.model_fields}
    near = [keys[found] for found in difflib.get_close_matches(name, keys, n=1, cutoff=NEAR)]
    if name not in keys and (line := synonym_line(key)):
        return line
    if (
        name not in root.model_fields
        and (name in RELEASE_KEYS or not near)
        and all(lines := [release_line(leaf) for leaf in unset])
    ):
        return "; ".join(filter(None, lines))
    text = f"{key}: unknown key" + (f" of {place.kind}" if place.kind else "")
    parent = f"{key.removesuffix(name)}" if near and "." in near[0] else ""
    return text + (f"; did you mean {parent}{near[0]}?" if near else "; docs/recipe-keys.md lists all keys")


def _remedy(item: Any, place: "_Place") -> str:
    """Return how to write a value of the wrong kind; empty if the message says enough."""
    value = item["input"]
    if item["type"] == "string_type" and isinstance(value, int | float | date):
        return f'; write it in quotes, as "{value}" (with --set: \'{place.parts[-1]}="{value}"\')'
    if item["type"] in ("model_type", "dict_type") and place.below:
        return f"; give its keys, as in {{{next(iter(place.below.model_fields))}: VALUE}}"
    return ""


def _keys_inside(section: type[Section]) -> dict[str, str]:
    """Return {last part of a key: key} for the sections inside a section, such as clip_low: method.clip_low."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                inside = _keys_inside(kind) | {key: key for key in kind.model_fields}
                found = {key: f"{name}.{place}" for key, place in inside.items()} | found
    return found


class _Place:
    """The place of an error in a recipe.

    parts: the dotted key. section: the section that has or lacks the last part; None: not a section. below: the section that the
    value should be; None: none, or one of several. kind, others: if a key selects the section, that key with its value and the
    other sections by the value.
    """

    def __init__(self, root: type[Section], location: Sequence[str | int]):
        self.parts: list[str] = []
        self.kind, self.others = "", dict[str, type[Section]]()
        self.section: type[Section] | None = root
        self.below: Any = root
        # Without the parts that say which of several types of a value was tried.
        rest = [part for part in map(str, location) if not part.startswith(("literal[", "function-after["))]
        while rest:
            self.section, name = self.below, rest.pop(0)
            self.parts.append(name)
            field = self.section.model_fields.get(name) if self.section else None
            self.below, by_type = section_in(field.annotation, field.metadata) if field else (None, None)
            if rest and field and get_origin(field.annotation) in (tuple, dict):
                self.parts.append(rest.pop(0))  # an index or a key of a mapping
            if rest:
                self.kind, self.others = "", {}
            if by_type is not None and not rest:
                self.below = None
            elif by_type is not None:
                members, tag = by_type.members(self.below), rest.pop(0)
                self.below, self.kind = members[tag], f"{by_type.key}: {tag}"
                self.others = {name: other for name, other in members.items() if other is not self.below}


def section_in(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, ByType | None]:
    """Return the section of a value, of the items of a list or of the values of a mapping, or a union of sections and its ByType.

    Returns None if there is no section.
    """
    if get_origin(annotation) in (tuple, dict):
        annotation = get_args(annotation)[0 if get_origin(annotation) is tuple else 1]
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    if by_type := next((item for item in metadata if isinstance(item, ByType)), None):
        return annotation, by_type
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None), None
