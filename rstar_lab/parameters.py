"""Parameters of notebooks. `papermill -p NAME VALUE` passes lists and mappings as text, which becomes what the notebook expects."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rstar_lab.errors import UserError


def read_mapping(value: Mapping[str, Any] | str, name: str) -> dict[str, Any]:
    """Return a parameter that is a mapping.

    Args:
        value: A mapping, or its JSON text, such as '{"rl.lr": 1e-5}'. Empty text is an empty mapping.
        name: Name of the parameter, for the error.

    Raises:
        UserError: The value is neither a mapping nor the JSON text of one.
    """
    content = _parsed(value, name) if isinstance(value, str) else value
    if not isinstance(content, Mapping):
        raise UserError(f"parameter {name}: expected a mapping, as JSON text such as '{{\"key\": 1}}'; got {value!r}")
    return dict(content)


def read_list(value: Iterable[Any] | str | float, name: str, kind: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return a parameter that is a list.

    Args:
        value: A list, its JSON text, or one or more values separated by commas: `tiny-sft`, `0,1,2`.
        name: Name of the parameter, for the error.
        kind: Converts one value, such as int. Default: values stay as they are.

    Raises:
        UserError: The value is no list, or `kind` rejects one of its values.
    """
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = [item.strip() for item in value.split(",") if item.strip()]
    content = _parsed(value, name) if isinstance(value, str) else value
    if isinstance(content, Mapping):
        raise UserError(f"parameter {name}: expected a list, such as '[1, 2]' or 1,2; got {value!r}")
    try:
        return [kind(item) if kind else item for item in (content if isinstance(content, Iterable) else [content])]
    except (TypeError, ValueError) as error:
        raise UserError(f"parameter {name}: {error}") from error


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"parameter {name}: not valid JSON ({error}): {text[:200]!r}") from error
