"""Data of an inspector: pages of the list, one rollout, its group, and text search."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rstar_lab.analysis import queries
from rstar_lab.analysis.filters import sql_list, sql_literal
from rstar_lab.analysis.inspector.listing import Listing, frame_rows, to_json_rows, to_json_value
from rstar_lab.analysis.text_search import search_pattern, unescaped
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import MODEL_ERRORS, Outcome
from rstar_lab.runs.errors import NotStored
from rstar_lab.untrusted.text import visible

SEARCH_LIMIT, SEARCH_S = 500, 5.0
QUESTION_LENGTH = 160  # maximum characters in the list
_SNIPPET = 48


class Source(Listing):
    """Reads the rows of runs for the inspector. All results are JSON values."""

    def _transcripts(self, query: str) -> list[Any]:
        """Run a query that reads transcripts, which are never copied into memory, and return its rows."""
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
            "stage": [str(stage) for (stage,) in self._fetch(stages)[1] if stage is not None],
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

        Problems without a stored transcript are left out. Raises UserError if the transcripts cannot be read.
        """
        problems = {row["traj_id"]: row["problem_id"] for row in rows}
        keys = "".join(f"{key} IN ({sql_list({row[key] for row in rows})}) AND " for key in ("run_id", "step"))
        ids = sql_list(problems)
        query = f"SELECT traj_id, left(question, {QUESTION_LENGTH}) FROM transcripts WHERE {keys}traj_id IN ({ids})"
        try:
            texts = self._transcripts(query) if rows else []
        except NotStored:
            return {}
        except UserError as error:
            raise UserError(f"the questions of the list cannot be read: {error}") from error
        return {problems[traj_id]: " ".join(visible(text).split()) for traj_id, text in texts if text}

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
