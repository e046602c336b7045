"""Read the log of a run: one of this project, or one of another tool, see `FORMATS`.

The format is recognised by the names and fields of the files. Rollouts of other tools are imported into a temporary folder with the
importers of `analysis.importers`, so that the doctor and the inspector read them in the same way.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis import importers
from rstar_lab.analysis.doctor import tensorboard, wandb
from rstar_lab.analysis.doctor.metric_names import NAMES, canonical
from rstar_lab.analysis.doctor.rule import Log
from rstar_lab.analysis.exports.atif import import_atif
from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.errors import UserError
from rstar_lab.runs.files import open_lines, parse_json, read_text

COLUMNS = (
    "traj_id", "run_id", "stage", "step", "group_id", "problem_id", "sample", "reward", "correct", "rewarded", "kept", "advantage",
    "turns", "calls", "errors", "outcomes", "response_tokens", "model_tokens", "truncated", "stop_reason", "answer", "truth",
    "engine_log_prob", "trainer_log_prob", "entropy", "generate_s", "tool_s", "queue_s", "engine",
)  # fmt: skip
FORMATS = "a run or a folder of runs of rstar_lab; verl's rollout_data_dir or metrics JSONL; TRL's completions or trainer_state.json; "
FORMATS += "prime-rl's rollouts; inspect_ai logs; ATIF trajectories; TensorBoard events; offline runs of Weights & Biases; JSON lines with "
FORMATS += "`messages`, or with `prompt` and `completion` (verifiers)"


def read_logs(path: Path, work_dir: Path) -> list[Log]:
    """Return the logs found at `path`, one per run of training. work_dir: folder for imported rollouts.

    Raises UserError if nothing is recognised; the message lists the formats.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if (path / "run.json").exists() or any(path.glob("*/run.json")):
        return _own(path)
    rollouts = list(_rollouts(path, work_dir))
    metrics = _metrics(path)
    if not rollouts and metrics.empty:
        raise UserError(f"{path}: no log was recognised. The doctor reads {FORMATS}")
    notes = _notes(path, metrics)
    if not rollouts:
        return [Log(path.name, "metrics", metrics, pd.DataFrame(columns=list(COLUMNS)), notes=notes)]
    return [replace(_with_metrics(source, runs, metrics), notes=notes) for source, runs in rollouts]


def _notes(path: Path, metrics: pd.DataFrame) -> tuple[str, ...]:
    """Return what of a foreign log was not understood: broken lines, and metrics of which no rule knows a name."""
    notes = []
    for file in [path] if path.is_file() else _regular(path.rglob("*.jsonl")):
        with open_lines(file) as lines:
            broken = (
                [number for number, line in enumerate(lines, 1) if line.strip() and not _is_object(line)]
                if file.suffix == ".jsonl"
                else []
            )
        if broken:
            notes.append(
                f"{file.name}: {len(broken)} lines are no JSON objects and were left out, first line {broken[0]}"
            )
    unknown = [name for name in metrics.columns if name != "step" and name not in {*NAMES, "held_out"}]
    if unknown:
        notes.append(
            f"{len(unknown)} of {len(metrics.columns) - 1} metrics are read by no rule, such as {', '.join(unknown[:3])}"
        )
    return tuple(notes)


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def _own(path: Path) -> list[Log]:
    runs = open_runs(path)
    table = runs.runs()
    table = table[table.steps > 0]
    chosen = table[table.kind == "train"] if (table.kind == "train").any() else table[table.kind != "sft"]
    if chosen.empty:
        raise UserError(f"{path}: no run has steps of training or imported rollouts")
    measured = runs.trainer_metrics()
    logs = []
    for row in chosen.to_dict("records"):
        opened = open_runs(str(row["path"]))
        own = measured[measured.run_id == row["run_id"]] if len(measured) else measured
        evaluated = table[(table.kind == "evaluate") & (table.parent_run == row["run_id"])]
        evaluations = open_runs(evaluated.path.tolist()) if len(evaluated) else None
        fp32 = row.get("recipe.engine.dtype") == "float32" and row.get("recipe.rl.precision") != "bf16"
        updates = row.get("recipe.rl.mini_batches")
        updates = int(updates) if isinstance(updates, int | float) and updates == updates else None
        logs.append(
            Log(str(row["run_id"]), "rstar_lab", _named(own), _table(opened), opened, evaluations, fp32, updates)
        )
    return logs


def _with_metrics(source: str, runs: Runs, metrics: pd.DataFrame) -> Log:
    table = _table(runs)
    if metrics.empty:
        by_step = table.groupby("step")
        metrics = pd.DataFrame({"step": sorted(table.step.unique())})
        for name in ("reward", "response_tokens", "truncated"):
            values = by_step[name].apply(lambda column: pd.to_numeric(column, errors="coerce").mean())
            metrics[name] = metrics.step.map(values)
    return Log(runs.runs().run_id.iloc[0], source, metrics, table, runs)


def _table(runs: Runs) -> pd.DataFrame:
    table = runs.trajectories(order_by="step, group_id, sample")
    for name in COLUMNS:
        if name not in table:
            table[name] = np.nan
    return table[list(COLUMNS)]


# Rollouts of other tools


def _rollouts(path: Path, work_dir: Path) -> Iterator[tuple[str, Runs]]:
    for found, (kind, source) in enumerate(_recognised(path)):
        if kind in ("verifiers", "prime-rl"):
            source = _as_messages(source, work_dir / f"messages-{found}.jsonl")
        known: dict[str, Callable[..., Path]] = {
            "verl": importers.import_verl, "inspect": importers.import_inspect, "atif": import_atif,
            "trl": partial(importers.import_trl, reward="sum"),
        }  # fmt: skip
        importer = known.get(kind, importers.import_messages)
        run_id = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem) or "log"
        yield kind, open_runs(importer(source, work_dir / f"import-{found}", run_id=run_id))


def _recognised(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield (format, file or folder) of the rollouts at `path`."""
    if path.is_dir() and _regular(path.rglob("step_*/*rollouts.jsonl")):
        yield "prime-rl", path
        return
    folders = [path, *sorted(child for child in path.iterdir() if child.is_dir())] if path.is_dir() else [path]
    for place in folders:
        if place.is_dir():
            if _regular(place.glob("completions_*.parquet")):
                yield "trl", place
            numbered = [file for file in _regular(place.glob("*.jsonl")) if file.stem.isdigit()]
            if numbered and (kind := _jsonl_format(numbered[0])):
                yield kind, place
                continue
            for file in _regular(place.glob("*.jsonl")):
                if kind := _jsonl_format(file):
                    yield kind, file
            yield from (("inspect", file) for file in _regular(place.glob("*.eval")))
            if any(map(_is_atif, _regular(place.glob("*.json")))):
                yield "atif", place
        elif place.suffix == ".eval":
            yield "inspect", place
        elif place.suffix == ".parquet":
            yield "trl", place
        elif place.suffix == ".json" and _is_atif(place):
            yield "atif", place
        elif place.suffix == ".jsonl" and (kind := _jsonl_format(place)):
            yield kind, place


def _is_atif(file: Path) -> bool:
    with contextlib.suppress(OSError), open_lines(file) as text:
        return '"ATIF-v' in text.read(4096)
    return False


def _jsonl_format(file: Path) -> str | None:
    row = next(_json_rows(file), {})
    if {"input", "output"} <= set(row):
        return "verl"
    if isinstance(row.get("messages"), list):
        return "messages"
    return "verifiers" if isinstance(row.get("completion"), list | str) and "reward" in row else None


def _as_messages(source: Path, target: Path) -> Path:
    """Write rows of verifiers or prime-rl (prompt, completion, answer, reward) as lines for `import_messages`.

    source: A file of verifiers, or a folder of prime-rl with `step_N/*rollouts.jsonl`.
    """
    files = [source] if source.is_file() else _regular(source.rglob("step_*/*rollouts.jsonl"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w") as written:
        for file in (file for file in files if not file.name.startswith("eval")):
            step = re.fullmatch(r"step_(\d+)", file.parent.name)
            for row in _json_rows(file):
                prompt, completion = _chat(row.get("prompt"), "user"), _chat(row.get("completion"), "assistant")
                line = {
                    "messages": [*prompt, *completion],
                    "reward": row.get("reward"),
                    "truth": str(row.get("answer", "")),
                    "problem_id": str(
                        row.get("example_id", row.get("id", prompt[-1].get("content") if prompt else ""))
                    ),
                    "step": row.get("step", int(step.group(1)) if step else 1),
                }
                written.write(json.dumps(line) + "\n")
    return target


def _chat(value: object, role: str) -> list[dict[str, Any]]:
    """Return a prompt or a completion as messages."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return value
    return [] if value is None else [{"role": role, "content": str(value)}]


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    with open_lines(file) as lines:
        for line in lines:
            if line.strip():
                try:
                    row = parse_json(line)
                except ValueError:
                    continue  # a torn last line of a run that was killed
                if isinstance(row, dict):
                    yield row


# Metrics of other tools


def _metrics(path: Path) -> pd.DataFrame:
    """Return the metrics by step of all files at `path` that have any."""
    files = [path] if path.is_file() else _regular(path.rglob("*"))
    lines: dict[int, dict[str, Any]] = {}
    for file in files:
        for step, values in _metric_lines(file):
            if _is_step(step):
                lines.setdefault(int(step), {}).update({name: _number(value) for name, value in values.items()})
    return _named(pd.DataFrame([{"step": step} | lines[step] for step in sorted(lines)]))


def _is_step(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 2**31 and value == int(value)


def _number(value: Any) -> Any:
    """Return a metric; None for a list, an object, and an integer that no float can hold."""
    return None if isinstance(value, list | dict) or (isinstance(value, int) and abs(value) > 1e300) else value


def _regular(files: Iterable[Path]) -> list[Path]:
    return sorted(file for file in files if file.is_file())


def _metric_lines(file: Path) -> Iterable[tuple[Any, dict[str, Any]]]:
    if file.name == "trainer_state.json":
        state = parse_json(read_text(file))
        history = state.get("log_history") if isinstance(state, dict) else None
        lines = [line for line in history if isinstance(line, dict)] if isinstance(history, list) else []
        return [(line.get("step"), line) for line in lines]
    if file.suffix == ".wandb":
        return wandb.history(file)
    if file.name.startswith("events.out.tfevents"):
        return tensorboard.scalars(file)
    if file.suffix == ".jsonl" and _jsonl_format(file) is None:
        rows = ((row.get("step"), row.get("data", row)) for row in _json_rows(file))
        return [(step, values) for step, values in rows if isinstance(values, dict)]
    return []


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step with numeric metrics under the names of the rules, and the original names where no rule reads them."""
    if frame.empty or "step" not in frame:
        return pd.DataFrame({"step": pd.Series(dtype=int)})
    columns = {"step": pd.to_numeric(frame.step)}
    for name in frame.columns:
        values = pd.to_numeric(frame[name], errors="coerce") if name != "step" else None
        if values is not None and values.notna().any():
            known = canonical(str(name)) or str(name)
            columns[known] = values if known not in columns else columns[known].fillna(values)
    if {"equal_groups", "groups"} <= set(columns):
        columns["equal_share"] = columns["equal_groups"] / columns["groups"].replace(0, np.nan)
    return pd.DataFrame(columns).sort_values("step", ignore_index=True)
