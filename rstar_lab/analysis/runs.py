"""Runs as data frames at four levels: runs, steps, trajectories, tool calls. Queries run in DuckDB.

Queries read only the columns and files that they need. Transcripts are read on request, one at a time. Every query sees
a run that is being written up to its last committed step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rstar_lab.analysis.filters import Where, selects_steps, where_sql
from rstar_lab.analysis.inspector.notes import read_notes
from rstar_lab.analysis.queries import check_query
from rstar_lab.analysis.text_search import excerpt, in_any_case, search_pattern
from rstar_lab.analysis.token_frame import token_frame
from rstar_lab.analysis.views import Views, select_files_sql, uncompressed_text_bytes
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader, read_steps, run_folders
from rstar_lab.runs.schema import REWARDS_FILE, TRANSCRIPTS
from rstar_lab.untrusted.files import reading
from rstar_lab.untrusted.parquet import read_parquet
from rstar_lab.untrusted.recipes import ForeignRecipe

_SEARCH_BYTES = 64 * 2**20  # size of the texts cached for the next search
_FOUND = ["traj_id", "run_id", "stage", "step", "messages"]


class Runs:
    """Runs opened for reading with `open_runs`. Thread-safe."""

    def __init__(self, folders: Sequence[Path], root: Path | None, timeout_s: float | None = None):
        frames = {"runs": self.runs, "steps": self.steps, "rewards": self.rewards}
        self._views = Views(folders, root, frames, timeout_s)
        self._vocabulary = cache(lambda run_id: self._views.reader(run_id).vocabulary())
        # Texts of the last search: consecutive searches usually cover the same steps.
        self._searched: tuple[tuple, pa.Table | None] = (), None

    @property
    def path(self) -> str:
        """The opened folders as text."""
        return self._views.path

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of a run. Raises RunStoreError if no run has this id.

        Args:
            run_id: Its id.
        """
        return self._views.reader(run_id).run_dir

    # Levels

    def runs(self) -> pd.DataFrame:
        """Return one row per run: id, kind, status, created, seed, parent, steps, trajectories, path, `recipe.<key>`.

        A run that cannot be read has the status "unreadable".
        """
        rows: list[dict[str, Any]] = []
        unreadable = {"status": "unreadable"}
        for reader in self._views.readers():
            try:
                rows.append(_run_row(reader))
            except READ_ERRORS as error:
                rows.append({"run_id": reader.run_id, "error": str(error), "path": str(reader.run_dir)} | unreadable)
        rows += [{"run_id": folder.name, "path": str(folder)} | unreadable for folder in self._views.unreadable()]
        return pd.DataFrame(rows, columns=None if rows else ["run_id", "kind", "status"])

    def steps(self, where: Where = None) -> pd.DataFrame:
        """Return one row per step: run_id, stage, step, the trainer's metrics, and n, mean and sd of the rollup.

        Args:
            where: A filter of steps: run_id, stage, step, steps, or SQL on the columns of the rollup.
        """
        rollup = self._query("SELECT * FROM rollup", self.condition(where, "steps"), order_by="run_id, step")
        measured = self.trainer_metrics()
        clashes = set(measured.columns) & set(rollup.columns) - {"run_id", "stage", "step"}
        measured = measured.rename(columns={name: f"trainer.{name}" for name in clashes})
        return measured.merge(rollup, on=["run_id", "stage", "step"], how="right", sort=False)

    def trainer_metrics(self) -> pd.DataFrame:
        """Return one row per step: run_id, stage, step and the metrics that the trainer wrote, without the rollup."""
        lines = []
        for reader in self._views.readers():
            with self._views.skip_damaged(reader):
                lines += [line | {"run_id": reader.run_id} for line in reader.metrics()]
        return pd.DataFrame(lines, columns=None if lines else ["run_id", "stage", "step"])

    def trajectories(
        self,
        where: Where = None,
        *,
        columns: Sequence[str] | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> pd.DataFrame:
        """Return one row per trajectory, including dropped ones.

        Besides the stored columns: rewarded (reward > 0), verified (the reward is the result of answer verification)
        and correct (the answer is correct; null if the run has a reward function of the user).

        Args:
            where: SQL text or a mapping, see `filters.Filter`.
            columns: Columns to read. Default: all.
            order_by: SQL, such as "reward DESC, step".
            limit: Maximum number of rows.
            offset: Rows to skip.

        Raises:
            RunStoreError: For an unknown column or a damaged file.
        """
        query = f"SELECT {_names(columns)} FROM trajectories"
        return self._query(query, self.condition(where), order_by=order_by, limit=limit, offset=offset)

    def calls(self, where: Where = None, *, columns: Sequence[str] | None = None, **options: Any) -> pd.DataFrame:
        """Return one row per tool call. Warns about runs without stored calls.

        Args:
            where: SQL text or a mapping, as in `trajectories`. Keys that are not columns of calls select the calls of these rollouts.
            columns: Columns to read. Default: all.
            options: order_by, limit and offset, as in `trajectories`.

        Raises:
            RunStoreError: If no run has stored calls.
        """
        return self._query(f"SELECT {_names(columns)} FROM calls", self.condition(where, "calls"), **options)

    def rewards(self, where: Where = None) -> pd.DataFrame:
        """Return one row per trajectory of imported runs: traj_id, run_id and one column per reward function.

        Args:
            where: As in `trajectories`. Runs without reward columns have no rows.
        """
        tables = []
        for reader in self._views.readers():
            file = reader.run_dir / REWARDS_FILE
            with self._views.skip_damaged(reader):
                if file.exists():
                    tables.append(_reward_columns(file).assign(run_id=reader.run_id))
        if not tables:
            return pd.DataFrame(columns=["traj_id", "run_id"])
        frame = pd.concat(tables, ignore_index=True)
        condition = self.condition(where)
        if condition != "TRUE":
            chosen = self.sql(f"SELECT traj_id FROM trajectories WHERE {condition}").traj_id
            frame = frame[frame.traj_id.isin(chosen)].reset_index(drop=True)
        return frame

    def count(self, where: Where = None) -> int:
        """Return the number of trajectories.

        Args:
            where: As in `trajectories`.
        """
        return int(self._query("SELECT count(*) AS n FROM trajectories", self.condition(where))["n"][0])

    def condition(self, where: Where, table: str = "trajectories") -> str:
        """Return a filter as an SQL condition, see `filters.where_sql`.

        Args:
            where: SQL text or a mapping.
            table: trajectories, calls, transcripts or steps.
        """
        return where_sql(where, table, noted=self.notes)

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return the notes of the inspector: traj_id to {traj_id, note, tags, time}. Skips a damaged file with a warning."""
        notes: dict[str, dict[str, Any]] = {}
        for reader in self._views.readers():
            with self._views.skip_damaged(reader, always=True):
                notes |= read_notes(reader.run_dir)
        return notes

    # One trajectory

    def transcript(self, traj_id: str) -> pd.DataFrame:
        """Return one row per message: traj_id, message, turn (model turn, from 0), role, content, tool, outcome.

        `.attrs` of the frame has question, truth, run_id, stage and step. Raises RunStoreError if the transcript is missing.

        Args:
            traj_id: Id of the trajectory.
        """
        row = self._transcript_row(self._place(traj_id), "question, truth, messages")
        rows, turn = [], -1
        for number, message in enumerate(read_messages(row["messages"])):
            turn += message["role"] == "assistant"
            values = (message.get(name) for name in ("role", "content", "tool", "outcome"))
            rows.append((traj_id, number, max(turn, 0), *values))
        frame = pd.DataFrame(rows, columns=["traj_id", "message", "turn", "role", "content", "tool", "outcome"])
        frame.attrs = {key: row[key] for key in ("question", "truth", "run_id", "stage", "step")}
        return frame

    def record(self, traj_id: str, place: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a transcript as stored (columns of TRANSCRIPTS), and token_texts if the run has a vocabulary.

        Args:
            traj_id: Id of the trajectory.
            place: The trajectory's row, if it has been read before.
        """
        row = self._transcript_row(self._place(traj_id) if place is None else place, "*")
        return row | {"token_texts": self.texts(row["run_id"], row["response_ids"])}

    def tokens(self, traj_id: str) -> pd.DataFrame:
        """Return one row per response token: position, token_id, text, model, turn, engine_log_prob, trainer_log_prob, mismatch, entropy,
        advantage, after.

        model: generated by the model, so part of the loss. mismatch: engine minus trainer log-prob. entropy: nats. after: the last tool
        response before the token, "ok" or "error"; None before the first. Values that the run did not store are NaN; text is None
        without a vocabulary. Raises RunStoreError if the run has no token arrays.

        Args:
            traj_id: Id of the trajectory.
        """
        arrays = "response_ids, loss_mask, engine_log_probs, trainer_log_probs, entropy"
        place = self._place(traj_id)
        row = self._transcript_row(place, arrays)
        if row["response_ids"] is None:
            raise RunStoreError(
                f"trajectory {traj_id} has no token arrays: the run is an import, or the recipe key `token_arrays` excluded them"
            )
        files = self._views.files("calls", "run_id = ? AND step = ?", [place["run_id"], place["step"]])
        source = select_files_sql("calls", files)
        query = f"SELECT position, outcome FROM ({source}) WHERE traj_id = ? AND position IS NOT NULL ORDER BY position"
        calls = self.sql(query, [traj_id]).itertuples(index=False)
        return token_frame(place | row, self.texts(row["run_id"], row["response_ids"]), calls)

    def texts(self, run_id: str, ids: Sequence[int] | np.ndarray | None) -> list[str | None] | None:
        """Return the text of token ids by the run's vocabulary, or None if it has none.

        Args:
            run_id: Id of the run.
            ids: Token ids.
        """
        vocabulary = self._vocabulary(run_id)
        if vocabulary is None or ids is None:
            return None
        return [vocabulary[token] if 0 <= token < len(vocabulary) else None for token in ids]

    def _place(self, traj_id: str) -> dict[str, Any]:
        """Return run, stage, step and advantage of a trajectory, which limit queries to a few files."""
        columns = "traj_id, run_id, stage, step, coalesce(advantage, 'nan') AS advantage"
        rows = self.arrow(f"SELECT {columns} FROM trajectories WHERE traj_id = ?", [traj_id]).to_pylist()
        if not rows:
            raise RunStoreError(f"no trajectory {traj_id!r} in {self.path}")
        return rows[0]

    def _transcript_row(self, place: Mapping[str, Any], columns: str) -> dict[str, Any]:
        traj_id, run_id, step = place["traj_id"], place["run_id"], place["step"]
        reader = self._views.reader(run_id)
        file = next((file for file in self._views.accepted(reader, "transcripts") if step in file.steps), None)
        query = f"SELECT {columns} FROM read_parquet(?, hive_partitioning=false) WHERE traj_id = ? AND step = ?"
        table = self._views.arrow(query, [str(file.path), traj_id, step]) if file else None
        if table is None or not table.num_rows:
            raise RunStoreError(f"trajectory {traj_id} of run {run_id} has no transcript")
        row = {name: table[name][0].as_py() for name in table.column_names}
        return row | {"run_id": run_id, "stage": place["stage"], "step": step}

    # Queries

    def sql(
        self,
        query: str,
        parameters: Sequence[Any] | None = None,
        *,
        steps: Sequence[tuple[str, int]] | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> pd.DataFrame:
        """Run a DuckDB query over the tables runs, steps, rollup, rewards, trajectories, calls and transcripts.

        Args:
            query: One SELECT statement. It reads nothing but these tables and their files.
            parameters: Each `?` takes the next one.
            steps: Pairs (run_id, step) to which `trajectories` is limited; only their files are read.
            limit: Maximum number of rows.
            timeout_s: Time after which the query fails. Default: none.

        Raises:
            RunStoreError: With DuckDB's message, if the query fails.
        """
        check_query(query)
        return self._views.sql(query, parameters, steps, limit=limit, timeout_s=timeout_s)

    def arrow(self, query: str, parameters: Sequence[Any] | None = None) -> pa.Table:
        """Like `sql`, but return an Arrow table, which is much faster for lists of numbers.

        Args:
            query: One SELECT statement.
            parameters: Each `?` takes the next one.
        """
        check_query(query)
        return self._views.arrow(query, parameters)

    def search(self, text: str, where: Where = None, *, limit: int = 100) -> pd.DataFrame:
        """Return the trajectories whose messages contain a text (ignoring case): traj_id, run_id, stage, step, excerpt.

        Args:
            text: The text.
            where: As in `trajectories`. Limit it to a run and a range of steps: transcripts are large.
            limit: Maximum number of rows.
        """
        condition, chosen = self.condition(where), list[list[str]]()
        if selects_steps(where):
            steps = self.condition(where, "steps")
        else:
            steps = f"(run_id, step) IN (SELECT run_id, step FROM trajectories WHERE {condition})"
            chosen = [self.sql(f"SELECT traj_id FROM trajectories WHERE {condition}").traj_id.tolist()]
        pattern = search_pattern(text.lower())
        scope = (steps, self._views.state())
        known, table = self._searched
        if table is None or known != scope:
            files = self._views.files("transcripts", steps)
            if known != scope or sum(map(uncompressed_text_bytes, files)) > _SEARCH_BYTES:
                self._searched = scope, None
                only = "AND traj_id IN (SELECT unnest(?::VARCHAR[]))" if chosen else ""
                rows = f"SELECT {', '.join(_FOUND)} FROM ({select_files_sql('transcripts', files)})"
                query = f"{rows} WHERE regexp_matches(messages, ?) {only} LIMIT {int(limit)}"
                found = self._views.rows(query, [in_any_case(pattern), *chosen], tables=frozenset())
                return _hits(found, pattern)
            # Faster from the second search on. The pattern has both cases of the letters that are not lowered here.
            table = pa.concat_tables([read_steps(file, _FOUND) for file in files] or [TRANSCRIPTS.empty_table()])
            table = table.append_column("small", pc.ascii_lower(table["messages"]))
            self._searched = scope, table
        table = table.filter(pc.match_substring_regex(table["small"], pattern))
        if chosen:
            table = table.filter(pc.is_in(table["traj_id"], pa.array(chosen[0], pa.string())))
        return _hits(zip(*table.select(_FOUND).slice(0, limit).to_pydict().values(), strict=True), pattern)

    def _query(
        self, select: str, condition: str, *, order_by: str | None = None, limit: int | None = None, offset: int = 0
    ) -> pd.DataFrame:
        query = f"{select} WHERE {condition}"
        if order_by:
            query += f" ORDER BY {order_by}"
        if limit is not None:
            query += f" LIMIT {int(limit)} OFFSET {int(offset)}"
        return self.sql(query)

    def __len__(self) -> int:
        return len(self._views.readers())

    def __repr__(self) -> str:
        return f"<Runs: {len(self)} in {self.path}>"


def open_runs(
    path: str | Path | Iterable[str | Path] = "runs",
    *,
    run_ids: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> Runs:
    """Open a folder of runs, the folder of one run, or several of them. Raises RunStoreError if a folder or run does not exist.

    Args:
        path: Folder or folders.
        run_ids: Open only these runs. Without it, new runs in the folder appear in later queries.
        timeout_s: Seconds after which a query without a limit of its own raises RunStoreError.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(item) for item in path]
    folders = [item for item in paths if (item / "run.json").exists()]
    roots = [item for item in paths if item not in folders]
    inside = [run for root in roots for run in run_folders(root)]  # raises if a folder does not exist
    if run_ids is not None:
        by_id = {folder.name: folder for folder in [*folders, *inside]}
        if missing := [run_id for run_id in run_ids if run_id not in by_id]:
            raise RunStoreError(f"no run {missing[0]!r}; there are: {', '.join(sorted(by_id)) or 'none'}")
        return Runs([by_id[run_id] for run_id in run_ids], None, timeout_s)
    if len(roots) == 1:
        return Runs(folders, roots[0], timeout_s)
    return Runs(folders + inside, None, timeout_s)


RunsLike = Runs | str | Path  # opened runs, the folder of a run, or a folder of runs


def as_runs(runs: RunsLike) -> Runs:
    """Return opened runs; a path is opened with `open_runs`."""
    if isinstance(runs, pd.DataFrame):
        raise RunStoreError('a data frame is not a folder of runs; its rows are selected by where={"traj_id": [...]}')
    return runs if isinstance(runs, Runs) else open_runs(runs)


def _hits(rows: Iterable[tuple[Any, ...]], pattern: str) -> pd.DataFrame:
    found = [(*place, excerpt(messages, pattern)) for *place, messages in rows]
    return pd.DataFrame(found, columns=[*_FOUND[:-1], "excerpt"])


def training_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `Runs.runs` that are training runs; all rows if there is none."""
    trained = table[table.kind == "train"]
    return trained if len(trained) else table


_OF_ONE_RUN = frozenset({"name", "label", "seed", "runs", "sft.seed"})


def recipe_changes(recipes: pd.DataFrame) -> list[str]:
    """Return for each row the recipe keys that differ between the rows, such as "rl.lr=0.001, rl.group_size=8".

    recipes: columns `recipe.<key>`, as in `Runs.runs`. Names, labels and seeds are left out.
    """
    texts = {
        str(name).removeprefix("recipe."): recipes[name].map(str) for name in recipes if str(name).startswith("recipe.")
    }
    changed = {key: values for key, values in texts.items() if key not in _OF_ONE_RUN and values.nunique() > 1}
    return [", ".join(f"{key}={values.iloc[row]}" for key, values in changed.items()) for row in range(len(recipes))]


def named_rows(frame: pd.DataFrame) -> list[Any]:
    """Return the rows as named tuples, typed Any for the type checker."""
    return list(frame.itertuples(index=False))


def model_title(folder: str) -> str:
    """Return a name for a model from the path of its folder: its run and step or stage, its name on the Hub, or the folder's name."""
    run, kind, last = ("", "", "", *PurePath(folder).parts)[-3:]
    if kind == "checkpoints" and last.startswith("step="):
        return f"{run}, step {last.removeprefix('step=').lstrip('0') or 0}"
    if kind == "stages":
        return f"{run}, stage {last}"
    if (kind, last) == ("sft", "model"):
        return run
    if kind == "snapshots" and run.startswith("models--"):
        return run.removeprefix("models--").replace("--", "/")
    return f"{kind}, {last}" if last == "base" else last


def _run_row(reader: RunReader) -> dict[str, Any]:
    info = reader.info
    parent, model = info.get("parent") or {}, (info.get("extra") or {}).get("model")
    rollup = reader.rollup(columns=("step", "rows_trajectories"))
    return {
        "run_id": info["run_id"], "kind": info["kind"], "status": reader.status,
        "created": pd.Timestamp(created) if (created := info.get("created")) else pd.NaT, "seed": info.get("seed"),
        "model": model_title(model) if isinstance(model, str) else None, "parent_run": parent.get("run"),
        "parent_step": parent.get("step"), "attempts": info.get("attempts"), "steps": rollup.num_rows,
        "trajectories": sum(rollup["rows_trajectories"].to_pylist()), "commit": info.get("commit"), "path": str(reader.run_dir),
        **recipe_columns(info["recipe"]),
    }  # fmt: skip


def recipe_columns(recipe: ForeignRecipe) -> dict[str, Any]:
    """Return a recipe as values by `recipe.<key>`."""
    return {f"recipe.{key}": value for key, value in _flat(recipe.for_display())}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item) if isinstance(item, list | dict) else item


def _reward_columns(file: Path) -> pd.DataFrame:
    """Return the reward columns of an imported run. Raises DataError if the file is damaged or has other columns."""
    frame = read_parquet(file).to_pandas(ignore_metadata=True)
    with reading(file):
        numbers = [name for name in frame if name not in ("traj_id", "run_id")]
        return pd.concat([frame[["traj_id"]].astype(str), frame[numbers].astype(float)], axis=1)


def _names(columns: Sequence[str] | None) -> str:
    return ", ".join('"' + name.replace('"', '""') + '"' for name in columns) if columns else "*"
