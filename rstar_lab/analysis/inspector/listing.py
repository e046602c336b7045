"""Pages of the inspector's list: filtered and sorted, out of millions of rows.

The ids of the rows are read in order once per filter and sort. A page is a slice of them: of a table in memory if there are few rows,
else the columns of the list are read for these ids.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from rstar_lab.analysis import queries
from rstar_lab.analysis.filters import sql_list, sql_literal
from rstar_lab.analysis.queries import connect, error_text, time_limit
from rstar_lab.analysis.runs import Runs
from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import visible

MAX_ROWS = 200_000  # larger stores are read from their files
_QUIET_S = 10.0  # a run that was refreshed more recently is still growing, and is read from its files


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

    Rows are read from the store until `load` has copied them into memory.
    `sort` is (column, descending), or empty for the newest first. Missing values come last. Ties are newest first.

    Args:
        store: The opened runs.
    """

    def __init__(self, store: Runs) -> None:
        self.store = store
        self._connection: duckdb.DuckDBPyConnection | None = None  # to the trajectories in memory
        self._listed: pa.Table | None = None  # their LIST_COLUMNS, in the default order
        self._refreshed_at = float("-inf")
        self._blocks: dict[str, list[tuple[int, str, int]]] = {}
        self._orders: dict[tuple[Any, ...], pd.DataFrame] = {}
        self.columns = {str(name): str(kind) for name, kind, *_ in self._fetch("DESCRIBE trajectories")[1]}
        self._names = ", ".join(name for name in LIST_COLUMNS if name in self.columns)

    def load(self) -> None:
        """Copy the trajectories into memory if there are at most MAX_ROWS and the run was not refreshed in the last seconds."""
        quiet = time.monotonic() - self._refreshed_at > _QUIET_S
        if self.in_memory or not quiet or self.count("TRUE") > MAX_ROWS:
            return
        table = self.store.arrow("SELECT * FROM trajectories")
        connection = connect(threads=1)  # a second thread is slower for so few rows
        connection.register("rows_in_memory", table)
        connection.execute(
            f"CREATE TABLE trajectories AS SELECT * FROM rows_in_memory ORDER BY {_order(DEFAULT_ORDER)}"
        )
        connection.unregister("rows_in_memory")
        self._listed = connection.sql(f"SELECT {self._names} FROM trajectories ORDER BY rowid").to_arrow_table()
        self._connection = connection

    @property
    def in_memory(self) -> bool:
        """Whether the trajectories are in memory."""
        return self._connection is not None

    def refresh(self) -> None:
        """Read from the store again, after a run has grown."""
        self._connection = self._listed = None
        self._refreshed_at = time.monotonic()
        self._blocks.clear()
        self._orders.clear()

    def _fetch(self, query: str, steps: Sequence[tuple[str, int]] | None = None) -> tuple[list[str], list[Any]]:
        """Run a query on trajectories and return its column names and rows.

        steps: (run_id, step) of all rows that the query can return. A store of files reads only the files of these steps.
        """
        with query_errors():
            if (connection := self._connection) is None:
                return frame_rows(self.store.sql(query, steps=steps, timeout_s=queries.FILTER_S))
            cursor = connection.cursor()  # cells and messages of the page query from different threads
            with time_limit(cursor, queries.FILTER_S):
                cursor.execute(query)
                return [str(column[0]) for column in cursor.description or ()], cursor.fetchall()

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
            _cache(self._blocks, where, self._fetch(f"{query} ORDER BY step DESC NULLS LAST, run_id")[1])
        return self._blocks[where]

    def page(self, where: str, sort: Sequence[Any] = (), offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Return rows offset .. offset + limit with LIST_COLUMNS, as JSON objects."""
        listed = self._listed
        part = self._ordered(where, sort, listed is not None).iloc[offset : offset + max(limit, 0)]
        if listed is not None:
            columns = listed.take(part.id.to_numpy(np.int64)).to_pydict()
            return to_json_rows(list(columns), list(zip(*columns.values(), strict=True)))
        if part.empty:
            return []
        condition, steps = f"traj_id IN ({sql_list(part.id)})", None
        if not part.step.isna().any():  # only the files of these steps are read
            steps = [(run_id, int(step)) for run_id, step in dict.fromkeys(zip(part.run_id, part.step, strict=True))]
            condition = f"step BETWEEN {int(part.step.min())} AND {int(part.step.max())} AND {condition}"
        names, found = self._fetch(f"SELECT traj_id AS id, {self._names} FROM trajectories WHERE {condition}", steps)
        by_id = {row[0]: row[1:] for row in found}
        return to_json_rows(names[1:], [by_id[each] for each in part.id if each in by_id])

    def index_of(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Return the index of a trajectory in the list, or None if the filter excludes it."""
        in_memory = self.in_memory
        key = "rowid" if in_memory else "traj_id"
        _, ids = self._fetch(f"SELECT {key} FROM trajectories WHERE traj_id = {sql_literal(traj_id)} LIMIT 1")
        places: Any = np.flatnonzero(self._ordered(where, sort, in_memory).id == ids[0][0]) if ids else ()
        return int(places[0]) if len(places) else None

    def _ordered(self, where: str, sort: Sequence[Any], in_memory: bool) -> pd.DataFrame:
        """Return the ids of all rows of the filtered list, in its order: rowid of rows in memory, else traj_id, run_id and step."""
        key = (where, in_memory, *sort)
        if key not in self._orders:
            # Rows in memory are in the default order.
            columns, order = (
                ("rowid AS id", (("rowid", False),)) if in_memory else ("traj_id AS id, run_id, step", DEFAULT_ORDER)
            )
            query = (
                f"SELECT {columns} FROM trajectories WHERE {where} ORDER BY {_order([*self._sort_key(sort), *order])}"
            )
            with query_errors():
                connection = self._connection
                if not in_memory or connection is None:
                    found = self.store.sql(query, timeout_s=queries.FILTER_S)
                else:
                    with time_limit(cursor := connection.cursor(), queries.FILTER_S):
                        found = cursor.execute(query).df()
            _cache(self._orders, key, found)
        return self._orders[key]

    def _sort_key(self, sort: Sequence[Any]) -> list[tuple[str, bool]]:
        """Return the SQL expression of the column to sort by, and whether the order is descending."""
        if not sort:
            return []
        column = str(sort[0])
        if column not in self.columns:
            raise UserError(f"cannot sort by {column!r}: trajectories have no such column")
        kind = self.columns[column]
        key = f"len({column})" if kind.endswith("[]") else column
        key = f"nullif({key}, 'nan')" if kind in ("FLOAT", "DOUBLE") else key  # NaN counts as missing
        return [(key, bool(sort[1]))]


def frame_rows(frame: pd.DataFrame) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the column names and the rows of a frame."""
    values = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
    return [*map(str, frame.columns)], list(values)


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
