"""Parameters of notebooks. `papermill -p NAME VALUE` passes lists and mappings as text, which becomes what the notebook expects."""

import ast
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args, get_origin

from rstar_lab.common.errors import UserError


def check_parameters(notebook: dict[str, Any]) -> None:
    """Convert each parameter of a notebook to its declared type.

    Args:
        notebook: `globals()` of the notebook. Every variable with a type is a parameter: str, bool, int, float, dict, list or
            list[TYPE]. Its value may be the JSON text of the type. Numbers are not negative.

    Raises:
        UserError: A value has another type; the message names the parameter.
    """
    for name, kind in notebook.get("__annotations__", {}).items():
        if name in notebook:
            notebook[name] = _convert(notebook[name], kind, name)


def read_mapping(value: Mapping[str, Any] | str, name: str) -> dict[str, Any]:
    """Return a parameter that is a mapping.

    Args:
        value: A mapping, or its text in JSON or Python, such as '{"rl.lr": 1e-5}'. Empty text is an empty mapping.
        name: Name of the parameter, for the error.

    Raises:
        UserError: The value is neither a mapping nor the text of one.
    """
    content = _parsed(value, name) if isinstance(value, str) else value
    if not isinstance(content, Mapping):
        raise UserError(f"parameter {name}: expected a mapping, as JSON text such as '{{\"key\": 1}}'; got {value!r}")
    return dict(content)


def read_list(value: Iterable[Any] | str | float, name: str, kind: Callable[[Any], Any] | None = None) -> list[Any]:
    """Return a parameter that is a list.

    Args:
        value: A list, its text in JSON or Python, or one or more values separated by commas: `tiny-sft`, `0,1,2`.
        name: Name of the parameter, for the error.
        kind: Converts one value, such as int. Default: values stay as they are.

    Raises:
        UserError: The value is no list, or `kind` rejects one of its values.
    """
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = [item.strip() for item in value.split(",") if item.strip()]
    content = _parsed(value, name) if isinstance(value, str) else value
    if isinstance(content, Mapping) or content is None:
        raise UserError(f"parameter {name}: expected a list, such as '[1, 2]' or 1,2; got {value!r}")
    try:
        return [kind(item) if kind else item for item in (content if isinstance(content, Iterable) else [content])]
    except (TypeError, ValueError) as error:
        raise UserError(f"parameter {name}: {error}") from error


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Return a value as its declared type. Raises UserError."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)  # a later cell made a path of the text
    if (get_origin(kind) or kind) is list:
        (each,) = get_args(kind) or (None,)
        return read_list(value, name, each and (lambda item: _convert(item, each, name)))
    if kind is dict:
        return read_mapping(value, name)
    if kind is str:
        if isinstance(value, Mapping | list):
            raise UserError(f"parameter {name}: expected text; got {value!r}")
        return "" if value is None else str(value)
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value.strip().lower())
        except ValueError:
            value = None
    if kind is bool and value in (True, False):
        return bool(value)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
    if real and (kind is float or (kind is int and value == int(value))):
        return kind(value)
    expected = {bool: "true or false", int: "a whole number, at least 0", float: "a number, at least 0"}[kind]
    raise UserError(f"parameter {name}: expected {expected}; got {given!r}")


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UserError(f"parameter {name}: not valid JSON ({error}): {text[:200]!r}") from error
