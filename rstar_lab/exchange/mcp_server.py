"""A read-only server of the Model Context Protocol over a folder of runs, for assistants: `rstar-lab mcp`.

Texts in the answers come from models, tools and other people's runs. They have a bounded size and no characters that a screen
does not show. SQL reads nothing but the tables of the runs, with an allow-list of functions, in a process of its own.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from rstar_lab import __version__
from rstar_lab.analysis.alerts import find_alerts
from rstar_lab.analysis.comparison import DEFAULT_METRICS, compare
from rstar_lab.analysis.metrics import curves, get_metric, measure
from rstar_lab.analysis.queries import check_foreign_query, checked_order
from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.exchange.tool_process import ToolProcess
from rstar_lab.rl.recipe.keys import find_keys
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.text import printable

Row = dict[str, Any]
Filter = str | dict[str, Any] | None
SKILL, INSTRUCTIONS = (Path(__file__).with_name(f"{name}.md") for name in ("SKILL", "INSTRUCTIONS"))

ANSWER_CHARS = 60_000  # of an answer as JSON; lists are cut to fit
CELL_CHARS = 2_000  # of a text in a table
MESSAGE_CHARS = 8_000  # of a message of a transcript
ITEMS = 100  # of a list in a cell
ROWS = 200  # of a table
QUERY_S, CALL_S = 30.0, 600.0  # time of a query, and of a call of another tool

_LISTED = ("run_id", "kind", "status", "created", "seed", "parent_run", "parent_step", "steps", "trajectories")
_ROLLOUT = (
    "traj_id", "run_id", "stage", "step", "group_id", "problem_id", "sample", "reward", "correct", "kept", "advantage", "turns",
    "calls", "errors", "outcomes", "response_tokens", "stop_reason", "answer",
)  # fmt: skip
# Format characters (zero-width, tags, variation selectors): a screen shows nothing, but a language model reads them.
_UNSEEN = re.compile("[\u00ad\u180e\ufeff\u200b-\u200f\u2060-\u206f\ufe00-\ufe0f\U000e0000-\U000e01ef]")


class RunReports:
    """What the tools of the server answer. Each returns JSON values and texts of any size.

    Args:
        runs_dir: Folder of runs, or the folder of one run.
        query_s: Time limit of a query.
    """

    def __init__(self, runs_dir: Path, query_s: float):
        self.folder, self._query_s = runs_dir, query_s
        self.runs = self._open_limited(runs_dir)

    def _open_limited(self, path: Path) -> Runs:
        return open_runs(path, timeout_s=self._query_s)

    def list_runs(self, kind: str = "", limit: int = 50) -> Row:
        """List the runs, newest first: kind, status, seed, parent, number of steps and rollouts.

        kind: only runs of this kind: train, evaluate, chat, import or fork.
        """
        frame = self.runs.runs()
        if kind and len(frame):
            frame = frame[frame.kind == kind]
        if "created" in frame:
            frame = frame.sort_values("created", ascending=False)
        rows = _rows(frame[[name for name in (*_LISTED, "error") if name in frame]].head(_limit(limit)))
        for row in rows:
            row["open"] = self._open({"run_id": row["run_id"]})
        return {"runs": rows, "total": len(frame)}

    def describe_run(self, run_id: str) -> Row:
        """Describe a run: recipe, versions, hardware, and pass rate, tool errors and length of its last step with intervals."""
        folder = self.runs.run_dir(run_id)
        info, runs = RunReader(folder).info, self._open_limited(folder)
        steps = runs.sql("SELECT stage, step, rows_trajectories AS n FROM rollup ORDER BY step")
        answer: Row = {"run_id": run_id, "open": self._open({"run_id": run_id}), "steps": len(steps)}
        if len(steps):
            last = steps.iloc[-1]
            where = {"step": int(last.step)}
            names = ["pass1", "tool_error_rate", "response_tokens", "truncation_rate"]
            answer["last_step"] = {
                "stage": last.stage, "step": last.step, "metrics": _estimates(measure(runs, names, where=where)),
                **self._examples(run_id, [int(last.step)])[int(last.step)],
            }  # fmt: skip
            answer["stages"] = _rows(steps.groupby("stage", sort=False).step.agg(["min", "max"]).reset_index())
        return answer | {"info": {name: value for name, value in info.items() if value not in (None, {}, [])}}

    def curves(self, run_ids: list[str], metrics: list[str], where: Filter = None, points: int = 30) -> Row:
        """Return metrics per step with 95% intervals and n, for at most `points` steps of each run, evenly spaced. If evaluations during
        training are asked for, the steps with an evaluation come first.

        metrics: pass1, tool_error_rate, response_tokens, entropy, kept and others; an unknown name is answered with all names;
        eval/SET/pass1 for evaluations during training. where: filter of the rollouts, SQL or an object.
        The traj_id of a row is one rollout of the step.
        """
        rows: list[Row] = []
        logged = [name for name in metrics if get_metric(name).logged]
        measured = [name for name in metrics if name not in logged]
        for run_id in run_ids:
            runs = self._open_limited(self.runs.run_dir(run_id))
            steps = runs.sql("SELECT stage, step FROM rollup ORDER BY step")
            if not len(steps):
                continue
            trained = curves(runs, logged).set_index("step") if logged else None
            evaluated = np.zeros(len(steps), dtype=bool)
            if trained is not None:
                evaluated = steps.step.isin(trained.index[trained[logged].notna().any(axis=1)]).to_numpy()
            most = min(max(points, 1), ROWS)
            first = _spread(np.flatnonzero(evaluated), most)
            chosen = np.sort(np.concatenate([first, _spread(np.flatnonzero(~evaluated), most - len(first))]))
            numbers = [int(step) for step in steps.step.iloc[chosen]]
            table = measure(runs, measured, by=("step",), where=_all({"step": numbers}, where)) if measured else None
            examples = self._examples(run_id, numbers)
            for stage, step in steps.iloc[chosen].itertuples(index=False):
                found = {} if table is None else _estimates(table[table.step == step])
                if trained is not None:
                    found |= {name: {"value": trained[name].get(step)} for name in logged}
                rows.append({"stage": stage, "step": int(step), **examples.get(int(step), {}), "metrics": found})
        meaning = {name: get_metric(name).formula for name in metrics}
        return {"meaning": meaning, "steps": rows, "open": self._open(_all({"run_id": run_ids}, where))}

    def query(self, sql: str, limit: int = 100) -> Row:
        """Run one SELECT of DuckDB over the tables runs, steps, rollup, rewards, trajectories, calls and transcripts.

        Functions: arithmetic, comparisons of texts and lists, JSON, aggregates, windows, unnest. `DESCRIBE trajectories` shows
        columns. Select traj_id, run_id and step of what you report. Limit transcripts to a run and a step: they are large.
        """
        check_foreign_query(sql)
        frame = self.runs.sql(sql, limit=_limit(limit) + 1)
        rows = [self._linked(row) for row in _rows(frame.head(_limit(limit)))]
        ids = [row["traj_id"] for row in rows if isinstance(row.get("traj_id"), str)]
        return {"rows": rows, "more": len(frame) > len(rows), "open": self._open({"traj_id": ids} if ids else None)}

    def rollouts(
        self, where: Filter = None, text: str = "", columns: list[str] | None = None, order_by: str = "run_id, step, group_id, sample",
        limit: int = 20, offset: int = 0,
    ) -> Row:  # fmt: skip
        """List rollouts that match a filter, including those that resampling dropped, with the number of all matches.

        where: SQL, such as "run_id = 'tiny-rl' AND step > 3 AND errors > 0 AND correct", or an object, such as
        {"run_id": "tiny-rl", "outcome": "timeout", "errors": true}. text: only rollouts whose messages contain it.
        """
        total, chosen = self.runs.count(where), where
        excerpts: dict[str, str] = {}
        if text:
            hits = self.runs.search(text, where, limit=_limit(limit) + offset)
            excerpts = dict(zip(hits.traj_id, hits.excerpt, strict=True))
            chosen = {"traj_id": [*excerpts]}
        names = list(dict.fromkeys(("traj_id", "run_id", "step", *(columns or _ROLLOUT))))
        order = checked_order(order_by)
        frame = self.runs.trajectories(chosen, columns=names, order_by=order, limit=_limit(limit), offset=offset)
        rows = [self._linked(row) | ({"excerpt": excerpts[row["traj_id"]]} if text else {}) for row in _rows(frame)]
        count = {} if text else {"total": total}
        return {"rollouts": rows, **count, "offset": offset, "open": self._open(chosen)}

    def transcript(self, traj_id: str, first: int = 0, messages: int = 20) -> Row:
        """Return the messages of a rollout from number `first` on, with question, true answer, reward and outcomes."""
        frame = self.runs.transcript(traj_id)
        row = _rows(self.runs.trajectories({"traj_id": traj_id}, columns=list(_ROLLOUT)))[0]
        shown = _rows(frame.drop(columns="traj_id").iloc[max(first, 0) :].head(max(messages, 1)))
        part = [{name: value for name, value in message.items() if value is not None} for message in shown]
        header = {name: frame.attrs[name] for name in ("question", "truth")}
        answer = {"total_messages": len(frame), "messages": part, "open": self._open({"traj_id": traj_id})}
        return self._linked(row) | header | answer

    def compare(self, run_a: str, run_b: str, metrics: list[str] | None = None, where: Filter = None) -> Row:
        """Compare run b with run a on the problems that both sampled: paired differences with 95% intervals, and problems that
        only one of them solves, each with a rollout of both sides."""
        side_a, side_b = (self._open_limited(self.runs.run_dir(run_id)) for run_id in (run_a, run_b))
        found = compare(side_a, side_b, metrics or DEFAULT_METRICS, where=where)
        flips = _rows(found.flips.head(ROWS))
        for row in flips:
            row |= {f"link_{side}": link(row[f"traj_{side}"]) for side in "ab" if row[f"traj_{side}"]}
        ids = {"run_a": run_a, "run_b": run_b, "open": self._open({"run_id": [run_a, run_b]})}
        return {"sentence": found.sentence, **ids, "metrics": _rows(found.table), "flips": flips}

    def diagnose(self, run_id: str) -> Row:
        """Say why a run does not learn: faults with cause, evidence, steps, rollouts and remedy, checks without a finding, and
        alerts at single steps."""
        folder = self.runs.run_dir(run_id)
        found = doctor(folder).as_dict()
        for finding in found["findings"]:
            finding["links"] = [link(traj_id) for traj_id in finding["trajectories"][:ITEMS]]
        alerts = _rows(find_alerts(open_runs(folder)).head(ROWS))
        del found["sources"]
        return {"run_id": run_id, **found, "alerts": alerts, "open": self._open({"run_id": run_id})}

    def recipe_keys(self, search: str, limit: int = 40) -> Row:
        """Find keys of recipes by a part of their name or description: type, default and meaning of each."""
        found = find_keys(search)
        return {"keys": found[: _limit(limit)], "total": len(found)}

    def _open(self, where: Filter) -> str:
        """Return a line for a notebook cell that lists the rollouts of a filter."""
        chosen = f", {where!r}" if where else ""
        shown = chosen if len(chosen) < CELL_CHARS // 2 else ""
        return f"from rstar_lab.analysis import inspect; inspect({str(self.folder)!r}{shown})"

    def _linked(self, row: Row) -> Row:
        return row | ({"link": link(row["traj_id"])} if isinstance(row.get("traj_id"), str) else {})

    def _examples(self, run_id: str, steps: list[int]) -> dict[int, Row]:
        """Return the ids of one rollout of each step."""
        found = self.runs.sql(
            "SELECT step, min(traj_id) AS traj_id FROM trajectories WHERE run_id = ? GROUP BY 1",
            [run_id], steps=[(run_id, step) for step in steps],
        )  # fmt: skip
        examples = {int(row["step"]): self._linked({"run_id": run_id, **row}) for row in _rows(found)}
        return {step: examples.get(step, {"run_id": run_id}) for step in steps}


TOOLS = tuple(name for name in vars(RunReports) if not name.startswith("_"))


def remote_tools(runs_dir: str | Path) -> dict[str, Callable[..., Row]]:
    """Return the tools of the server by name. They run in a process with limits of memory and time.

    Args:
        runs_dir: Folder of runs, or the folder of one run.

    Raises:
        RunStoreError: The folder does not exist.
    """
    folder = Path(runs_dir).absolute()
    process, reports = ToolProcess(folder, QUERY_S, CALL_S), RunReports(folder, QUERY_S)

    def remote(report: Callable[..., Row]) -> Callable[..., Row]:
        @wraps(report)
        def call(*arguments: Any, **named: Any) -> Row:
            if report == reports.recipe_keys:  # it reads no run, and does not wait for a call that does
                return bounded(report(*arguments, **named))
            return process.call(report.__name__, inspect.signature(report).bind(*arguments, **named).arguments)

        return call

    return {name: remote(getattr(reports, name)) for name in TOOLS}


def link(traj_id: str) -> str:
    """Return the fragment of an address that opens a rollout in an inspector of the page."""
    return f"#rstar={quote(str(traj_id), safe='')}"


def make_server(runs_dir: str | Path) -> Any:
    """Return the server of a folder of runs; `.run("stdio")` serves it. Raises RunStoreError if the folder does not exist."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations

    read_only = ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )

    def made(answer: Callable[..., Row]) -> Tool:
        """Return a tool that refuses arguments that it does not have, such as a misspelt filter. By default they are ignored."""

        @wraps(answer)
        def call(**arguments: Any) -> Row:
            try:
                return answer(**arguments)
            except UserError as error:
                raise ToolError(_text(str(error), CELL_CHARS)) from error

        tool = Tool.from_function(call, annotations=read_only)
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        return tool.model_copy(update={"parameters": arguments.model_json_schema(by_alias=True)})

    served = [made(tool) for tool in remote_tools(runs_dir).values()]
    instructions = INSTRUCTIONS.read_text(encoding="utf-8")
    server = MCPServer("rstar_lab", instructions=instructions, version=__version__, log_level="WARNING", tools=served)

    @server.prompt()
    def investigate() -> str:
        """How to investigate a run and write a notebook about it."""
        return SKILL.read_text(encoding="utf-8")

    return server


def bounded(answer: Mapping[str, Any], chars: int = CELL_CHARS) -> Row:
    """Return an answer as JSON values: visible texts of at most `chars` characters, at most ANSWER_CHARS in all.

    Rows that do not fit are counted in `left_out`.
    """
    row = {_text(name, chars): _clean(value, chars, ROWS) for name, value in answer.items()}
    lists = sorted((name for name in row if isinstance(row[name], list)), key=lambda name: len(json.dumps(row[name])))
    budget, left_out = ANSWER_CHARS, Row()
    for name in row.keys() - lists:
        if len(json.dumps(row[name])) > ANSWER_CHARS // 2:
            row[name] = _text(json.dumps(row[name]), chars)
        budget -= len(json.dumps(row[name]))
    for position, name in enumerate(lists):  # the shortest first; the others share what it leaves
        ends = np.cumsum([len(json.dumps(value)) + 2 for value in row[name]], dtype=int)
        kept = int((ends <= budget // (len(lists) - position)).sum())
        if kept < len(row[name]):
            left_out[name], row[name] = len(row[name]) - kept, row[name][:kept]
        budget -= int(ends[kept - 1]) if kept else 0
    return row | ({"left_out": left_out} if left_out else {})


def _spread(positions: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of the positions, evenly spaced."""
    count = min(count, len(positions))
    return positions[np.linspace(0, len(positions) - 1, count).round().astype(int)] if count else positions[:0]


def _limit(limit: int) -> int:
    return min(max(limit, 1), ROWS)


def _all(mapping: Row, where: Filter) -> Row:
    """Return a filter for which both parts must hold."""
    return mapping | ({"any": [where]} if where else {})


def _estimates(table: pd.DataFrame) -> Row:
    names = ("value", "low", "high", "n")
    return {row["metric"]: {name: row[name] for name in names} for row in table.to_dict("records")}


def _rows(frame: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _text(value: object, chars: int) -> str:
    text = _UNSEEN.sub("", printable(value))
    return text if len(text) <= chars else f"{text[:chars]}… ({len(text) - chars:,} more characters)"


def _clean(value: Any, chars: int, items: int = ITEMS) -> Any:
    """Return a value as JSON values: texts of at most `chars` visible characters, lists of at most `items` values, and numbers with
    seven digits."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {_text(key, CELL_CHARS): _clean(item, chars) for key, item in value.items()}
    if isinstance(value, str):
        return _text(value, chars)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        values = list(value)
        more = [f"… {len(values) - items:,} more"] if len(values) > items else []
        return [_clean(item, chars) for item in values[:items]] + more
    if value is None or value is pd.NaT or value is pd.NA or isinstance(value, bool | int):
        return value if isinstance(value, bool | int) else None
    if isinstance(value, float):
        return None if not math.isfinite(value) else value if value.is_integer() else float(f"{value:.7g}")
    return _text(value, chars)
