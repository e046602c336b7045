"""Read the log of a run: one of this project, or one of another tool, see `FORMATS`.

Rollouts of other tools are imported into a temporary folder, so that the doctor and the inspector read them in the same way.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.doctor.answers import with_texts
from rstar_lab.doctor.files import Source, Values, existing, import_rollouts, metric_lines, sources
from rstar_lab.doctor.metric_names import NAMES, canonical, held_out_score
from rstar_lab.doctor.rule import Log
from rstar_lab.exchange.rollout_rows import COLUMNS as ALIASES
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import TRAJECTORIES
from rstar_lab.untrusted.text import counted

COLUMNS = (*TRAJECTORIES.names, "correct", "rewarded", "candidates", "ending")
PLAIN = ("grpo", "maxrl")  # methods whose advantage is a function of the rewards of the group
FINITE = ("reward", "loss", "grad_norm", "entropy", "kl", "kl_k3", "update_kl", "ratio_max")  # metrics of every step
EVALUATED = ("inspect", "verifiers", "messages")  # formats of evaluations, too
_REWARD = re.compile(r"(?i)reward|score|acc|correct|format")
FORMATS = "a run or a folder of runs of rstar_lab; verl's rollout_data_dir or metrics JSONL; TRL's completions or trainer_state.json; "
FORMATS += "prime-rl's rollouts; inspect_ai logs; TensorBoard events; JSON lines with "
FORMATS += "`messages`, or with `prompt` and `completion` (verifiers). JSON lines can be gzipped"


def read_logs(path: Path, work_dir: Path) -> list[Log]:
    """Return the logs found at `path`, one per run of training. work_dir: folder for imported rollouts.

    Files below one folder that belong to one run are read together. Raises UserError if nothing is recognised; the message lists the
    formats and what was found instead.
    """
    path = existing(path)
    if (path / "run.json").exists() or any(path.glob("*/run.json")):
        return _own(path)
    found, notes = sources(path)
    tables = _metrics([source for source in found if source.kind == "metrics"], notes)
    found = [source for source in found if source.kind != "metrics"]
    evaluations = [source for source in found if re.match(r"(?i)val|eval|test", source.folder.name)]
    if len(evaluations) < len(found):
        found = [source for source in found if source not in evaluations]
        notes += [f"{source.folder.name}: rollouts of an evaluation are not read" for source in evaluations]
    rollouts = []
    for number, source in enumerate(found):
        own_notes: list[str] = []
        try:
            runs = open_runs(import_rollouts(source, work_dir / f"import-{number}", _name(path, source), own_notes))
        except UserError as error:
            notes += [*own_notes, str(error)]
        else:
            rollouts.append((source, runs, own_notes))
    if not rollouts and not tables:
        seen = f" ({'; '.join(' '.join(note.split()) for note in notes[:8])})" if notes else ""
        raise UserError(f"{path}: no log was recognised{seen}. The doctor reads {FORMATS}")
    logs, folders = [], [source.folder for source, _, _ in rollouts]
    for source, runs, own_notes in rollouts:
        metrics = _belonging(source.folder, folders, tables)
        logs.append(_foreign(_name(path, source), source.kind, runs, metrics, own_notes))
    for table in tables:
        logs.append(_foreign(_name(path, Source("metrics", table[0], ())), "metrics", None, table, []))
    return [replace(log, notes=(*log.notes, *notes)) if log is logs[0] else log for log in logs]


Table = tuple[Path, dict[int, Values], list[str]]  # folder, metrics by step, what was not understood


def _name(path: Path, source: Source) -> str:
    """Return the id of a run: its folder, and its file if the folder holds others."""
    alone = len(source.files) == 1 and source.kind != "metrics" and source.folder != path
    below = os.path.relpath(source.files[0] if alone else source.folder, path)
    name = path.stem if below == "." or path.is_file() else below
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "log"


def _metrics(found: list[Source], unread: list[str]) -> list[Table]:
    """Return the metrics of each run. Files with different values of the same metric at the same step belong to different runs.

    Appends a note to `unread` about files without metrics."""
    tables: list[Table] = []
    for source in found:
        lines: dict[int, Values] = {}
        notes: list[str] = []
        for file in source.files:
            for step, values in metric_lines(file, notes):
                lines.setdefault(step, {}).update(values)
        if not lines:
            unread += notes or [f"{file.name}: no metric with a step was found" for file in source.files]
            continue
        for _, known, known_notes in tables:
            if not _contradicts(known, lines):
                for step, values in lines.items():
                    known[step] = values | known.get(step, {})
                known_notes += notes
                break
        else:
            tables.append((source.folder, lines, notes))
    return tables


def _contradicts(known: dict[int, Values], other: dict[int, Values]) -> bool:
    pairs = [(known[step].get(name), own) for step in known.keys() & other.keys() for name, own in other[step].items()]
    return any(abs(a - b) > 1e-3 * max(abs(a), abs(b)) for a, b in pairs if a is not None and b is not None)


def _belonging(folder: Path, others: list[Path], tables: list[Table]) -> Table | None:
    """Remove and return the metrics that belong to the rollouts in `folder`. others: folders of all rollouts."""

    def common(a: Path, b: Path) -> int:
        return len(Path(os.path.commonpath([a, b])).parts)

    near = [t for t in tables if all(common(t[0], folder) >= common(t[0], other) for other in others)]
    if not near or (len(set(others)) > 1 and len({common(near[0][0], other) for other in others}) == 1):
        return None
    best = max(near, key=lambda table: common(table[0], folder))
    tables.remove(best)
    return best


def _foreign(name: str, kind: str, runs: Runs | None, metrics: Table | None, notes: list[str]) -> Log:
    _, lines, more = metrics or (None, {}, [])
    names = list(dict.fromkeys(name for values in lines.values() for name in values))
    scores = [name for name in names if canonical(name) == "held_out"]
    score = held_out_score(names)
    if len(scores) > 1 or (scores and not score):
        rest = counted(len(scores) - bool(score), "other metric")
        more = [*more, f"the held-out score is {score or 'not known'}; {rest} of evaluations not read"]
    frame = pd.DataFrame([{"step": step} | lines[step] for step in sorted(lines)])
    frame = _named(frame.drop(columns=[name for name in scores if name != score]))
    if "lr" in frame and len(frame) < 3:  # a warm-up begins with a learning rate of 0
        frame["lr"] = frame.lr.replace(0.0, np.nan)
    if unknown := [name for name in frame.columns if name not in {"step", "held_out", *NAMES}]:
        share = f"{len(unknown)} of {len(frame.columns) - 1} metrics"
        more = [*more, f"{share} are read by no rule, such as {', '.join(unknown[:3])}"]
    if runs is None:
        empty = pd.DataFrame(columns=list(COLUMNS))
        return Log(name, kind, frame, empty, notes=_counted([*notes, *more]), not_finite=_not_finite(lines))
    table, given = _with_known_reward(_table(runs), runs) if kind == "trl" else (_table(runs), [])
    table, texts = with_texts(table, runs)
    # Rollouts without steps, metrics and advantages are those of an evaluation.
    training = kind not in EVALUATED or table.step.nunique() > 1 or bool(lines) or bool(table.advantage.notna().any())
    own = _by_step(table)
    frame = own.reset_index() if frame.empty else frame
    for column in own.columns.difference(frame.columns):
        frame[column] = frame.step.map(own[column])
    notes = [*notes, *more, *given, *texts]
    return Log(name, kind, frame, table, runs, notes=_counted(notes), training=training, not_finite=_not_finite(lines))


def _counted(notes: list[str]) -> tuple[str, ...]:
    return tuple(note if n == 1 else f"{note} ({n} times)" for note, n in Counter(notes).items())


def _by_step(table: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics by step that follow from the rollouts."""
    values = table[["reward", "response_tokens", "truncated"]].apply(pd.to_numeric, errors="coerce")
    found = values.groupby(table.step).mean()
    groups = table.groupby(["step", "group_id"]).reward.agg(["min", "max", "count"])
    groups = groups[groups["count"] > 1]
    return found.assign(equal_share=(groups["min"] == groups["max"]).groupby("step").mean())


def _not_finite(lines: Mapping[int, Values]) -> dict[str, list[int]]:
    """Return the steps at which a metric is NaN, infinite, or null though it is a number at most other steps (JSON has no NaN)."""
    values: dict[str, dict[int, float | None]] = {name: {} for name in FINITE}
    for step, line in lines.items():
        for name, value in line.items():
            if (known := canonical(name)) in FINITE and values[known].get(step) is None:
                values[known][step] = value
    found = {}
    for name, by_step in values.items():
        numbers = [step for step, value in by_step.items() if value is not None and math.isfinite(value)]
        bad = [step for step, value in by_step.items() if step not in set(numbers)]
        null = all(by_step[step] is None for step in bad)
        if bad and not (null and (len(numbers) < max(3, 0.2 * len(by_step)) or len(bad) < 3)):
            found[name] = sorted(bad)
    return found


def _with_known_reward(table: pd.DataFrame, runs: Runs) -> tuple[pd.DataFrame, list[str]]:
    """Find which of the number columns of TRL are rewards, and with which weights: the log does not say it.

    A column that is constant in every group, such as a difficulty, is no reward. The advantages are the weighted sum of the others,
    minus the mean of the group, and divided by its standard deviation or not.
    """
    parts = runs.rewards().drop(columns="run_id").set_index("traj_id").reindex(table.traj_id).set_axis(table.index)
    columns = [str(name) for name in parts.columns]
    centred = parts - parts.groupby(table.group_id).transform("mean")
    varying = [name for name in columns if (centred[name].abs() > 1e-9).any()]
    names = varying or [name for name in columns if _REWARD.search(name)] or columns
    others, listed = ", ".join(name for name in columns if name not in names), ", ".join(names)
    notes = [f"no rewards, because they are equal in each group: {others}"] if others else []
    table = table.assign(reward=parts[names].sum(axis="columns", min_count=1))
    known = table.advantage.notna() & centred[names].notna().all(axis="columns")
    if len(names) < 2:
        return table, notes
    if not (table.advantage[known].abs() > 1e-9).any():
        return table, [*notes, f"the reward is the sum of {listed}"]
    groups = table.group_id[known]
    advantage = table.advantage[known] - table.advantage[known].groupby(groups).transform("mean")
    values = centred.loc[known, names].to_numpy(float)
    weights, explained = _weights(values, advantage.to_numpy(float), groups.to_numpy())
    if explained < 0.5:
        return table, [*notes, f"the advantages follow no weighted sum of {listed}"]
    if explained < 0.999:
        note = "the advantages do not follow the sum of the rewards, whose weights are not logged; neither is read"
        return table.assign(reward=np.nan, advantage=np.nan), [*notes, note]
    used = np.abs(weights) * centred[names].std().to_numpy() > 1e-3 * advantage.std()
    chosen, weights = [name for name, own in zip(names, used, strict=True) if own], weights[used]
    weights = weights / weights[np.argmax(np.abs(weights))]
    shown = ", ".join(f"{weight:.3g} {name}" for name, weight in zip(chosen, weights, strict=True))
    reward = (parts[chosen] * weights).sum(axis="columns", skipna=False).round(9)
    return table.assign(reward=reward), [*notes, f"the reward is the sum that the advantages follow: {shown}"]


def _weights(parts: np.ndarray, advantage: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights of centred rewards that explain the advantages best, and the explained share of the variance of their sum.
    In a group, the advantages are proportional to that sum, whatever they were divided by."""
    _, number = np.unique(groups, return_inverse=True)
    squares = np.bincount(number, advantage**2)[number]
    unit = np.where(squares > 1e-12, advantage / np.sqrt(np.maximum(squares, 1e-12)), 0.0)
    along = [np.bincount(number, unit * part)[number] * unit for part in parts.T]
    _, sizes, directions = np.linalg.svd(parts, full_matrices=False)
    some = sizes > 1e-9 * sizes[0]
    basis = (directions[some] / sizes[some, None]).T  # parts @ basis is orthonormal
    rest = (parts - np.stack(along, axis=1)) @ basis
    shares, found = np.linalg.eigh(rest.T @ rest)
    explaining = basis @ found[:, shares < max(1e-4, 1.001 * shares[0])]  # several, if groups are small
    return explaining @ (explaining.T @ (parts.T @ advantage)), 1 - float(shares[0])


def _own(path: Path) -> list[Log]:
    runs = open_runs(path)
    table = runs.runs()
    if "steps" not in table:
        raise UserError(f"{path}: no run can be read")
    table = table[table.steps > 0]
    chosen = table[table.kind == "train"] if (table.kind == "train").any() else table[table.kind != "sft"]
    if chosen.empty:
        raise UserError(f"{path}: no run has steps of training or imported rollouts")
    measured = runs.trainer_metrics()
    logs, damaged = list[Log](), list[str]()
    for row in chosen.to_dict("records"):
        try:
            opened = runs if row["path"] == str(path) else open_runs(str(row["path"]))
            logs.append(_own_log(row, opened, table, measured))
        except READ_ERRORS as error:  # one run of a shared folder does not end the diagnosis of the others
            if len(chosen) == 1:
                raise
            damaged.append(f"{row['run_id']} cannot be read: {error}")
    if not logs:
        raise UserError(f"{path}: no run can be read: {damaged[0]}")
    return [replace(logs[0], notes=(*logs[0].notes, *damaged)), *logs[1:]]


def _own_log(row: Mapping[Any, Any], opened: Runs, table: pd.DataFrame, measured: pd.DataFrame) -> Log:
    """Return the log of one run. row: its row in `table`, which has all runs. opened: the run. measured: metrics of all runs. Raises
    RunStoreError if its files are damaged."""
    reader = RunReader(str(row["path"]))
    own = measured[measured.run_id == row["run_id"]] if len(measured) else measured
    evaluated = table[(table.kind == "evaluate") & (table.parent_run == row["run_id"])]
    evaluations = open_runs(evaluated.path.tolist()) if len(evaluated) else None
    fp32 = row.get("recipe.engine.dtype") == "float32" and row.get("recipe.rl.precision") != "bf16"
    updates = row.get("recipe.rl.mini_batches")
    updates = int(updates) if isinstance(updates, int | float) and np.isfinite(updates) else None
    steps, rollouts = _named(own.drop(columns="kl", errors="ignore")), _table(opened)  # ours is no KL to the reference
    opened.rewards()  # rules read it later
    for level in ("calls", "transcripts"):
        reader.files(level)
    if "entropy" not in steps:
        steps["entropy"] = steps.step.map(rollouts.groupby("step").entropy.mean())
    if row.get("recipe.rl.tools") == "[]":
        rollouts["calls"] = np.nan  # a run without tools cannot call any
    gpus = (reader.info.get("hardware") or {}).get("gpus")
    count = len(gpus) if isinstance(gpus, list) else None
    # Methods can shape the rewards of which the advantages are made; the stored rewards are not shaped.
    added, method = (row.get(f"recipe.rl.method.{name}") for name in ("add", "type"))
    plain = (pd.isna(added) or added == "[]") and (pd.isna(method) or method in PLAIN)
    return Log(
        str(row["run_id"]), "rstar_lab", steps, rollouts, opened, evaluations, fp32, updates, count,
        training=row["kind"] != "evaluate", plain_advantages=plain,
        not_finite=_not_finite({int(line["step"]): line for line in reader.metrics()}),
    )  # fmt: skip


def _table(runs: Runs) -> pd.DataFrame:
    return runs.trajectories(order_by="step, group_id, sample").reindex(columns=list(COLUMNS))


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step with numeric metrics under the names of the rules, and the original names where no rule reads them."""
    if frame.empty or "step" not in frame:
        return pd.DataFrame({"step": pd.Series(dtype=int)})
    frame = frame.drop(columns=[name for name in ALIASES["step"] if name != "step"], errors="ignore")
    columns = {"step": pd.to_numeric(frame.step)}
    for name in frame.columns:
        values = pd.to_numeric(frame[name], errors="coerce") if name != "step" else None
        if values is not None and values.notna().any():
            known = canonical(str(name)) or str(name)
            columns[known] = values if known not in columns else columns[known].fillna(values)
    if {"equal_groups", "groups"} <= set(columns):
        columns["equal_share"] = columns["equal_groups"] / columns["groups"].replace(0, np.nan)
    return pd.DataFrame(columns).sort_values("step", ignore_index=True)
