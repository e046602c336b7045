"""Convert the inspector's filters to SQL conditions on trajectories."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rstar_lab.errors import UserError

_EXACT = (
    "run_id",
    "stage",
    "step",
    "group_id",
    "problem_id",
    "traj_id",
    "policy_version",
    "stop_reason",
    "engine",
    "environment",
)
_OTHER = (
    "steps",
    "problem",
    "correct",
    "kept",
    "errors",
    "truncated",
    "outcome",
    "noted",
    "ranges",
    "metrics",
    "any",
    "sql",
)


def sql_literal(value: Any) -> str:
    """Return `value` as a DuckDB literal."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"CAST({value!r} AS DOUBLE)"
    if isinstance(value, int):
        return repr(value)
    if hasattr(value, "item"):
        return sql_literal(value.item())
    return "'" + str(value).replace("'", "''") + "'"


def where_clause(filters: Mapping[str, Any], noted: Iterable[str] = ()) -> str:
    """Return the SQL condition for these filters. All of them must hold. Without filters the condition is "TRUE".

    run_id, stage, step, group_id, problem_id, traj_id, policy_version, stop_reason, engine, environment: a value or a list
    of values.
    steps: (first, last), both included.
    problem: text that the problem id contains, in any case.
    correct, kept, errors, truncated: bool. correct means reward > 0.
    outcome: an outcome of a tool call.
    noted: bool, whether the trajectory has a note or tag; `noted` as an argument holds the ids of those that have.
    ranges: column to (low, high), high excluded. metrics: the same for names of the column `metrics`.
    any: a list of filters of which at least one must hold.
    sql: an SQL condition on the columns of trajectories.
    Raises UserError for an unknown key.
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
            return f"contains(lower(problem_id), {sql_literal(str(value).lower())})"
        case "correct":
            return "reward > 0" if value else "NOT coalesce(reward > 0, FALSE)"
        case "kept":
            return "kept" if value else "NOT coalesce(kept, FALSE)"
        case "errors":
            return "errors > 0" if value else "coalesce(errors, 0) = 0"
        case "truncated":
            return "truncated" if value else "NOT coalesce(truncated, FALSE)"
        case "outcome":
            return f"list_contains(outcomes, {sql_literal(str(value))})"
        case "noted":
            return f"traj_id {'' if value else 'NOT '}IN ({sql_list(noted)})"
        case "ranges":
            if bad := [column for column in value if not column.isidentifier()]:
                raise UserError(f"filter ranges: {bad[0]!r} is not a column name")
            return " AND ".join(
                f"{column} >= {sql_literal(low)} AND {column} < {sql_literal(high)}"
                for column, (low, high) in value.items()
            )
        case "metrics":
            return " AND ".join(
                f"metrics[{sql_literal(name)}] >= {sql_literal(low)} AND metrics[{sql_literal(name)}] < {sql_literal(high)}"
                for name, (low, high) in value.items()
            )
        case "any":
            return "(" + " OR ".join(f"({where_clause(each, noted)})" for each in value) + ")"
        case "sql":
            if re.search(r";|--|/\*", re.sub(r"'[^']*'", "", str(value))):
                raise UserError(
                    "filter sql: write one SQL expression over the columns, without `;` and without comments"
                )
            return f"({value})"
        case _ if key in _EXACT:
            if isinstance(value, list | tuple | set):
                return f"{key} IN ({sql_list(value)})"
            return f"{key} = {sql_literal(value)}"
    raise UserError(f"unknown filter {key!r}; choose from {', '.join([*_EXACT, *_OTHER])}")


def sql_list(values: Iterable[Any]) -> str:
    """Return values as SQL literals separated by commas, for IN (...)."""
    return ", ".join(map(sql_literal, values)) or "NULL"
