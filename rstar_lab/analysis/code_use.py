"""Analysis of how the model uses its code tool: the code it writes, and its turns before and after the code. Read from
the transcripts. Code is parsed with `ast`, never executed.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.line_panels import Panel, draw_panels
from rstar_lab.analysis.runs import Runs, RunsLike, as_runs
from rstar_lab.common.estimates import ratio
from rstar_lab.runs.messages import read_messages
from rstar_lab.tool_calls import parse_stored_calls

_ASSERT = re.compile(r"\bassert\b")

# name -> (title, column, whether it is a share, unit that it is a mean over)
METRICS: dict[str, tuple[str, str, bool, str]] = {
    "code_lines": ("lines of code of a call", "lines", False, "call"),
    "asserts": ("calls with an assertion", "asserts", True, "call"),
    "repeated_calls": ("calls that repeat earlier code", "repeated", True, "call"),
    "calls_after_answer": ("calls after the answer was printed", "answer_known", True, "call"),
    "rollouts_with_call": ("rollouts with a call", "called", True, "rollout"),
    "turns_before_call": ("turns before the first call", "first_turn", False, "rollout"),
    "reasoning_before_call": ("characters of text before the first call", "first_characters", False, "rollout"),
}
ROLLOUT_COLUMNS = ("traj_id", "run_id", "step", "problem_id", "reward", "answer", "kept", "truncated", "stop_reason")
CALL_COLUMNS = ["run_id", "step", "problem_id", "traj_id", "reward", "turn", "call", "outcome", "code", "lines",
                "asserts", "repeated", "answer_known"]  # fmt: skip


MAX_CHARACTERS = 20_000  # longer code is not parsed


def parse_code(code: str) -> ast.Module | None:
    """Return the syntax tree, or None if the code does not parse or is too long. Python's warnings about it are not shown."""
    if len(code) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def tool_calls(runs: RunsLike, where: Where = None) -> pd.DataFrame:
    """Return one row per tool call: CALL_COLUMNS.

    turn: turn of the model, from 0. call: number of the call in its rollout, from 0. code: missing if the call
    cannot be parsed or has no code. lines: number of non-empty lines of code. asserts: the code contains
    an assertion. repeated: an earlier call of the rollout had the same syntax tree. answer_known: whether the output of an
    earlier call contained the final answer of the rollout.
    """
    rows = [row for rollout in rollouts(as_runs(runs), where) for row in rollout["calls"]]
    return pd.DataFrame(rows, columns=CALL_COLUMNS)


def tool_use(runs: RunsLike, where: Where = None, *, by: Sequence[str] = ("run_id", "step")) -> pd.DataFrame:
    """Return one row per group and metric of METRICS: the columns of `by`, metric, value, low, high, n, clusters.

    by: run_id, step, or both. n: calls or rollouts of the mean, clusters: problems. low, high: 95% interval over
    problems.
    """
    read = list(rollouts(as_runs(runs), where))
    calls = pd.DataFrame([row for rollout in read for row in rollout["calls"]], columns=CALL_COLUMNS)
    keys = ["run_id", "step", "problem_id", "called", "first_turn", "first_characters"]
    all_rollouts = pd.DataFrame(read, columns=keys)
    rows = []
    for name, (_, column, _, unit) in METRICS.items():
        table = calls if unit == "call" else all_rollouts
        table = table[table[column].notna()]
        for key, group in table.groupby(list(by)):
            problems = group.groupby("problem_id")[column].agg(["sum", "size"])
            estimate = ratio(problems["sum"].to_numpy(float), problems["size"].to_numpy(float), len(group))
            rows.append({**dict(zip(by, key, strict=True)), "metric": name, **vars(estimate)})
    return pd.DataFrame(rows, columns=[*by, "metric", "value", "low", "high", "n", "clusters"])


def plot_tool_use(runs: RunsLike, where: Where = None) -> Figure:
    """Plot METRICS over the steps of each run, with 95% intervals over problems."""
    frame = tool_use(runs, where)
    points = frame.rename(columns={"run_id": "line", "step": "x"})
    panels = [Panel(title, points[points.metric == name], share) for name, (title, _, share, _) in METRICS.items()]
    return Figure(draw_panels(panels), frame)


def rollouts(runs: Runs, where: Where, limit: int | None = None, *, parse: bool = True) -> Iterator[dict[str, Any]]:
    """Yield each rollout that has a transcript: its ROLLOUT_COLUMNS, its calls with their properties and responses, and
    the number of turns and characters before the first call. parse: include the properties that need a syntax tree: lines,
    asserts, repeated."""
    condition = runs.condition(where)
    order = "run_id, step, traj_id" if limit is None else f"hash(traj_id), traj_id LIMIT {int(limit)}"
    query = f"SELECT {', '.join(ROLLOUT_COLUMNS)} FROM trajectories WHERE {condition} ORDER BY {order}"
    chosen = runs.arrow(query).to_pylist()
    by_step: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in chosen:
        by_step.setdefault((row["run_id"], row["step"]), {})[row["traj_id"]] = row
    for (run_id, step), rows in sorted(by_step.items()):  # one step at a time: transcripts are large
        texts = runs.arrow("SELECT traj_id, messages FROM transcripts WHERE run_id = ? AND step = ?", [run_id, step])
        for stored in texts.to_pylist():
            if row := rows.get(stored["traj_id"]):
                yield _rollout(row, read_messages(stored["messages"]), parse)


def _rollout(row: dict[str, Any], messages: Sequence[dict[str, Any]], parse: bool) -> dict[str, Any]:
    """Return the calls of one rollout, and the turns and characters before the first."""
    answer = (row["answer"] or "").strip()
    answer_pattern = re.compile(rf"(?<![\w.]){re.escape(answer)}(?![\w.]*\w)") if answer else None
    shared = {key: row[key] for key in ("run_id", "step", "problem_id", "traj_id", "reward")}
    calls: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls of the turn that have no response yet
    seen: set[str] = set()
    printed, turn, characters, first = False, -1, 0, None
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            waiting = []
            for parsed in parse_stored_calls(message["content"]):
                if first is None:
                    first = (turn, characters + parsed.start)
                code = (parsed.arguments or {}).get("code")
                code = code if isinstance(code, str) else None
                record = shared | {"turn": turn, "call": len(calls), "outcome": None, "code": code, "response": ""}
                record["answer_known"] = printed
                if parse:
                    tree, facts = _facts(code)
                    record |= facts | {"repeated": None if tree is None else tree in seen}
                    seen |= {tree} if tree is not None else set()
                calls.append(record)
                waiting.append(record)
            characters += len(message["content"])
        elif message["role"] == "tool":
            if waiting:
                waiting.pop(0).update(outcome=message.get("outcome"), response=message["content"])
            printed = printed or bool(answer_pattern and answer_pattern.search(message["content"]))
    return row | {
        "calls": calls, "called": first is not None,
        "first_turn": first[0] if first else None, "first_characters": first[1] if first else None,
    }  # fmt: skip


def _facts(code: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the syntax tree of code as text, and its lines and asserts. For code that does not parse, the text is the code itself."""
    if code is None:
        return None, {"lines": None, "asserts": None}
    lines = sum(bool(line.strip()) for line in code.splitlines())
    tree = parse_code(code)
    try:
        text = ast.dump(tree) if tree else ""
    except RecursionError:
        tree = None
    if tree is None:
        return code, {"lines": lines, "asserts": bool(_ASSERT.search(code))}
    return text, {"lines": lines, "asserts": any(isinstance(node, ast.Assert) for node in ast.walk(tree))}
