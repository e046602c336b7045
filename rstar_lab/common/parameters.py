"""Parameters of notebooks. `papermill -p NAME VALUE` passes lists and mappings as text, which becomes what the notebook expects."""

import ast
import difflib
import json
import os
from typing import Annotated, Any, get_origin

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rstar_lab.common.errors import UserError

INJECTED = "# Parameters\n"  # how papermill begins the cell of the given parameters


def check_parameters(notebook: dict[str, Any]) -> None:
    """Convert each parameter of a notebook to its declared type.

    Args:
        notebook: `globals()` of the notebook. Every variable with a type is a parameter: str, bool, int, float, dict, list or
            list[TYPE]. Its value may be text in YAML or JSON, and that of a list one or more values separated by commas. Numbers
            are not negative.

    Raises:
        UserError: A value has another type, or papermill was given a parameter that the notebook does not have.
    """
    declared = notebook.get("__annotations__", {})
    for source in notebook.get("In", ()):
        if source.startswith(INJECTED):
            names = {target.id for line in ast.parse(source).body for target in getattr(line, "targets", ())}
            for name in sorted(names - declared.keys()):
                near = difflib.get_close_matches(name, declared, 1, cutoff=0.75)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(declared)}"
                raise UserError(f"parameter {name}: this notebook does not have it{hint}")
    for name, kind in declared.items():
        if name in notebook:
            notebook[name] = read_parameter(notebook[name], kind, name)


def read_parameter(value: Any, kind: Any, name: str) -> Any:
    """Return a value as its declared type. name: for the error. Raises UserError."""
    container, given = get_origin(kind) or kind, value
    if kind is str:  # a later cell may have made a path of the text
        value = "" if value is None else os.fspath(value) if isinstance(value, os.PathLike) else value
    elif isinstance(value, str):
        is_list = container is list and not value.lstrip().startswith("[")
        value = _parsed(f"[{value}]" if is_list else value.lower() if container is bool else value)
        value = {} if value is None and container is dict else value
    elif container is list and isinstance(value, int | float):
        value = [value]
    if container in (int, float) and isinstance(value, bool):
        value = str(value)  # pydantic would take it for 0 or 1
    number: Any = Annotated[kind, Field(ge=0, allow_inf_nan=False)] if container in (int, float) else kind
    try:
        return TypeAdapter(number, config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
    except ValidationError as error:
        raise UserError(f"parameter {name}: {error.errors()[0]['msg']}; got {str(given)[:200]!r}") from None


def _parsed(text: str) -> Any:
    """Return the value of a text in JSON, else in YAML; the text itself if it is neither."""
    for parse, error in ((json.loads, ValueError), (yaml.safe_load, yaml.YAMLError)):
        try:
            return parse(text)
        except error:
            continue
    return text
