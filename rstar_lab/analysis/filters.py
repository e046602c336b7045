"""Filters of rollouts, steps and tool calls: the parameter `where` of data frames, figures, links and the inspector.

A filter is SQL text (one expression over the columns) or a mapping, see `Filter`. Both mean the same everywhere.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import pandas as pd
import pyarrow as pa

from rstar_lab.analysis.queries import checked_expression, columns_of, quoted
from rstar_lab.runs import CALLS, TRAJECTORIES, TRANSCRIPTS, RunStoreError
from rstar_lab.runs.tables import ROLLUP


class Filter(TypedDict, total=False):
    """A filter as a mapping. All entries must hold. Any other column of the table is a key too.

    Value of a column: a value, a list of values, or None for missing values. True and False for a column of numbers mean
    greater than zero and zero: `{"errors": True}` selects rollouts with at least one error. A missing value is neither.
    `correct` is missing for rollouts without a reward, and for runs whose reward function is the user's (see `rewarded`).
    """

    rewarded: Any  # reward > 0
    correct: Any
    kept: Any  # missing in evaluations and imports, which select nothing
    steps: Sequence[int]  # first and last step, both included
    problem: str  # text that the problem id contains, in any case
    outcome: Any  # rollouts with a tool call of this outcome, or of one of these; of tool calls: their own outcome
    noted: bool  # whether the rollout has a note or tag
    ranges: Mapping[str, Sequence[float | None]]  # column to (low, high), high excluded; None: no bound
    metrics: Mapping[str, Sequence[float | None]]  # the same for names of the column `metrics`
    any: Sequence[Any]  # filters of which at least one must hold
    sql: str  # SQL expression on the columns


Where = str | Filter | Mapping[str, Any] | None
DERIVED = ("rewarded", "verified", "correct")
_FORMS = {"ranges": "column to (low, high)", "metrics": "name to (low, high)", "any": "filters", "sql": "text"}
_SPECIAL = ("steps", "problem", "outcome", "noted", "ranges", "metrics", "any", "sql")
TABLES: dict[str, tuple[str, ...]] = {
    "trajectories": (*TRAJECTORIES.names, *DERIVED),
    "calls": tuple(CALLS.names),
    "transcripts": tuple(TRANSCRIPTS.names),
    "steps": (*ROLLUP.names, "own_reward"),
}
_OF_ROLLOUTS = frozenset(TABLES["trajectories"])
_NUMBERS = frozenset(
    field.name for field in TRAJECTORIES if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
)


def where_sql(where: Where, table: str = "trajectories", *, noted: Callable[[], Iterable[str]] | None = None) -> str:
    """Return a filter as an SQL condition on a table; "TRUE" if there is none.

    Args:
        where: the filter, see `Filter`.
        table: trajectories, calls, transcripts or steps. For calls and transcripts, keys that are not their columns select
            the rollouts that they belong to.
        noted: function that returns the ids of the trajectories with a note or tag.

    Raises:
        RunStoreError: unknown key, or a value of the wrong form.
        UserError: SQL text that is not exactly one expression.
    """
    known = set(TABLES[table])
    with_rollouts = table in ("calls", "transcripts")
    if where is None or (isinstance(where, str) and not where.strip()):
        return "TRUE"
    if isinstance(where, str):
        condition = checked_expression(where)
        if with_rollouts and not (named := columns_of(where)) <= known and named <= _OF_ROLLOUTS:
            return _of_rollouts(condition)
        return condition
    parts = []
    of_rollouts: dict[str, Any] = {}
    for name, value in as_mapping(where).items():
        key = str(name)
        if with_rollouts and key not in known and key not in ("steps", "any", "sql"):
            of_rollouts[key] = value
        else:
            parts.append(_condition(key, value, table, known, noted))
    if of_rollouts:
        parts.append(_of_rollouts(where_sql(of_rollouts, noted=noted)))
    return " AND ".join(parts) or "TRUE"


def narrowed(where: Where, **keys: Any) -> dict[str, Any]:
    """Return a filter of the rollouts of `where` for which these keys hold too. Filters of figures' points are made of it."""
    return {**keys, "any": [json_filter(chosen)]} if (chosen := as_mapping(where)) else keys


def as_mapping(where: Where) -> Mapping[str, Any]:
    """Return a filter as a mapping; empty if there is none. Raises RunStoreError if it has another type."""
    if isinstance(where, str) or where is None:
        return {"sql": where} if where and where.strip() else {}
    if not isinstance(where, Mapping):
        raise RunStoreError(f"a filter is SQL text or a mapping, not {type(where).__name__}")
    return where


def _of_rollouts(condition: str) -> str:
    return f"traj_id IN (SELECT traj_id FROM trajectories WHERE {condition})"


_STEP_COLUMNS = frozenset({"run_id", "stage", "step"})
_OF_STEPS = _STEP_COLUMNS | {"steps"}


def has_sql(where: Any) -> bool:
    """Return whether a filter contains SQL text. A filter that is read from a file may not."""
    if isinstance(where, Mapping):
        return "sql" in where or any(map(has_sql, where.get("any") or ()))
    return isinstance(where, str)


def selects_steps(where: Where) -> bool:
    """Return whether a filter selects whole steps: it names nothing but their run, stage and number."""
    if isinstance(where, str):
        return columns_of(where) <= _STEP_COLUMNS if where.strip() else True
    keys: Mapping[str, Any] = where or {}
    return all(
        all(map(selects_steps, value)) if key == "any" else selects_steps(value) if key == "sql" else key in _OF_STEPS
        for key, value in keys.items()
    )


def _condition(key: str, value: Any, table: str, known: set[str], noted: Callable[[], Iterable[str]] | None) -> str:
    if table == "steps" and key in _OF_ROLLOUTS | {"problem", "outcome", "noted", "metrics"} and key not in known:
        raise RunStoreError(
            f"filter {key!r} selects rollouts; steps are selected by run_id, stage, step, steps, or SQL on their columns"
        )
    match key:
        case "steps":
            first, last = _pair(key, value)
            return _range("step", first, last, last_included=True)
        case "problem":
            return f"contains(lower(problem_id), {quoted(str(value).lower())})"
        case "outcome" if "outcome" not in known:
            values = _values(value)
            if values is None:
                return f"list_contains(outcomes, {quoted(str(value))})"
            return f"list_has_any(outcomes, [{', '.join(quoted(str(each)) for each in values)}]::VARCHAR[])"
        case "noted":
            if noted is None:
                raise RunStoreError("filter 'noted': these rows are not in a run folder, which holds the notes")
            return f"traj_id {'' if value else 'NOT '}IN ({sql_list(noted())})"
        case "ranges" | "metrics" if isinstance(value, Mapping):
            parts = []
            for name, bounds in value.items():
                column = _column(str(name), known, table) if key == "ranges" else f"metrics[{quoted(str(name))}]"
                parts.append(_range(column, *_pair(name, bounds)))
            return " AND ".join(parts) or "TRUE"
        case "any" if isinstance(value, list | tuple):
            options = [where_sql(each, table, noted=noted) for each in value]
            return "(" + (" OR ".join(f"({option})" for option in options) or "FALSE") + ")"
        case "sql" if isinstance(value, str):
            return where_sql(value, table)
        case "ranges" | "metrics" | "any" | "sql":
            raise RunStoreError(f"filter {key!r}: expected {_FORMS[key]}, not {value!r}")
    return _compare(_column(key, known, table), key, value)


def _column(name: str, known: set[str], table: str) -> str:
    """Return a column for SQL. Raises RunStoreError, with similar names, if the table does not have it."""
    if name not in known:
        close = difflib.get_close_matches(name, [*known, *_SPECIAL], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted({*known, *_SPECIAL}))}"
        raise RunStoreError(f'unknown filter {name!r}: column "{name}" not found in {table}; {hint}')
    return name if name.isidentifier() else '"' + name.replace('"', '""') + '"'


def _compare(column: str, key: str, value: Any) -> str:
    values = _values(value)
    if values is None:
        return _equals(column, key, value)
    present = [each for each in values if not _is_missing(each)]
    if key in _NUMBERS and any(isinstance(each, bool) for each in present):
        options = [_equals(column, key, each) for each in present]
    else:
        options = [f"{column} IN ({sql_list(present)})"] if present else []
    if len(present) < len(values):
        options.append(f"{column} IS NULL")
    return f"({' OR '.join(options)})" if len(options) > 1 else options[0] if options else "FALSE"


def _equals(column: str, key: str, value: Any) -> str:
    if _is_missing(value):
        return f"{column} IS NULL"
    if isinstance(value, Mapping):
        raise RunStoreError(f"filter {key!r}: expected a value or a list of values, not {value!r}")
    if isinstance(value, bool) and key in _NUMBERS:
        return f"{column} > 0" if value else f"{column} = 0"
    return f"{column} = {sql_literal(value)}"


def _range(column: str, low: Any, high: Any, *, last_included: bool = False) -> str:
    parts = [] if low is None else [f"{column} >= {sql_literal(low)}"]
    if high is not None:
        parts.append(f"{column} {'<=' if last_included else '<'} {sql_literal(high)}")
    return " AND ".join(parts) or "TRUE"


def _pair(key: Any, value: Any) -> tuple[Any, Any]:
    values = _values(value) or []
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool) and each == each]
    if len(values) != 2 or len(numbers) + values.count(None) != 2:
        raise RunStoreError(f"filter {key!r}: expected two numbers (low, high), not {value!r}")
    return values[0], values[1]


def _values(value: Any) -> list[Any] | None:
    """Return the items of a list of values as Python values, or None for a single value."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    return [each.item() if hasattr(each, "item") else each for each in value]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def json_filter(where: Mapping[str, Any]) -> dict[str, Any]:
    """Return a filter whose values are JSON values, for the browser: lists instead of arrays, Python numbers."""

    def converted(value: Any) -> Any:
        if isinstance(value, Mapping):
            return json_filter(value)
        values = _values(value)
        if values is not None:
            return [converted(each) for each in values]
        return None if _is_missing(value) else value.item() if hasattr(value, "item") else value

    return {str(key): converted(value) for key, value in where.items()}


def sql_literal(value: Any) -> str:
    """Return `value` as a DuckDB literal."""
    if hasattr(value, "item"):
        value = value.item()
    if _is_missing(value):
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"CAST({quoted(repr(value))} AS DOUBLE)" if math.isinf(value) else f"CAST({value!r} AS DOUBLE)"
    return repr(value) if isinstance(value, int) else quoted(str(value))


def sql_list(values: Iterable[Any]) -> str:
    """Return values as SQL literals for IN (...); without values NULL, a constant for which DuckDB does not read the column."""
    return ", ".join(map(sql_literal, values)) or "NULL"
