"""A copy of a store's trajectories in memory, which answers the inspector's queries faster than the run's files."""

import time
from collections.abc import Sequence
from typing import Any

import duckdb
import pandas as pd

from rstar_lab.analysis.queries import connect

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
        return self._store.sql(query) if cursor is None else cursor.execute(query).df()

    def rows(
        self, query: str, steps: Sequence[tuple[str, int]] | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Run a query on trajectories and return its column names and rows. Faster than `sql` for a page of rows.

        steps: (run_id, step) of all rows that the query can return. A store of files reads only the files of these steps.
        """
        cursor = self._cursor()
        if cursor is None:
            return frame_rows(self._store.sql(query, steps=steps))
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
