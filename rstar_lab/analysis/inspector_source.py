"""The rows behind an inspector: filters to SQL, pages, siblings and search over a run store or over frames."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pandas as pd

from rstar_lab.analysis.inspector_transcript import visible
from rstar_lab.errors import UserError
from rstar_lab.outcomes import MODEL_ERRORS, Outcome

# Newest first, the rollouts of a group together; traj_id makes the order total, so that pages never overlap.
DEFAULT_ORDER = (("step", True), ("run_id", False), ("group_id", False), ("sample", False), ("traj_id", False))
SEARCH_LIMIT = 500
_SNIPPET = 48
_EXACT = ("run_id", "stage", "step", "group_id", "problem_id", "traj_id", "policy_version", "stop_reason", "engine")
_OTHER = ("steps", "problem", "correct", "kept", "errors", "truncated", "outcome", "noted", "ranges", "any", "sql")


class Store(Protocol):
    """What an inspector asks of `open_runs(...)`: SQL over trajectories and transcripts, and one transcript's record."""

    def sql(self, query: str) -> pd.DataFrame: ...

    def record(self, traj_id: str) -> dict[str, Any]: ...


class Frames:
    """A store made of data frames (columns of TRAJECTORIES and TRANSCRIPTS), for rows that lie in no run folder."""

    def __init__(self, trajectories: pd.DataFrame, transcripts: pd.DataFrame | None = None) -> None:
        self._connection = duckdb.connect()
        self._connection.register("trajectories", trajectories)
        self._transcripts = transcripts
        if transcripts is not None:
            self._connection.register("transcripts", transcripts)

    def sql(self, query: str) -> pd.DataFrame:
        return self._connection.execute(query).df()

    def record(self, traj_id: str) -> dict[str, Any]:
        if self._transcripts is None:
            raise UserError("these rows came without transcripts: give Frames(trajectories, transcripts)")
        found = self._transcripts[self._transcripts["traj_id"] == traj_id]
        if found.empty:
            raise UserError(f"no transcript of {traj_id}: only some rollouts may keep theirs")
        return {str(key): value for key, value in found.iloc[0].to_dict().items()}


def literal(value: Any) -> str:
    """`value` as a DuckDB literal."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | float):
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
            return f"traj_id {'' if value else 'NOT '}IN ({_list(noted)})"
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
                return f"{key} IN ({_list(value)})"
            return f"{key} = {literal(value)}"
    raise UserError(f"unknown filter {key!r}; known are {', '.join([*_EXACT, *_OTHER])}")


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(literal, values)) or "NULL"


class Source:
    """Answers the browser's questions about the rows of a store; every answer is plain JSON data."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.columns = {str(row[0]): str(row[1]) for row in self._rows("DESCRIBE trajectories", raw=True)}
        needed = {"traj_id", "run_id", "step", "group_id", "problem_id", "sample", "reward"}
        if missing := needed - self.columns.keys():
            raise UserError(
                f"these rows have no column {sorted(missing)[0]!r}: the inspector needs {', '.join(sorted(needed))}"
            )
        self._totals: dict[str, int] = {}

    def _sql(self, query: str) -> pd.DataFrame:
        try:
            return self.store.sql(query)
        except duckdb.Error as error:
            raise UserError(str(error).split("\n")[0].strip()) from error

    def _rows(self, query: str, *, raw: bool = False) -> list[Any]:
        frame = self._sql(query)
        values = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
        if raw:
            return list(values)
        return [dict(zip(map(str, frame.columns), map(_plain, row), strict=True)) for row in values]

    def refresh(self) -> None:
        """Forget counts: a run that is being written has grown."""
        self._totals.clear()

    def count(self, where: str) -> int:
        if where not in self._totals:
            self._totals[where] = int(self._rows(f"SELECT count(*) FROM trajectories WHERE {where}", raw=True)[0][0])
        return self._totals[where]

    def page(self, where: str, sort: Sequence[Any] = (), offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Rows offset .. offset + limit of the list: all small columns.

        sort: (column, descending), or empty for the newest first.
        """
        total = self.count(where)
        limit = max(0, min(limit, total - offset))
        flip = offset > total // 2  # the far half is the near half of the opposite order
        if flip:
            offset = total - offset - limit
        rows = self._rows(
            f"SELECT * FROM trajectories WHERE {where} ORDER BY {self._order(sort, flip)} LIMIT {limit} OFFSET {offset}"
        )
        return rows[::-1] if flip else rows

    def _order(self, sort: Sequence[Any], flip: bool = False) -> str:
        """ORDER BY of a list: nulls last, ties by traj_id; flip: all of it the other way round."""
        keys = [*DEFAULT_ORDER]
        if sort:
            column, down = str(sort[0]), bool(sort[1])
            if column not in self.columns:
                raise UserError(f"cannot sort by {column!r}: no such column")
            keys = [(f"len({column})" if self.columns[column].endswith("[]") else column, down), ("traj_id", False)]
        nulls = "FIRST" if flip else "LAST"
        return ", ".join(f"{key} {'DESC' if down != flip else 'ASC'} NULLS {nulls}" for key, down in keys)

    def choices(self) -> dict[str, Any]:
        """What the filter bar offers: runs, stages, first and last step, outcomes."""
        ends = self._rows("SELECT min(step), max(step), count(*) FROM trajectories", raw=True)[0]
        choices: dict[str, Any] = {"first": _plain(ends[0]), "last": _plain(ends[1]), "total": int(ends[2])}
        for name in ("run_id", "stage"):
            known = (
                self._rows(f"SELECT DISTINCT {name} FROM trajectories ORDER BY 1", raw=True)
                if name in self.columns
                else []
            )
            choices[name] = [str(value[0]) for value in known if value[0] is not None]
        choices["outcomes"] = [str(outcome) for outcome in Outcome]
        choices["model_errors"] = sorted(map(str, MODEL_ERRORS))
        return choices

    def row(self, traj_id: str) -> dict[str, Any]:
        found = self._rows(f"SELECT * FROM trajectories WHERE traj_id = {literal(traj_id)} LIMIT 1")
        if not found:
            raise UserError(f"no trajectory {visible(traj_id)!r} in these runs")
        return found[0]

    def siblings(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rollouts of the same problem in the same step of the same run, by sample."""
        keys = " AND ".join(f"{key} = {literal(row[key])}" for key in ("run_id", "step", "group_id"))
        return self._rows(f"SELECT * FROM trajectories WHERE {keys} ORDER BY sample, traj_id LIMIT 512")

    def place(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Index of a trajectory in the list as filtered and sorted; None where the filter hides it."""
        if not self._rows(
            f"SELECT 1 FROM trajectories WHERE traj_id = {literal(traj_id)} AND {where} LIMIT 1", raw=True
        ):
            return None
        found = self._rows(
            f"SELECT i FROM (SELECT traj_id, row_number() OVER (ORDER BY {self._order(sort)}) - 1 AS i FROM trajectories "
            f"WHERE {where}) WHERE traj_id = {literal(traj_id)}",
            raw=True,
        )
        return int(found[0][0]) if found else None

    def search(self, text: str, where: str) -> dict[str, str]:
        """Trajectories of the filtered list whose messages contain `text` (case counts as typed in lower case: not at
        all; otherwise exactly), newest first, at most SEARCH_LIMIT, each with the words around the first hit."""
        # As the text stands inside the JSON of the messages, and inside the JSON of a call inside that.
        once = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        needles = dict.fromkeys([*once, *(json.dumps(one, ensure_ascii=False)[1:-1] for one in once)])
        column = "messages" if text != text.lower() else "lower(messages)"
        places = ", ".join(f"nullif(strpos({column}, {literal(needle)}), 0)" for needle in needles)
        around = f"substr(messages, greatest(1, coalesce({places}) - {_SNIPPET}), {2 * _SNIPPET + len(text)})"
        hit = " OR ".join(f"contains({column}, {literal(needle)})" for needle in needles)
        scope = (
            "TRUE"
            if where == "TRUE"
            else f"traj_id IN (SELECT traj_id FROM trajectories WHERE {where}) AND {self._step_range(where)}"
        )
        found = self._rows(
            f"SELECT traj_id, {around} FROM transcripts WHERE {scope} AND ({hit}) "
            f"ORDER BY step DESC, traj_id LIMIT {SEARCH_LIMIT}",
            raw=True,
        )
        return {str(traj_id): visible(_unescape(snippet)) for traj_id, snippet in found}

    def _step_range(self, where: str) -> str:
        """The steps and runs of the filter as plain comparisons, by which whole files are left unread."""
        first, last, runs = self._rows(
            f"SELECT min(step), max(step), list(DISTINCT run_id) FROM trajectories WHERE {where}", raw=True
        )[0]
        if first is None or first != first:
            return "FALSE"
        return f"step BETWEEN {int(first)} AND {int(last)} AND run_id IN ({_list(runs)})"

    def record(self, traj_id: str) -> dict[str, Any]:
        """One transcript: columns of TRANSCRIPTS, and token_texts where the run kept its vocabulary."""
        return self.store.record(traj_id)

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that have rows."""
        return [str(row[0]) for row in self._rows("SELECT DISTINCT run_id FROM trajectories ORDER BY 1", raw=True)]

    def run_dir(self, run_id: str) -> Path | None:
        """Folder of a run, where there is one on this machine."""
        finder = getattr(self.store, "run_dir", None)
        folder = finder(run_id) if callable(finder) else None
        return Path(folder) if folder and Path(folder).is_dir() else None


def _unescape(snippet: str) -> str:
    return re.sub(r"\\[nrt]|\s+", " ", str(snippet)).replace('\\"', '"').replace("\\\\", "\\")


def _plain(value: Any) -> Any:
    """A cell as JSON can carry it: NaN and missing as null, text without hidden characters."""
    if isinstance(value, str):
        return visible(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
