"""Pages of the inspector's list: filtered and sorted, out of millions of rows.

Sorting all rows for a page of one hundred is slow, and so is reading long columns of rows that are not shown. The rows
are therefore counted first, by step and run or by the value of the sort column. The counts show which steps, runs or
values contain the page, and only these are read. Counts are cached until `refresh`.
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
        connection.execute("CREATE TABLE trajectories AS SELECT * FROM rows_in_memory")
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
_MAX_SORTED_ROWS = 5_000  # if more rows than this share one value, they are read by step and run instead of sorted
_CACHED_FILTERS = 8  # number of filters whose counts are cached
# Condition, order, offset, limit, and (run_id, step) of all rows of the condition, None if they are not known.
Part = tuple[str, str, int, int, list[tuple[str, int]] | None]


class Listing:
    """Reads pages of a list of trajectories that is filtered by an SQL condition and sorted.

    table: the trajectories. columns: name to type of their columns.
    `sort` is (column, descending), or empty for the newest first. Missing values come last. Ties are newest first.
    """

    def __init__(self, table: MemoryTable, columns: Mapping[str, str]) -> None:
        self._trajectories, self.columns = table, columns
        self._blocks: dict[str, list[tuple[int, str, int]]] = {}
        self._values: dict[tuple[str, str, bool], pd.DataFrame] = {}

    def refresh(self) -> None:
        """Discard cached counts and rows, after a run has grown."""
        self._trajectories.discard()
        self._blocks.clear()
        self._values.clear()

    def count(self, where: str) -> int:
        """Return the number of rows of the filtered list."""
        for (counted, *_), values in self._values.items():
            if counted == where:
                return int(values.n.sum())
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
        names = ", ".join(name for name in LIST_COLUMNS if name in self.columns)
        parts: Iterator[Part]
        if sort and self._trajectories.is_loaded:  # sorting rows in memory is faster than counting their values
            (key, down), *ties = self._keys(sort)
            if self.columns.get(key) in ("FLOAT", "DOUBLE"):
                key = f"nullif({key}, 'nan')"  # NaN counts as missing
            parts = iter([(where, _order([(key, down), *ties]), offset, limit, None)])
        else:
            parts = self._by_value(where, sort, offset, limit) if sort else self._by_block(where, offset, limit)
        page = []
        for condition, order, before, rows, steps in parts:
            query = f"SELECT {names} FROM trajectories WHERE {condition} ORDER BY {order} LIMIT {rows} OFFSET {before}"
            with query_errors():
                page += to_json_rows(*self._trajectories.rows(query, steps))
        return page

    def _sql(self, query: str) -> pd.DataFrame:
        with query_errors():
            return self._trajectories.sql(query)

    def index_of(self, traj_id: str, where: str, sort: Sequence[Any] = ()) -> int | None:
        """Return the index of a trajectory in the list, or None if the filter excludes it."""
        keys = self._keys(sort)
        chosen = ", ".join(f"{key} AS k{i}" for i, (key, _) in enumerate(keys))
        me = self._sql(
            f"SELECT {chosen} FROM trajectories WHERE traj_id = {sql_literal(traj_id)} AND ({where}) LIMIT 1"
        )
        if me.empty:
            return None
        mine = {key: to_json_value(me[f"k{i}"][0]) for i, (key, _) in enumerate(keys)}
        before = 0
        if sort:
            values, key = self._counted(where, sort), keys[0][0]
            at = next(
                i for i, bounds in enumerate(zip(values.low, values.high, strict=True)) if _in_range(bounds, mine[key])
            )
            before += int(values.n[:at].sum())
            where = f"({where}) AND {_range_condition(key, values.low[at], values.high[at])}"
            if values.same[at]:
                keys = [*DEFAULT_ORDER]
        if keys[0] == DEFAULT_ORDER[0]:
            blocks = self.blocks(where)
            at = next(
                i
                for i, block in enumerate(blocks)
                if (to_json_value(block[0]), block[1]) == (mine["step"], mine["run_id"])
            )
            before += sum(n for *_, n in blocks[:at])
            where = f"({where}) AND {_block_condition([blocks[at]])}"
        # Rows before it: smaller in the first key, or equal in the first key and smaller in the second, and so on.
        smaller, equal = [], "TRUE"
        for key, down in keys:
            value = sql_literal(mine[key])
            less = f"{key} IS NOT NULL" if value == "NULL" else f"{key} {'>' if down else '<'} {value}"
            smaller.append(f"({equal} AND {less})")
            equal += f" AND {key} IS NOT DISTINCT FROM {value}"
        smaller_rows = self._sql(f"SELECT count(*) AS n FROM trajectories WHERE ({where}) AND ({' OR '.join(smaller)})")
        return before + int(smaller_rows.n[0])

    def _by_block(self, where: str, offset: int, limit: int) -> Iterator[Part]:
        """Yield the queries of a page of the newest-first list."""
        blocks = self.blocks(where)
        held, before = _overlapping([n for *_, n in blocks], offset, limit)
        if held:
            chosen = [blocks[i] for i in held]
            numbered = not any(pd.isna(step) for step, *_ in chosen)
            steps = [(run_id, int(step)) for step, run_id, _ in chosen] if numbered else None
            yield f"({where}) AND {_block_condition(chosen)}", _order(DEFAULT_ORDER), offset - before, limit, steps

    def _by_value(self, where: str, sort: Sequence[Any], offset: int, limit: int) -> Iterator[Part]:
        """Yield the queries of a page sorted by a column: one per value that many rows share, one per range of other values."""
        keys, values = self._keys(sort), self._counted(where, sort)
        key = keys[0][0]
        held, before = _overlapping(values.n, offset, limit)
        alone = [(values.same[i] and values.n[i] > _MAX_SORTED_ROWS) or pd.isna(values.low[i]) for i in held]
        at = 0
        while at < len(held):
            end = at + 1
            while end < len(held) and not alone[at] and not alone[end]:
                end += 1
            first, last = held[at], held[end - 1]
            low, high = sorted((first, last), reverse=keys[0][1])
            part = f"({where}) AND {_range_condition(key, values.low[low], values.high[high])}"
            rows, skipped = int(values.n[first : last + 1].sum()), max(0, offset - before)
            wanted = min(rows, offset + limit - before) - skipped
            if alone[at]:
                yield from self._by_block(part, skipped, wanted)
            else:
                yield part, _order(keys), skipped, wanted, None
            before, at = before + rows, end

    def _counted(self, where: str, sort: Sequence[Any]) -> pd.DataFrame:
        """Count rows by value of the sort column, in list order: columns low, high, n, same (low equals high).

        Floating-point values are rounded to thousandths, else there could be as many values as rows. Missing values
        are last.
        """
        key, down = self._keys(sort)[0]
        if (where, key, down) not in self._values:
            # round(NaN) is NaN, which counts as missing.
            value = f"nullif(round({key}, 3), 'nan')" if self.columns.get(key) in ("FLOAT", "DOUBLE") else key
            counted = self._sql(
                f"SELECT {value} AS value, min({key}) AS low, max({key}) AS high, count(*) AS n FROM trajectories "
                f"WHERE {where} GROUP BY 1 ORDER BY 1 {'DESC' if down else 'ASC'} NULLS LAST"
            )
            counted["same"] = (counted.low == counted.high).fillna(False).astype(bool)
            ends = counted[["low", "high"]].astype(object)  # a column of booleans cannot have missing values
            counted[["low", "high"]] = ends.where(counted.value.notna(), None)
            _cache(self._values, (where, key, down), counted)
        return self._values[where, key, down]

    def _keys(self, sort: Sequence[Any]) -> list[tuple[str, bool]]:
        """Return the total order of the list: pairs of SQL expression and whether it is descending."""
        if not sort:
            return [*DEFAULT_ORDER]
        column = str(sort[0])
        if column not in self.columns:
            raise UserError(f"cannot sort by {column!r}: trajectories have no such column")
        key = f"len({column})" if self.columns[column].endswith("[]") else column
        return [(key, bool(sort[1])), *(key for key in DEFAULT_ORDER if key[0] != column)]


def _cache(kept: dict, key: Any, counted: Any) -> None:
    while len(kept) >= _CACHED_FILTERS:
        kept.pop(next(iter(kept)))
    kept[key] = counted


def _overlapping(counts: Sequence[int] | pd.Series, offset: int, limit: int) -> tuple[list[int], int]:
    """Return the indices of the blocks that contain rows offset .. offset + limit, and the rows before the first block.

    counts: rows of consecutive blocks.
    """
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    if limit <= 0 or not len(ends) or offset >= ends[-1]:
        return [], 0
    first, last = np.searchsorted(ends, [offset, min(offset + limit, ends[-1]) - 1], side="right")
    return list(range(int(first), int(last) + 1)), int(ends[first - 1]) if first else 0


def _order(keys: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{key} {'DESC' if down else 'ASC'} NULLS LAST" for key, down in keys)


def _block_condition(blocks: Sequence[tuple[int, str, int]]) -> str:
    """Return the condition for the rows of these blocks.

    It compares runs and a range of steps directly, so that DuckDB can skip row groups by their statistics.
    """
    steps, runs = [step for step, _, _ in blocks], sorted({run_id for _, run_id, _ in blocks})
    each = " OR ".join(
        f"(step IS NOT DISTINCT FROM {sql_literal(step)} AND run_id = {sql_literal(run_id)})"
        for step, run_id, _ in blocks
    )
    numbers = [step for step in steps if not pd.isna(step)]
    within = f"step BETWEEN {min(steps)} AND {max(steps)} AND " if len(numbers) == len(steps) else ""
    return f"{within}run_id IN ({sql_list(runs)}) AND ({each})"


def _range_condition(key: str, low: Any, high: Any) -> str:
    low, high = to_json_value(low), to_json_value(high)
    if low is None or high is None:
        return f"({key} IS NULL OR {key}::VARCHAR = 'nan')"
    return f"{key} = {sql_literal(low)}" if low == high else f"{key} BETWEEN {sql_literal(low)} AND {sql_literal(high)}"


def _in_range(bounds: tuple[Any, Any], value: Any) -> bool:
    low, high = map(to_json_value, bounds)
    return value is None if low is None else value is not None and low <= value <= high


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
