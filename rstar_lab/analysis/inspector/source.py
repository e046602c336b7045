"""Data of an inspector: pages of the list, one rollout, its group, and text search, from a run store or data frames."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from rstar_lab.analysis import queries
from rstar_lab.analysis.filters import sql_list, sql_literal
from rstar_lab.analysis.inspector.listing import Listing, frame_rows, query_errors, to_json_rows, to_json_value
from rstar_lab.analysis.queries import check_query, connect, time_limit
from rstar_lab.analysis.text_search import search_pattern, unescaped
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import MODEL_ERRORS, Outcome
from rstar_lab.runs.questions import QUESTION_LENGTH
from rstar_lab.untrusted.text import visible

SEARCH_LIMIT, SEARCH_S = 500, 5.0
_SNIPPET = 48


class Store(Protocol):
    """Interface that an inspector needs from `open_runs(...)`: SQL on trajectories and transcripts, and one transcript."""

    def sql(
        self, query: str, *, steps: Sequence[tuple[str, int]] | None = None, timeout_s: float | None = None
    ) -> pd.DataFrame: ...

    def record(self, traj_id: str, place: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def copied_questions(self) -> dict[str, dict[str, str]]: ...


class Frames:
    """A store of data frames with the columns of TRAJECTORIES and TRANSCRIPTS, for rows that are not in a run folder."""

    def __init__(self, trajectories: pd.DataFrame, transcripts: pd.DataFrame | None = None) -> None:
        self._lock = threading.Lock()  # cursors of DuckDB do not see registered frames
        self._connection = connect()
        self._connection.register("rows", trajectories)
        lacking = [name for name in ("rewarded", "correct") if name not in trajectories and "reward" in trajectories]
        derived = "".join(f", reward > 0 AS {name}" for name in lacking)
        self._connection.execute(f"CREATE VIEW trajectories AS SELECT *{derived} FROM rows")
        self._transcripts = transcripts
        if transcripts is not None:
            self._connection.register("transcripts", transcripts)

    def sql(
        self, query: str, *, steps: Sequence[tuple[str, int]] | None = None, timeout_s: float | None = None
    ) -> pd.DataFrame:
        check_query(query)
        with self._lock, time_limit(self._connection, timeout_s):
            return self._connection.execute(query).df()

    def copied_questions(self) -> dict[str, dict[str, str]]:
        return {}

    def record(self, traj_id: str, place: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._transcripts is None:
            raise UserError("these rows have no transcripts; pass them with Frames(trajectories, transcripts)")
        transcripts = self._transcripts[self._transcripts["traj_id"] == traj_id]
        if transcripts.empty:
            raise UserError(f"{traj_id}: the run did not store a transcript of this rollout")
        return {str(key): value for key, value in transcripts.iloc[0].to_dict().items()}


StoreLike = Store | pd.DataFrame | str | Path


def as_store(store: StoreLike) -> Store:
    """Return a store. A path is opened with `open_runs`; a data frame has the columns of TRAJECTORIES."""
    if isinstance(store, str | Path):
        from rstar_lab.analysis.runs import open_runs

        return open_runs(store)
    return Frames(store) if isinstance(store, pd.DataFrame) else store


class Source(Listing):
    """Reads the rows of a store for the inspector. All results are JSON values."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        needed = {"traj_id", "run_id", "step", "group_id", "problem_id", "sample", "reward"}
        if missing := needed - self.columns.keys():
            raise UserError(
                f"the rows have no column {sorted(missing)[0]!r}; the inspector needs the columns {', '.join(sorted(needed))}"
            )

    def _transcripts(self, query: str) -> list[Any]:
        """Run a query that reads transcripts, which are never copied into memory, and return its rows."""
        with query_errors():
            return frame_rows(self.store.sql(query, timeout_s=queries.FILTER_S))[1]

    def choices(self) -> dict[str, Any]:
        """Return the choices of the filter bar: runs, stages, first and last step, outcomes."""
        blocks = self.blocks("TRUE")
        steps = [to_json_value(step) for step, _, _ in blocks if not pd.isna(step)]
        stages = "SELECT DISTINCT stage FROM trajectories ORDER BY 1"
        rewards = "SELECT count_if(correct IS NULL AND reward IS NOT NULL), count_if(reward IS NULL) FROM trajectories"
        of_user, unscored = self._fetch(rewards)[1][0]
        return {
            "own_reward": bool(of_user),
            "unscored": bool(unscored),
            "first": min(steps, default=None),
            "last": max(steps, default=None),
            "total": sum(n for *_, n in blocks),
            "run_id": self.runs,
            "stage": [str(stage) for (stage,) in self._fetch(stages)[1] if stage is not None]
            if "stage" in self.columns
            else [],
            "outcomes": [str(outcome) for outcome in Outcome],
            "model_errors": sorted(map(str, MODEL_ERRORS)),
        }

    def row(self, traj_id: str) -> dict[str, Any]:
        rows = to_json_rows(*self._fetch(f"SELECT * FROM trajectories WHERE traj_id = {sql_literal(traj_id)} LIMIT 1"))
        if not rows:
            raise UserError(f"these runs have no trajectory {visible(traj_id)!r}")
        return rows[0]

    def siblings(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rollouts of the same group (run, step and problem), ordered by sample."""
        keys = " AND ".join(f"{key} = {sql_literal(row[key])}" for key in ("run_id", "step", "group_id"))
        query = f"SELECT * FROM trajectories WHERE {keys} ORDER BY sample, traj_id LIMIT 512"
        return to_json_rows(*self._fetch(query))

    def questions(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return problem id to the beginning of its question. One row (traj_id, run_id, step, problem_id) per problem.

        Problems without a stored transcript are left out.
        """
        copied = self.store.copied_questions()
        texts = {row["problem_id"]: copied.get(row["run_id"], {}).get(row["problem_id"], "") for row in rows}
        texts |= self._stored_questions([row for row in rows if row["run_id"] not in copied])
        return {problem: " ".join(visible(text).split()) for problem, text in texts.items() if text}

    def _stored_questions(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        if not rows:
            return {}
        try:
            columns = {name for name, *_ in self._transcripts("DESCRIBE transcripts")}
        except UserError:  # data frames without transcripts
            return {}
        if "question" not in columns:
            return {}
        problems = {row["traj_id"]: row["problem_id"] for row in rows}
        keys = [name for name in ("run_id", "step") if name in columns]
        where = "".join(f"{key} IN ({sql_list({row[key] for row in rows})}) AND " for key in keys)
        texts = self._transcripts(
            f"SELECT traj_id, left(question, {QUESTION_LENGTH}) FROM transcripts WHERE {where}traj_id IN ({sql_list(problems)})"
        )
        return {problems[traj_id]: text for traj_id, text in texts}

    def search(self, text: str, where: str, *, seconds: float = SEARCH_S) -> dict[str, Any]:
        """Find trajectories of the filtered list whose messages contain `text`, newest steps first.

        Lower-case text matches any case; other text matches exactly. The search stops at SEARCH_LIMIT hits or after
        `seconds`. Returns {"hits": {traj_id: text around the first match}, "first", "last": range of steps searched,
        "whole": whether the complete list was searched}.
        """
        any_case = text == text.lower()
        pattern, flag = search_pattern(text, any_case=any_case), "i" if any_case else "c"
        around = f"(?s).{{0,{_SNIPPET}}}(?:{pattern}).{{0,{_SNIPPET}}}"
        around = f"regexp_extract(messages, {sql_literal(around)}, 0, '{flag}')"
        hit = f"regexp_matches(messages, {sql_literal(pattern)}, '{flag}')"
        blocks = self.blocks(where)
        runs = sorted({run_id for _, run_id, _ in blocks})
        steps = list(dict.fromkeys(step for step, _, _ in blocks))
        hits: dict[str, str] = {}
        done, stride, began = 0, 4, time.monotonic()
        while done < len(steps) and len(hits) < SEARCH_LIMIT and time.monotonic() - began < seconds:
            part = steps[done : done + stride]
            # Direct comparisons of run and step let DuckDB skip whole files.
            block = f"run_id IN ({sql_list(runs)}) AND step BETWEEN {sql_literal(part[-1])} AND {sql_literal(part[0])}"
            only = f"AND traj_id IN (SELECT traj_id FROM trajectories WHERE ({where}) AND {block})"
            matches = self._transcripts(
                f"SELECT traj_id, {around} FROM transcripts WHERE {block} {'' if where == 'TRUE' else only} AND ({hit}) "
                f"ORDER BY step DESC, traj_id LIMIT {SEARCH_LIMIT - len(hits)}"
            )
            hits |= {str(traj_id): visible(unescaped(snippet)) for traj_id, snippet in matches}
            done, stride = done + len(part), 2 * stride
        ends = {"last": steps[0], "first": steps[done - 1]} if done else {"last": None, "first": None}
        return {"hits": hits, **ends, "whole": done == len(steps) and len(hits) < SEARCH_LIMIT}

    def record(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the transcript of a row: columns of TRANSCRIPTS, and token_texts if the run stored its vocabulary."""
        return self.store.record(row["traj_id"], row)

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that have trajectories."""
        return sorted({str(run_id) for _, run_id, _ in self.blocks("TRUE") if run_id is not None})

    def run_dir(self, run_id: str) -> Path | None:
        """Return the folder of a run, or None if it is not on this machine."""
        finder = getattr(self.store, "run_dir", None)
        folder = finder(run_id) if callable(finder) else None
        return Path(folder) if folder and Path(folder).is_dir() else None
