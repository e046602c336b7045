"""The keys of a recipe with type, default and meaning: for assistants, and for the tables of docs/recipe-keys.md."""

import re
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rstar_lab.rl.recipe.explain import section_in
from rstar_lab.rl.recipe.recipe import Recipe
from rstar_lab.rl.section import ByType, Section


def find_keys(text: str) -> list[dict[str, str]]:
    """Return the keys whose name or description contains a text (in any case): key, of, type, default, meaning.

    of: the values of the section's `type` (or `format`) for which the key exists, else empty.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for path, (annotation, by_type) in sections_of(Recipe).items():
        members = {"": annotation} if by_type is None else by_type.members(annotation)
        for of, section in members.items():
            for name, field in section.model_fields.items():
                kind, default = (part.replace("`", "") for part in (type_text(field.annotation), default_text(field)))
                row = (f"{path}.{name}".lstrip("."), kind, default, plain(field.description or ""))
                if text.lower() in f"{row[0]} {of} {row[-1]}".lower():
                    found.setdefault(row, []).append(of)
    return [
        {"key": key, "of": ", ".join(filter(None, of)), "type": kind, "default": default, "meaning": meaning}
        for (key, kind, default, meaning), of in found.items()
    ]


def sections_of(root: type[Section]) -> dict[str, tuple[Any, ByType | None]]:
    """Return the section, or the union of sections and its ByType, by dotted path, for a recipe and all that is in it. A section
    that occurs twice is listed once."""
    found: dict[str, tuple[Any, ByType | None]] = {"": (root, None)}
    seen: set[Any] = {root}

    def walk(section: type[Section], path: str) -> None:
        for name, field in section.model_fields.items():
            entry, by_type = section_in(field.annotation, field.metadata)
            if entry is None or entry in seen:
                continue
            seen.add(entry)
            below = f"{path}.{name}".lstrip(".") + ("[]" if get_origin(field.annotation) is tuple else "")
            found[below] = (entry, by_type)
            for model in dict.fromkeys(by_type.members(entry).values()) if by_type else [entry]:
                walk(model, below)

    walk(root, "")
    return found


def type_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"mapping to {type_text(arguments[1])}"
    if arguments and all(isinstance(kind, type) and issubclass(kind, Section) for kind in arguments):
        return "section"
    if arguments:
        return " or ".join(type_text(argument) for argument in arguments if argument is not NoneType)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {"int": "integer", "float": "number", "str": "text", "bool": "boolean", "Path": "path"}.get(
        getattr(annotation, "__name__", ""), "any value"
    )


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return "–"
    if isinstance(value, Section):
        name = getattr(value, "type", None) or getattr(value, "format", None)
        return f"`{name}`" if name else "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
    return f"`{text}`"


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
