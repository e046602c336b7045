"""The inspector's filters as SQL conditions on trajectories."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rstar_lab.errors import UserError

_EXACT = ("run_id", "stage", "step", "group_id", "problem_id", "traj_id", "policy_version", "stop_reason", "engine")
_OTHER = ("steps", "problem", "correct", "kept", "errors", "truncated", "outcome", "noted", "ranges", "any", "sql")


def literal(value: Any) -> str:
    """`value` as a DuckDB literal."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"CAST({value!r} AS DOUBLE)"
    if isinstance(value, int):
        return repr(value)
    if hasattr(value, "item"):
        return literal(value.item())
    return "'" + str(value).replace("'", "''") + "'"


def where_clause(filters: Mapping[str, Any], noted: Iterable[str] = ()) -> str:
    """SQL condition on the trajectories that `filters` lets through; "TRUE" for all of them.

    Keys: run_id, stage, step, group_id, problem_id, traj_id, ... (a value, or a list of values); steps (first, last);
    problem (part of a problem id); correct, kept, errors, truncated (bool); outcome (one of the taxonomy);
    noted (bool: has a note or a tag); ranges (column to [low, high), high excluded); any (list of such filters, one of
    which must hold); sql (a condition).
    Raises UserError naming an unknown key.
    """
    parts = []
    for key, value in filters.items():
        if value is None or value == "" or value == []:
            continue
        parts.append(_condition(key, value, noted))
    return " AND ".join(parts) or "TRUE"


def _condition(key: str, value: Any, noted: Iterable[str]) -> str:
    match key:
        case "steps":
            return f"step BETWEEN {int(value[0])} AND {int(value[1])}"
        case "problem":
            return f"contains(lower(problem_id), {literal(str(value).lower())})"
        case "correct":
            return "reward > 0" if value else "NOT coalesce(reward > 0, FALSE)"
        case "kept":
            return "kept" if value else "NOT coalesce(kept, FALSE)"
        case "errors":
            return "errors > 0" if value else "coalesce(errors, 0) = 0"
        case "truncated":
            return "truncated" if value else "NOT coalesce(truncated, FALSE)"
        case "outcome":
            return f"list_contains(outcomes, {literal(str(value))})"
        case "noted":
            return f"traj_id {'' if value else 'NOT '}IN ({listed(noted)})"
        case "ranges":
            if bad := [column for column in value if not column.isidentifier()]:
                raise UserError(f"no column is called {bad[0]!r}")
            return " AND ".join(
                f"{column} >= {literal(low)} AND {column} < {literal(high)}" for column, (low, high) in value.items()
            )
        case "any":
            return "(" + " OR ".join(f"({where_clause(one, noted)})" for one in value) + ")"
        case "sql":
            if re.search(r";|--|/\*", re.sub(r"'[^']*'", "", str(value))):
                raise UserError("a condition is one expression over the columns, without `;` or comments")
            return f"({value})"
        case _ if key in _EXACT:
            if isinstance(value, list | tuple | set):
                return f"{key} IN ({listed(value)})"
            return f"{key} = {literal(value)}"
    raise UserError(f"unknown filter {key!r}; known are {', '.join([*_EXACT, *_OTHER])}")


def listed(values: Iterable[Any]) -> str:
    """Values as the inside of an IN (...)."""
    return ", ".join(map(literal, values)) or "NULL"
