"""Values of arguments that a model writes as plain text, read by the JSON schema of the tool."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from rstar_lab.tool_calls.call import Schemas

_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_TEXT_ARGUMENTS = ("code", "input")  # of the code tools: always text, even without a schema
_LONGEST_LITERAL = 100_000


def read_value(text: str, tool: str, key: str, schemas: Schemas) -> Any:
    """Return the value that the text of an argument means.

    A string stays as it is. A value of another type is read as JSON, else as a Python literal (`True`, `None`, `['a']`); if
    it is neither, it stays text, and the check of the arguments reports it. An argument without a schema is read the same
    way, except that those of the code tools are text.
    """
    properties = schemas.get(tool, {}).get("properties") or {}
    if key not in properties:
        return text if key in _TEXT_ARGUMENTS else _literal(text)
    types = _types(properties[key])
    if not types or "string" in types:
        return None if "null" in types and text.strip() in ("null", "None") else text
    value = _literal(text)
    return _WORDS.get(text.strip().capitalize(), value) if isinstance(value, str) and "boolean" in types else value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind or ())
    for name in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(name) or ():
            types |= _types(alternative)
    return types


def _literal(text: str) -> Any:
    stripped = text.strip()
    if stripped in _WORDS:
        return _WORDS[stripped]
    try:
        value = json.loads(stripped, parse_constant=_reject)
        return text if isinstance(value, str) else value
    except (ValueError, RecursionError):
        pass
    if stripped[:1] not in ("[", "{") or len(stripped) > _LONGEST_LITERAL:
        return text
    try:
        value = ast.literal_eval(stripped)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if _is_json(value) else text


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
