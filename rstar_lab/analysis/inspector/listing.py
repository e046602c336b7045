"""Pages of the inspector's list: filtered and sorted, out of millions of rows.

The ids of the rows are read in order once per filter and sort. A page is a slice of them, for which the columns of the list are read.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import numpy as np
import pandas as pd

from rstar_lab.analysis import queries
from rstar_lab.analysis.filters import sql_list, sql_literal
from rstar_lab.analysis.queries import connect, error_text, time_limit
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import visible

MAX_ROWS = 200_000  # larger stores are read from their files
_QUIET_S = 10.0  # a run that was refreshed more recently is still growing, and is read from its files


class MemoryTable:
    """Answers SQL queries on trajectories from memory once `load` has copied them, and from the store before that.

    store: has `sql` and, if its rows are in files, `arrow`; see `source.Store`. A store without `arrow` is in memory already.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._refreshed_at = float("-inf")

    def load(self, rows: int) -> None:
        """Copy the trajectories if there are at most MAX_ROWS and the run was not refreshed in the last seconds.

        rows: number of trajectories in the store.
        """
        quiet = time.monotonic() - self._refreshed_at > _QUIET_S
        if self._connection is not None or not quiet or rows > MAX_ROWS or not hasattr(self._store, "arrow"):
            return
        table = self._store.arrow("SELECT * FROM trajectories")
        connection = connect(threads=1)  # a second thread is slower for so few rows
        connection.register("rows_in_memory", table)
        connection.execute(
            f"CREATE TABLE trajectories AS SELECT * FROM rows_in_memory ORDER BY {_order(DEFAULT_ORDER)}"
        )
        connection.unregister("rows_in_memory")
        self._connection = connection

    def discard(self) -> None:
        """Read from the store again, after a run has grown."""
        self._connection = None
        self._refreshed_at = time.monotonic()

    @property
    def is_loaded(self) -> bool:
        """Whether the trajectories are in memory."""
        return self._connection is not None

    def sql(self, query: str) -> pd.DataFrame:
        """Run a query on trajectories and return a data frame."""
        cursor = self._cursor()
        if cursor is None:
            return self._store.sql(query, timeout_s=queries.FILTER_S)
        with time_limit(cursor, queries.FILTER_S):
            return cursor.execute(query).df()

    def rows(
        self, query: str, steps: Sequence[tuple[str, int]] | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Run a query on trajectories and return its column names and rows. Faster than `sql` for a page of rows.

        steps: (run_id, step) of all rows that the query can return. A store of files reads only the files of these steps.
        """
        cursor = self._cursor()
        if cursor is None:
            return frame_rows(self._store.sql(query, steps=steps, timeout_s=queries.FILTER_S))
        with time_limit(cursor, queries.FILTER_S):
            cursor.execute(query)
            return [str(column[0]) for column in cursor.description or ()], cursor.fetchall()

    def _cursor(self) -> duckdb.DuckDBPyConnection | None:
        """Return a cursor of this query: cells and messages of the page query from different threads. None: not in memory."""
        connection = self._connection
        return connection.cursor() if connection is not None else None


def frame_rows(frame: pd.DataFrame) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the column names and the rows of a frame."""
    values = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
    return [*map(str, frame.columns)], list(values)


# Newest step first, rollouts of a group together. traj_id makes the order total, so that pages do not overlap.
DEFAULT_ORDER = (("step", True), ("run_id", False), ("group_id", False), ("sample", False), ("traj_id", False))
# Columns that the list shows. The other columns are read when a row is opened.
LIST_COLUMNS = (
    "traj_id", "run_id", "stage", "step", "group_id", "problem_id", "sample", "reward", "correct", "kept", "outcomes", "calls", "errors",
    "turns", "response_tokens", "answer", "truth", "p_err", "p_format", "advantage", "entropy", "reflection_tokens", "stop_reason",
)  # fmt: skip
_IDS = ("traj_id", "run_id", "group_id", "problem_id")
_CACHED = 8  # filters whose counts and orders are cached


class Listing:
    """Reads pages of a list of trajectories that is filtered by an SQL condition and sorted.

    table: the trajectories. columns: name to type of their columns.
    `sort` is (column, descending), or empty for the newest first. Missing values come last. Ties are newest first.
    """

    def __init__(self, table: MemoryTable, columns: Mapping[str, str]) -> None:
        self._trajectories, self.columns = table, columns
        self._blocks: dict[str, list[tuple[int, str, int]]] = {}
        self._orders: dict[tuple[Any, ...], pd.DataFrame] = {}

    def refresh(self) -> None:
        """Discard cached counts and rows, after a run has grown."""
        self._trajectories.discard()
        self._blocks.clear()
        self._orders.clear()

    def count(self, where: str) -> int:
        """Return the number of rows of the filtered list."""
        for (ordered, *_), ids in self._orders.items():
            if ordered == where:
                return len(ids)
        return sum(n for *_, n in self.blocks(where))

    def blocks(self, where: str) -> list[tuple[int, str, int]]:
        """Return (step, run, number of rows) of the filtered list, newest step first."""
        if where not in self._blocks:
            query = f"SELECT step, run_id, count(*) AS n FROM trajectories WHERE {where} GROUP BY ALL"
            with query_errors():
                _, counts = self._trajectories.rows(f"{query} ORDER BY step DESC NULLS LAST, run_id")
            _cache(self._blocks, where, counts)
        return self._blocks[where]

    def page(self, where: str, sort: Sequence[Any] = (), offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Return rows offset .. offset + limit with LIST_COLUMNS, as JSON objects."""
        in_memory = self._trajectories.is_loaded
        part = self._ordered(where, sort, in_memory).iloc[offset : offset + max(limit, 0)]
        if part.empty:
            return []
        condition, steps = f"{_id(in_memory)} IN ({sql_list(part.id)})", None
        if not in_memory and not part.step.isna().any():  # only the files of these steps are read
            steps = [(run_id, int(step)) for run_id, step in dict.fromkeys(zip(part.run_id, part.step, strict=True))]
            condition = f"step BETWEEN {int(part.step.min())} AND {int(part.step.max())} AND {condition}"
        names = ", ".join(name for name in LIST_COLUMNS if name in self.columns)
        query = f"SELECT {_id(in_memory)} AS id, {names} FROM trajectories WHERE {condition}"
        with query_errors():
            columns, found = self._trajectories.rows(query, steps)
        by_id = {row[0]: row[1:] for row in found}
        return to_json_rows(columns[1:], [by_id[each] for each in part.id if each in by_id])

    def index_of(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Return the index of a trajectory in the list, or None if the filter excludes it."""
        in_memory = self._trajectories.is_loaded
        query = f"SELECT {_id(in_memory)} FROM trajectories WHERE traj_id = {sql_literal(traj_id)} LIMIT 1"
        with query_errors():
            _, ids = self._trajectories.rows(query)
        places: Any = np.flatnonzero(self._ordered(where, sort, in_memory).id == ids[0][0]) if ids else ()
        return int(places[0]) if len(places) else None

    def _ordered(self, where: str, sort: Sequence[Any], in_memory: bool) -> pd.DataFrame:
        """Return the ids of all rows of the filtered list, in its order; for rows in files, with run_id and step."""
        key = (where, in_memory, *sort)
        if key not in self._orders:
            columns = "rowid AS id" if in_memory else "traj_id AS id, run_id, step"
            order = _order(self._keys(sort, in_memory))
            with query_errors():
                found = self._trajectories.sql(f"SELECT {columns} FROM trajectories WHERE {where} ORDER BY {order}")
            _cache(self._orders, key, found)
        return self._orders[key]

    def _keys(self, sort: Sequence[Any], in_memory: bool) -> list[tuple[str, bool]]:
        """Return the total order of the list: pairs of SQL expression and whether it is descending."""
        order = (("rowid", False),) if in_memory else DEFAULT_ORDER  # rows in memory are in the default order
        if not sort:
            return [*order]
        column = str(sort[0])
        if column not in self.columns:
            raise UserError(f"cannot sort by {column!r}: trajectories have no such column")
        kind = self.columns[column]
        key = f"len({column})" if kind.endswith("[]") else column
        key = f"nullif({key}, 'nan')" if kind in ("FLOAT", "DOUBLE") else key  # NaN counts as missing
        return [(key, bool(sort[1])), *(key for key in order if key[0] != column)]


def _id(in_memory: bool) -> str:
    """Return the column by which rows are found: a number in memory."""
    return "rowid" if in_memory else "traj_id"


def _order(keys: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{key} {'DESC' if down else 'ASC'} NULLS LAST" for key, down in keys)


def _cache(kept: dict, key: Any, counted: Any) -> None:
    while len(kept) >= _CACHED:
        kept.pop(next(iter(kept)))
    kept[key] = counted


@contextmanager
def query_errors() -> Iterator[None]:
    """Raise an error of DuckDB as UserError."""
    try:
        yield
    except duckdb.Error as error:
        raise UserError(error_text(error)) from error


def to_json_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows as JSON objects with these keys. Ids that the browser sends back are unchanged."""
    return [
        {
            name: value if name in _IDS and isinstance(value, str) else to_json_value(value)
            for name, value in zip(names, row, strict=True)
        }
        for row in rows
    ]


def to_json_value(value: Any) -> Any:
    """Return a cell as a JSON value: NaN and missing values as None, text with hidden characters made visible."""
    if isinstance(value, str):
        return visible(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
