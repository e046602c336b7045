"""Errors of a recipe in words: the key, what is wrong, and the nearest valid key."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from rstar_lab.old_recipes import EXAMPLES, RENAMED, RENAMED_ENGINE
from rstar_lab.rl.problems import FIELDS
from rstar_lab.rl.recipe.release_keys import RELEASE_KEYS, ROOTS, advice, leaves
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.recipe.services import EngineSection
from rstar_lab.rl.section import ByType, Section


def explain(error: ValidationError, root: type[Section], stage: type[Section] | None = None) -> str:
    """Return the errors of a section in one line, each with its dotted key.

    root: the section that was validated. stage: the section of a stage, which also accepts the keys of `rl`.
    """
    return "; ".join(dict.fromkeys(_line(item, root, stage) for item in error.errors()))


def _line(item: Any, root: type[Section], stage: type[Section] | None) -> str:
    place = _Place(root, item["loc"])
    key = ".".join((*place.parts, *filter(None, (item.get("ctx", {}).get("key"),))))
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] != "extra_forbidden":
        return f"{key}: {message}" if key else message
    name = place.parts[-1]
    if place.section in (RlSection, stage) and name in RENAMED:
        inside = "rl." if place.section is RlSection and root is not RlSection else ""
        example = f" ({EXAMPLES[name]})" if name in EXAMPLES else ""
        return f"{key}: this key is now {inside}{RENAMED[name]}{example}"
    if place.section is EngineSection and name in RENAMED_ENGINE:
        return f"{key}: this key is now engine.{RENAMED_ENGINE[name]}"
    if owners := [kind for kind, other in place.others.items() if name in other.model_fields]:
        return f"{key}: not a key of {place.kind}; it belongs to {', '.join(owners)}"
    if place.section is root and name.lstrip("+") in ROOTS:
        return "; ".join(
            f"{leaf}: a key of microsoft/rStar; {advice(leaf) or 'it has no counterpart'} (docs/coming-from-rstar.md)"
            for leaf in leaves(key, item["input"])
        )
    if name not in root.model_fields and (instead := advice(name)) and name in RELEASE_KEYS:
        return f"{key}: a key of microsoft/rStar; {instead} (docs/coming-from-rstar.md)"
    keys = {known: known for known in (place.section.model_fields if place.section else FIELDS)}
    if place.section in (RlSection, stage):
        keys |= RENAMED | {known: known for known in RlSection.model_fields}
    near = [keys[found] for found in difflib.get_close_matches(name, keys, n=1, cutoff=0.5)]
    text = f"{key}: unknown key" + (f" of {place.kind}" if place.kind else "")
    return text + (f"; did you mean {near[0]}?" if near else "")


class _Place:
    """The place of an error in a recipe.

    parts: the dotted key. section: the section that has or lacks the last part; None: not a section. kind, others: if a key
    selects the section, that key with its value and the other sections by the value.
    """

    def __init__(self, root: type[Section], location: Sequence[str | int]):
        self.parts: list[str] = []
        self.section: type[Section] | None = root
        self.kind, self.others = "", dict[str, type[Section]]()
        annotation: Any = root
        for part in location:
            annotation, by_type = _bare(annotation)
            if by_type is not None:
                members = by_type.members(annotation)
                annotation = members[str(part)]
                self.kind = f"{by_type.key}: {part}"
                self.others = {name: other for name, other in members.items() if other is not annotation}
                self.section = annotation
                continue
            if str(part).startswith(("literal[", "function-after[")):  # one of several types of a value
                continue
            self.parts.append(str(part))
            if isinstance(annotation, type) and issubclass(annotation, Section):
                if annotation is not self.section:
                    self.kind, self.others = "", {}
                self.section = annotation
                field = annotation.model_fields.get(str(part))
                annotation = Annotated[field.annotation, *field.metadata] if field and field.metadata else field
                annotation = field.annotation if field and not field.metadata else annotation
            elif get_origin(annotation) in (tuple, dict):
                annotation = get_args(annotation)[0 if get_origin(annotation) is tuple else 1]
            else:
                annotation, self.section = None, None


def _bare(annotation: Any) -> tuple[Any, ByType | None]:
    """Return an annotation without its metadata and without None, and the ByType of a union."""
    by_type = None
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        by_type = next((item for item in metadata if isinstance(item, ByType)), None)
    if by_type is None:
        sections = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Section)]
        if sections and get_origin(annotation) not in (tuple, dict):
            annotation = sections[0]
    return annotation, by_type
