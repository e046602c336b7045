"""DuckDB views over the committed files of runs, updated when a run changes."""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rstar_lab.analysis.filters import sql_list
from rstar_lab.analysis.queries import HAS_RESULT, TABLES, connect, error_text, quoted, tables_of, time_limit
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunReader, RunStoreError
from rstar_lab.runs.errors import READ_ERRORS, NotStored
from rstar_lab.runs.reader import StoredFile, row_groups_of, run_folders
from rstar_lab.runs.schema import LEVELS
from rstar_lab.runs.tables import ROLLUP
from rstar_lab.untrusted.parquet import read_footer

_SOURCE = re.compile(r"\b(?:FROM|JOIN|DESCRIBE|SUMMARIZE)\s+(\w+)", re.IGNORECASE)
_MEMORY = "1GB"
Steps = Iterable[tuple[str, int]]  # (run_id, step)


class Views:
    """SQL over folders of runs. Every query sees each run up to its last committed step."""

    def __init__(
        self, folders: Sequence[Path], root: Path | None, frames: dict[str, Callable[[], pd.DataFrame]], timeout_s: float | None
    ):  # fmt: skip
        """root: a folder whose runs are read as they appear. frames: functions that compute tables on request. timeout_s: of a query."""
        self._given, self._root, self._frames, self._timeout_s = list(folders), root, frames, timeout_s
        self.leave_out_damaged = False
        self._lock = threading.RLock()
        # Files that the readers accepted, by run and level, with the state of the run; and those that the connection may read.
        self._accepted: dict[tuple[Path, str], tuple[tuple, list[StoredFile]]] = {}
        self._readable: set[str] = set()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._views: dict[str, tuple] = {}
        self._readers: dict[Path, RunReader] = {}
        self._unreadable: dict[Path, tuple] = {}  # state of runs that cannot be read
        self._rollups: dict[Path, tuple[tuple, pa.Table]] = {}

    @property
    def path(self) -> str:
        """The opened folders as text."""
        if self._root is not None:
            return str(self._root)
        names = ", ".join(map(str, self._given[:4]))
        return names + (f" and {len(self._given) - 4} more" if len(self._given) > 4 else "")

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | None = None,
        steps: Steps | None = None,
        *,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> pd.DataFrame:
        """Run a DuckDB query over the tables, see `Runs.sql`."""

        def fetch(cursor: duckdb.DuckDBPyConnection, text: str, values: list[Any]) -> pd.DataFrame:
            rows = cursor.sql(text, params=values)
            return (rows if limit is None else rows.limit(limit)).df()

        return self._run(query, parameters, fetch, steps, timeout_s)

    def state(self) -> tuple:
        """Return a value that changes when one of the runs changes."""
        return tuple((reader.run_dir, state_of(reader.run_dir)) for reader in self.readers())

    def files(self, level: str, condition: str, parameters: Sequence[Any] = ()) -> list[StoredFile]:
        """Return the files of the steps that match a condition on run_id, stage and step, limited to these steps."""
        return self._files(level, self.rows(f"SELECT run_id, step FROM rollup WHERE {condition}", parameters))

    def _files(self, level: str, steps: Steps) -> list[StoredFile]:
        """Return the files of these steps, limited to them."""
        chosen: dict[str, set[int]] = {}
        for run_id, step in steps:
            chosen.setdefault(run_id, set()).add(step)
        narrowed = []
        for reader in self.readers():
            with self.skip_damaged(reader):
                for file in self.accepted(reader, level) if reader.run_id in chosen else []:
                    inside = tuple(step for step in file.steps if step in chosen[reader.run_id])
                    if inside:
                        narrowed.append(replace(file, steps=inside, partial=file.partial or inside != file.steps))
        return narrowed

    def arrow(self, query: str, parameters: Sequence[Any] | None = None) -> pa.Table:
        """Like `sql`, but return an Arrow table."""
        return self._run(
            query, parameters, lambda cursor, text, values: cursor.sql(text, params=values).to_arrow_table()
        )

    def rows(
        self, query: str, parameters: Sequence[Any] | None = None, *, tables: frozenset[str] | None = None
    ) -> list[tuple[Any, ...]]:
        """Like `sql`, but return tuples, which is the fastest for a few rows. tables: those that the query names, if known."""
        return self._run(
            query, parameters, lambda cursor, text, values: cursor.execute(text, values).fetchall(), tables=tables
        )

    def _run(
        self,
        query: str,
        parameters: Sequence[Any] | None,
        fetch: Callable[[duckdb.DuckDBPyConnection, str, list[Any]], Any],
        steps: Steps | None = None,
        timeout_s: float | None = None,
        tables: frozenset[str] | None = None,
    ) -> Any:
        for _ in range(3):
            only = "" if steps is None else self._trajectories(self._files("trajectories", steps))
            limited = f"WITH trajectories AS ({only}) {query}" if only else query
            try:
                cursor = self._prepare(query, tables)
                with time_limit(cursor, self._timeout_s if timeout_s is None else timeout_s):
                    return fetch(cursor, limited, list(parameters or []))
            except duckdb.IOException as caught:  # a file was merged or cut while the query was prepared
                self._views.clear()
                self._accepted.clear()
                error: duckdb.Error = caught
            except duckdb.Error as caught:
                error = caught
                break
        raise RunStoreError(f"the query failed: {error_text(error)}") from error

    def _prepare(self, query: str, known: frozenset[str] | None) -> duckdb.DuckDBPyConnection:
        """Return a cursor with up-to-date views of the tables that the query names."""
        with self._lock:
            try:
                names = TABLES & (tables_of(query.replace("?", "NULL")) if known is None else known)
            except duckdb.Error:  # DuckDB cannot list the tables of every statement, and the query can contain an error
                names = TABLES & {name.lower() for name in _SOURCE.findall(query)}
            state = self.state() if names else ()
            tables = {name: self._table(name) for name in names if self._views.get(name) != state}
            accepted = {str(file.path) for _, files in self._accepted.values() for file in files}
            if self._connection is None or accepted - self._readable:  # the configuration of a connection is locked
                self._connection, self._readable = connect(accepted, memory_limit=_MEMORY), accepted
                self._views.clear()
                tables |= {name: self._table(name) for name in names - tables.keys()}
            for name, rows in tables.items():
                if isinstance(rows, str):
                    self._connection.execute(f"CREATE OR REPLACE VIEW {name} AS {rows}")
                else:
                    self._connection.register("rows_in_memory", rows)
                    self._connection.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM rows_in_memory")
                    self._connection.unregister("rows_in_memory")
                self._views[name] = state
            return self._connection.cursor()

    def accepted(self, reader: RunReader, level: str) -> list[StoredFile]:
        """Return the files of a level of a run, which queries may then read. They are checked again when the run changes.

        Raises RunStoreError if a file of the run folder, or a folder in it, is a link to somewhere else: the link would decide which
        files SQL text can read. The run folder itself may be a link.
        """
        key, state = (reader.run_dir, level), (self.leave_out_damaged, state_of(reader.run_dir))
        if key in self._accepted and self._accepted[key][0] == state:
            return self._accepted[key][1]
        root, real = reader.run_dir.resolve(), cache(Path.resolve)
        files = []
        for file in reader.files(level, self.leave_out_damaged):
            path = file.path.resolve() if file.path.is_symlink() else real(file.path.parent) / file.path.name
            if not path.is_relative_to(root):
                raise RunStoreError(
                    f"{file.path} is outside of its run folder, because of a link; copy the file into it"
                )
            files.append(replace(file, path=path))
        self._accepted[key] = state, files
        return files

    def _table(self, name: str) -> str | pa.Table:
        """Return a table of the queries: SQL of its rows, or the rows."""
        if name in LEVELS:
            files = self._stored_files(name)
            return self._trajectories(files) if name == "trajectories" else select_files_sql(name, files)
        if name != "rollup":
            return _arrow_table(self._frames[name]())
        tables = []
        for reader in self.readers():
            with self.skip_damaged(reader):
                tables.append(self._rollup(reader))
        table = pa.concat_tables(tables) if tables else ROLLUP.empty_table()
        run_ids = pa.array(self._runs_with_own_reward(), pa.string())
        table = table.append_column("own_reward", pc.is_in(table["run_id"], run_ids))
        selecting = pc.invert(pc.is_in(table["run_id"], pa.array(self._runs_without_selection(), pa.string())))
        for column in ("kept_n", "kept_mean", "kept_sd"):
            missing = pa.scalar(0 if column == "kept_n" else None, table[column].type)
            values = pc.if_else(selecting, table[column], missing)
            table = table.set_column(table.column_names.index(column), column, values)
        return table

    def _trajectories(self, files: Sequence[StoredFile]) -> str:
        """Return a SELECT of the trajectories in these files, with the columns that tell a positive reward from a correct answer."""
        # `kept` is missing in runs that select nothing, which older files store as dropped.
        selecting = f"coalesce(run_id NOT IN ({sql_list(self._runs_without_selection())}), true)"
        own_reward = f"coalesce(run_id IN ({sql_list(self._runs_with_own_reward())}), false)"
        imported = [reader.run_id for reader in self.readers() if reader.info["kind"] == "import"]
        is_import = f"coalesce(run_id IN ({sql_list(imported)}), false)"
        return (
            f"SELECT * REPLACE (CASE WHEN {selecting} THEN kept END AS kept), reward > 0 AS rewarded, "
            f"reward IS NOT NULL AND NOT {own_reward} AND NOT {is_import} AS verified, "
            f"CASE WHEN NOT {own_reward} AND {HAS_RESULT} THEN reward > 0 END AS correct "
            f"FROM ({select_files_sql('trajectories', files)})"
        )

    def _runs_without_selection(self) -> list[str]:
        return [reader.run_id for reader in self.readers() if reader.info["kind"] in ("evaluate", "chat")]

    def _runs_with_own_reward(self) -> list[str]:
        """Return the runs whose recipe names a reward function of the user or environments."""
        run_ids = []
        for reader in self.readers():
            recipe = reader.info["recipe"]
            built_in = recipe.get("rl.reward", "verify") in ("verify", "released", "tests")
            if not built_in or recipe.get("rl.environments"):
                run_ids.append(reader.run_id)
        return run_ids

    def _rollup(self, reader: RunReader) -> pa.Table:
        """Return the run's rollup, cached until the run changes."""
        state = state_of(reader.run_dir)
        if self._rollups.get(reader.run_dir, (None, None))[0] != state:
            self._rollups[reader.run_dir] = (state, reader.rollup())
        return self._rollups[reader.run_dir][1]

    def _stored_files(self, level: str) -> list[StoredFile]:
        """Return the files of all runs. Warns of runs that lack them; raises NotStored if all do."""
        files, lacking = list[StoredFile](), list[str]()
        for reader in self.readers():
            with self.skip_damaged(reader):
                run_files = self.accepted(reader, level)
                if not run_files and _should_have(reader, level):
                    lacking.append(reader.run_id)
                files += run_files
        if lacking and not files:
            others = " and the others" if lacking[1:] else ""
            raise NotStored(f"no {level} are stored in run {lacking[0]}{others}")
        if lacking:
            warnings.warn(f"no {level} are stored in {', '.join(lacking)}: skipped", stacklevel=2)
        return files

    def readers(self) -> list[RunReader]:
        """Return the runs. A run in the folder of runs that cannot be read is skipped with a warning."""
        readers = {folder: self._reader(folder) for folder in self._given}
        for folder in run_folders(self._root) if self._root is not None else []:
            if folder in readers or (folder in self._unreadable and self._unreadable[folder] == state_of(folder)):
                continue
            try:
                readers[folder] = self._reader(folder)
            except UserError as error:
                self._unreadable[folder] = state_of(folder)
                warnings.warn(f"skipped: {error}", stacklevel=2)
        return list(readers.values())

    @contextmanager
    def skip_damaged(self, reader: RunReader, *, always: bool = False) -> Iterator[None]:
        """Skip a run whose files are damaged, with a warning, if it is one of several in the folder of runs: one user of a shared folder
        could otherwise end the queries of all. A run that was opened by its own folder or id raises its error, unless `always` is set."""
        try:
            yield
        except READ_ERRORS as error:
            if not always and (reader.run_dir in self._given or len(self.readers()) == 1):
                raise
            warnings.warn(f"skipped: {error}", stacklevel=3)

    def unreadable(self) -> list[Path]:
        """Return the runs that `readers` skipped."""
        self.readers()
        return [folder for folder, state in self._unreadable.items() if state == state_of(folder)]

    def _reader(self, folder: Path) -> RunReader:
        if folder not in self._readers:
            self._readers[folder] = RunReader(folder)
        return self._readers[folder]

    def reader(self, run_id: str) -> RunReader:
        for reader in self.readers():
            if reader.run_id == run_id:
                return reader
        raise RunStoreError(f"no run {run_id!r} in {self.path}")


def state_of(run_dir: Path) -> tuple:
    """Return a value that changes when a step is written, cut or merged, and when the run starts or ends."""
    stats = []
    for name in ("metrics.jsonl", "run.json"):
        try:
            stat = os.stat(f"{run_dir}/{name}")  # noqa: PTH116  much faster than Path.stat
        except OSError:
            continue
        stats.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(stats)


def _arrow_table(frame: pd.DataFrame) -> pa.Table:
    """Return a frame as a table. A column that mixes types, such as a recipe key that is a number in one run and
    a text in another, becomes text."""
    columns = {}
    for name, values in frame.items():
        try:
            columns[str(name)] = pa.array(values, from_pandas=True)
        except (pa.ArrowException, OverflowError, UnicodeError):  # also integers and texts that Arrow cannot hold
            texts = [None if pd.isna(value) is True else str(value) for value in values]
            columns[str(name)] = pa.array([text and text.encode("utf-8", "replace").decode() for text in texts])
    return pa.table(columns)


def select_files_sql(level: str, files: Sequence[StoredFile]) -> str:
    """Return a SELECT of the committed rows of the files; without files, of an empty table with the columns."""
    nulls = {field.name: f'NULL::{_sql_type(field.type)} AS "{field.name}"' for field in LEVELS[level]}
    if not files:
        return f"SELECT {', '.join(nulls.values())} WHERE false"
    # DuckDB plans each SELECT separately, so files share one where possible.
    alike: dict[tuple[frozenset[str], tuple[int, ...] | None], list[str]] = {}
    for file in sorted(files, key=lambda file: file.partial):
        alike.setdefault((file.lacking, file.steps if file.partial else None), []).append(quoted(str(file.path)))
    selects = []
    for (lacking, steps), paths in alike.items():
        columns = ", ".join(null if name in lacking else f'"{name}"' for name, null in nulls.items())
        condition = f" WHERE step IN ({', '.join(map(str, steps))})" if steps is not None else ""
        selects.append(f"SELECT {columns} FROM read_parquet([{', '.join(paths)}], hive_partitioning=false){condition}")
    return " UNION ALL ".join(selects)


def uncompressed_text_bytes(file: StoredFile) -> int:
    """Return the approximate size of the messages of a file's steps in memory, read from its footer."""
    footer, groups = read_footer(file.path), row_groups_of(file)
    column = footer.schema.names.index("messages")
    inside = map(footer.row_group, range(footer.num_row_groups) if groups is None else groups)
    return sum(group.column(column).total_uncompressed_size for group in inside)


def _should_have(reader: RunReader, level: str) -> bool:
    """Return whether the run has trajectories that should have rows of this level."""
    rollup = reader.rollup(columns=("step", "rows_trajectories", "calls_mean")).to_pylist()
    if not any(row["rows_trajectories"] for row in rollup):
        return False
    return level != "calls" or any(row["calls_mean"] is None or row["calls_mean"] > 0 for row in rollup)


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return _sql_type(kind.value_type) + "[]"
    if pa.types.is_map(kind):
        return f"MAP({_sql_type(kind.key_type)}, {_sql_type(kind.item_type)})"
    return {
        pa.string(): "VARCHAR", pa.bool_(): "BOOLEAN", pa.int16(): "SMALLINT", pa.int32(): "INTEGER", pa.float16(): "FLOAT",
        pa.float32(): "FLOAT", pa.float64(): "DOUBLE",
    }[kind]  # fmt: skip
