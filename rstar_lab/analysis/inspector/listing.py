"""Pages of the inspector's list: filtered and sorted, out of millions of rows.

A page of few rows is a slice of a table in memory. Else the rows are counted first, by step and run or by the value of the sort column.
The counts show which steps or values contain the page, and only these are read.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pandas as pd

from rstar_lab.analysis import queries
from rstar_lab.analysis.filters import sql_literal
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
_CACHED = 8  # filters and orders whose counts are cached
_MAX_SORTED = 5_000  # more rows that share a value are read by step and run: sorting reads all columns of all of them


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
        self._refreshed_at = float("-inf")
        self._blocks: dict[str, list[tuple[int, str, int]]] = {}
        self._ranges: dict[tuple[Any, ...], pd.DataFrame] = {}
        self.columns = {str(name): str(kind) for name, kind, *_ in self._fetch("DESCRIBE trajectories")[1]}
        self._names = ", ".join(name for name in LIST_COLUMNS if name in self.columns)

    def load(self) -> None:
        """Copy the trajectories into memory if there are at most MAX_ROWS and the run was not refreshed in the last seconds."""
        quiet = time.monotonic() - self._refreshed_at > _QUIET_S
        if self.in_memory or not quiet or self.count("TRUE") > MAX_ROWS:
            return
        table = self.store.arrow("SELECT * FROM trajectories")
        # A second thread is slower for so few rows. The columns of a page are read after its rows are sorted.
        connection = connect(threads=1, late_materialization_max_rows=1000)
        connection.register("rows_in_memory", table)
        connection.execute(
            f"CREATE TABLE trajectories AS SELECT * FROM rows_in_memory ORDER BY {_order(DEFAULT_ORDER)}"
        )
        connection.unregister("rows_in_memory")
        self._connection = connection

    @property
    def in_memory(self) -> bool:
        """Whether the trajectories are in memory."""
        return self._connection is not None

    def refresh(self) -> None:
        """Read from the store again, after a run has grown."""
        self._connection = None
        self._refreshed_at = time.monotonic()
        self._blocks.clear()
        self._ranges.clear()

    def _fetch(self, query: str, steps: Sequence[tuple[str, int]] | None = None) -> tuple[list[str], list[Any]]:
        """Run a query on trajectories and return its column names and rows.

        steps: (run_id, step) of all rows that the query can return. A store of files reads only the files of these steps.
        """
        if (connection := self._connection) is None:
            return frame_rows(self.store.sql(query, steps=steps, timeout_s=queries.FILTER_S))
        cursor = connection.cursor()  # cells and messages of the page query from different threads
        try:
            with time_limit(cursor, queries.FILTER_S):
                cursor.execute(query)
                return [str(column[0]) for column in cursor.description or ()], cursor.fetchall()
        except duckdb.Error as error:
            raise UserError(error_text(error)) from error

    def count(self, where: str) -> int:
        """Return the number of rows of the filtered list."""
        for (counted, *_), ranges in self._ranges.items():
            if counted == where:
                return int(ranges.n.sum())
        if self.in_memory:
            return self._fetch(f"SELECT count(*) FROM trajectories WHERE {where}")[1][0][0]
        return sum(n for *_, n in self.blocks(where))

    def blocks(self, where: str) -> list[tuple[int, str, int]]:
        """Return (step, run, number of rows) of the filtered list, newest step first."""
        if where not in self._blocks:
            query = f"SELECT step, run_id, count(*) AS n FROM trajectories WHERE {where} GROUP BY ALL"
            _cache(self._blocks, where, self._fetch(f"{query} ORDER BY step DESC NULLS LAST, run_id")[1])
        return self._blocks[where]

    def page(self, where: str, sort: Sequence[Any] = (), offset: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Return rows offset .. offset + limit with LIST_COLUMNS, as JSON objects."""
        keys, limit = self._keys(sort), max(limit, 0)
        if self.in_memory:  # sorting them is faster than counting them
            return self._read(where, keys, offset, limit)
        if not sort:
            return self._newest(where, offset, limit)
        values, before = _overlapping(self._values(where, sort), offset, limit)
        alone = (values.n > _MAX_SORTED) | values.low.isna()
        rows: list[dict[str, Any]] = []
        for _, part in values.groupby((alone | alone.shift(fill_value=False)).cumsum()):
            low, high, missing = part.low.min(), part.high.max(), part.low.isna().all()
            # A range of the column itself, so that DuckDB skips row groups by their statistics.
            column = sort[0] if self._is_float(sort) else keys[0][0]
            within = f"{column} BETWEEN {sql_literal(low)} AND {sql_literal(high)}"
            condition = f"({where}) AND {f'{keys[0][0]} IS NULL' if missing else within}"
            ahead, n = max(0, offset - before), int(part.n.sum())
            wanted, before = min(n - ahead, limit - len(rows)), before + n
            alike = missing or (n > _MAX_SORTED and low == high)
            rows += self._newest(condition, ahead, wanted) if alike else self._read(condition, keys, ahead, wanted)
        return rows

    def _newest(self, where: str, offset: int, limit: int) -> list[dict[str, Any]]:
        """Return a page of the list that is not sorted. Only the files of its steps are read."""
        blocks, before = _overlapping(pd.DataFrame(self.blocks(where), columns=["step", "run_id", "n"]), offset, limit)
        if blocks.step.isna().any():
            return self._read(where, self._keys(), offset, limit)
        steps = list(zip(blocks.run_id, blocks.step.astype(int), strict=True))
        return self._read(where, self._keys(), offset - before, limit, steps) if steps else []

    def _read(self, where: str, order: Any, offset: int, limit: int, steps: Any = None) -> list[dict[str, Any]]:
        query = f"SELECT {self._names} FROM trajectories WHERE {where} ORDER BY {_order(order)} LIMIT {limit}"
        return to_json_rows(*self._fetch(f"{query} OFFSET {offset}", steps))

    def _values(self, where: str, sort: Sequence[Any]) -> pd.DataFrame:
        """Return the values of the sort column in the order of the list: columns low, high, n (number of rows).

        Floating-point values are rounded to thousandths, because there can be as many values as rows.
        """
        if (key := (where, *sort)) not in self._ranges:
            column, down = self._keys(sort)[0]
            value = f"round({column}, 3)" if self._is_float(sort) else column
            query = f"SELECT min({column}) AS low, max({column}) AS high, count(*) AS n FROM trajectories WHERE {where}"
            names, rows = self._fetch(f"{query} GROUP BY {value} ORDER BY {_order([('low', down)])}")
            _cache(self._ranges, key, pd.DataFrame(rows, columns=names))
        return self._ranges[key]

    def index_of(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Return the index of a trajectory in the list, or None if the filter excludes it."""
        place = f"row_number() OVER (ORDER BY {_order(self._keys(sort))}) - 1 AS place"
        rows = f"SELECT traj_id, {place} FROM trajectories WHERE {where}"
        found = self._fetch(f"SELECT place FROM ({rows}) WHERE traj_id = {sql_literal(traj_id)} LIMIT 1")[1]
        return int(found[0][0]) if found else None

    def _keys(self, sort: Sequence[Any] = ()) -> list[tuple[str, bool]]:
        """Return the total order of the list: SQL expressions and whether each is descending. NaN counts as missing."""
        order = [("rowid", False)] if self.in_memory else [*DEFAULT_ORDER]  # rows in memory are in the default order
        if not sort:
            return order
        key = str(sort[0])
        if key not in self.columns:
            raise UserError(f"cannot sort by {key!r}: trajectories have no such column")
        if self.columns[key].endswith("[]"):
            key = f"len({key})"
        return [(f"nullif({key}, 'nan')" if self._is_float(sort) else key, bool(sort[1])), *order]

    def _is_float(self, sort: Sequence[Any]) -> bool:
        return self.columns[str(sort[0])] in ("FLOAT", "DOUBLE")


def frame_rows(frame: pd.DataFrame) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the column names and the rows of a frame."""
    values = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
    return [*map(str, frame.columns)], list(values)


def _order(keys: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{key} {'DESC' if down else 'ASC'} NULLS LAST" for key, down in keys)


def _overlapping(blocks: pd.DataFrame, offset: int, limit: int) -> tuple[pd.DataFrame, int]:
    """Return the blocks of n rows that contain rows offset .. offset + limit, and the number of rows before them."""
    ends = blocks.n.to_numpy(np.int64).cumsum()
    first, last = np.searchsorted(ends, [offset, offset + limit - 1], side="right")
    return blocks.iloc[first : last + 1] if limit else blocks.iloc[:0], int(ends[first - 1]) if first else 0


def _cache(kept: dict, key: Any, counted: Any) -> None:
    while len(kept) >= _CACHED:
        kept.pop(next(iter(kept)))
    kept[key] = counted


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
    if not isinstance(value, float) or not math.isfinite(value):
        return None if isinstance(value, float) else value
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
