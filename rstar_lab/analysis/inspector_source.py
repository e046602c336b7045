"""The rows behind an inspector: filters to SQL, pages, siblings and search over a run store or over frames."""

import json
import math
import re
import time
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
# What the list shows; the rest of a row is read when it is opened.
LISTED = (
    "traj_id", "run_id", "stage", "step", "group_id", "problem_id", "sample", "reward", "kept", "outcomes", "calls", "errors", "turns",
    "response_tokens", "answer", "truth", "p_err", "p_format", "advantage", "entropy", "reflection_tokens", "stop_reason",
)  # fmt: skip
SEARCH_LIMIT, SEARCH_S = 500, 5.0
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
        self._counted: dict[str, list[tuple[int, str, int]]] = {}

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
        """Forget what was counted: a run that is being written has grown."""
        self._counted.clear()

    def count(self, where: str) -> int:
        return sum(n for *_, n in self._blocks(where))

    def _blocks(self, where: str) -> list[tuple[int, str, int]]:
        """(step, run, rows) of the filtered list, newest step first: a page in the default order lies in few of them."""
        if where not in self._counted:
            found = self._rows(
                f"SELECT step, run_id, count(*) FROM trajectories WHERE {where} "
                "GROUP BY ALL ORDER BY step DESC NULLS LAST, run_id",
                raw=True,
            )
            self._counted[where] = [(step, run_id, int(n)) for step, run_id, n in found]
        return self._counted[where]

    def page(self, where: str, sort: Sequence[Any] = (), offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Rows offset .. offset + limit of the list: its columns.

        sort: (column, descending), or empty for the newest first.
        """
        total = self.count(where)
        limit = max(0, min(limit, total - offset))
        if not limit:
            return []
        if not sort:
            before, first, held = 0, 0, list[str]()
            for step, run_id, n in self._blocks(where):
                if before + n > offset and before < offset + limit:
                    if not held:
                        first = before
                    held.append(f"(step = {literal(step)} AND run_id = {literal(run_id)})")
                before += n
            return self._list(f"({where}) AND ({' OR '.join(held)})", self._order(sort), limit, offset - first)
        flip = offset > total // 2  # the far half is the near half of the opposite order
        if flip:
            offset = total - offset - limit
        rows = self._list(where, self._order(sort, flip), limit, offset)
        return rows[::-1] if flip else rows

    def _list(self, where: str, order: str, limit: int, offset: int) -> list[dict[str, Any]]:
        names = ", ".join(name for name in LISTED if name in self.columns)
        query = f"SELECT {names} FROM trajectories WHERE {where} ORDER BY {order} LIMIT {limit} OFFSET {offset}"
        return self._rows(query)

    def _order(self, sort: Sequence[Any], flip: bool = False) -> str:
        """ORDER BY of a list: nulls last, ties newest first; flip: all of it the other way round."""
        keys = [*DEFAULT_ORDER]
        if sort:
            keys = [self._key(sort), *(key for key in keys if key[0] != sort[0])]
        nulls = "FIRST" if flip else "LAST"
        return ", ".join(f"{key} {'DESC' if down != flip else 'ASC'} NULLS {nulls}" for key, down in keys)

    def _key(self, sort: Sequence[Any]) -> tuple[str, bool]:
        column = str(sort[0])
        if column not in self.columns:
            raise UserError(f"cannot sort by {column!r}: no such column")
        return f"len({column})" if self.columns[column].endswith("[]") else column, bool(sort[1])

    def place(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Index of a trajectory in the list as filtered and sorted; None where the filter hides it."""
        keys = [*DEFAULT_ORDER]
        if sort:
            keys = [self._key(sort), *(key for key in keys if key[0] != sort[0])]
        chosen = ", ".join(f"{key} AS k{i}" for i, (key, _) in enumerate(keys))
        me = self._sql(f"SELECT {chosen} FROM trajectories WHERE traj_id = {literal(traj_id)} AND ({where}) LIMIT 1")
        if me.empty:
            return None
        # What comes before it: smaller in the first key, or equal there and smaller in the second, and so on.
        before, equal = [], "TRUE"
        for i, (key, down) in enumerate(keys):
            value = literal(_plain(me[f"k{i}"][0]))
            smaller = f"{key} IS NOT NULL" if value == "NULL" else f"{key} {'>' if down else '<'} {value}"
            before.append(f"({equal} AND {smaller})")
            equal += f" AND {key} IS NOT DISTINCT FROM {value}"
        query = f"SELECT count(*) FROM trajectories WHERE ({where}) AND ({' OR '.join(before)})"
        return int(self._rows(query, raw=True)[0][0])

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

    def search(self, text: str, where: str, *, seconds: float = SEARCH_S) -> dict[str, Any]:
        """Trajectories of the filtered list whose messages contain `text`, newest steps first.

        Text in lower case is found in any case, other text as it is. Gives {"hits": {traj_id: words around the first
        place}, "last", "first": the steps searched, "whole": was all of the list searched}; it stops at SEARCH_LIMIT
        hits or after `seconds`.
        """
        # As the text stands inside the JSON of the messages, and inside the JSON of a call inside that.
        once = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        needles = dict.fromkeys([*once, *(json.dumps(one, ensure_ascii=False)[1:-1] for one in once)])
        column = "messages" if text != text.lower() else "lower(messages)"
        places = ", ".join(f"nullif(strpos({column}, {literal(needle)}), 0)" for needle in needles)
        around = f"substr(messages, greatest(1, coalesce({places}) - {_SNIPPET}), {2 * _SNIPPET + len(text)})"
        hit = " OR ".join(f"contains({column}, {literal(needle)})" for needle in needles)
        listed = (
            ""
            if where == "TRUE"
            else f"AND traj_id IN (SELECT traj_id FROM trajectories WHERE ({where}) AND {{there}}) "
        )
        runs = sorted({run_id for _, run_id, _ in self._blocks(where)})
        steps = list(dict.fromkeys(step for step, _, _ in self._blocks(where)))
        hits: dict[str, str] = {}
        done, stride, began = 0, 4, time.monotonic()
        while done < len(steps) and len(hits) < SEARCH_LIMIT and time.monotonic() - began < seconds:
            part = steps[done : done + stride]
            # Runs and a range of steps as plain comparisons, by which whole files are left unread.
            there = f"run_id IN ({_list(runs)}) AND step BETWEEN {literal(part[-1])} AND {literal(part[0])}"
            found = self._rows(
                f"SELECT traj_id, {around} FROM transcripts WHERE {there} {listed.format(there=there)}AND ({hit}) "
                f"ORDER BY step DESC, traj_id LIMIT {SEARCH_LIMIT - len(hits)}",
                raw=True,
            )
            hits |= {str(traj_id): visible(_unescape(snippet)) for traj_id, snippet in found}
            done, stride = done + len(part), 2 * stride
        ends = {"last": steps[0], "first": steps[done - 1]} if done else {"last": None, "first": None}
        return {"hits": hits, **ends, "whole": done == len(steps) and len(hits) < SEARCH_LIMIT}

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
