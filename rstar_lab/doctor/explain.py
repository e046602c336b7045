"""Explain the difference of two evaluations: problems, prompt, settings, grader, sampling noise, and numerics of the engines.

What can be recomputed from the stored runs is measured: both graders grade the rollouts of both runs. What would need new rollouts,
such as the effect of a prompt, is named with the part of the difference that is left.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import Estimate, Side, paired_difference
from rstar_lab.runs import RunReader
from rstar_lab.runs.info import RunInfo
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.text import counted
from rstar_lab.verify import AnswerFormat, extract_answer, verify_many

_SHOWN = 10
SETTINGS = (
    "evaluate.temperature", "evaluate.top_p", "evaluate.samples", "evaluate.max_turns", "evaluate.max_response_tokens", "rl.tools",
    "rl.limits.max_tool_chars", "rl.limits.max_calls_per_turn", "sandbox.timeout_s", "sandbox.memory_mb", "engine.kind", "engine.dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One possible cause of a difference.

    Attributes:
        name: problems, model, prompt, settings, parser, grader, sampling, numerics.
        differs: Whether the runs differ in it; None: the runs do not hold what is needed.
        text: What was found, with numbers.
        effect: Part of the difference in pass@1 that it explains, with its 95% interval over problems; None: not computable.
        trajectories: Rollouts to open.
    """

    name: str
    differs: bool | None
    text: str
    effect: Estimate | None = None
    trajectories: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. total: pass@1 of b minus that of a. parts: causes, in the order of the pipeline."""

    a: str
    b: str
    pass1: tuple[float, float]
    total: Estimate
    parts: list[Part]

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        parts = [
            {"part": part.name, "differs": part.differs, "text": part.text, "effect": part.effect and part.effect.as_list(),
             "trajectories": list(part.trajectories)} for part in self.parts
        ]  # fmt: skip
        return {
            "a": self.a, "b": self.b, "pass1": list(self.pass1), "difference": self.total.as_list(),
            "problems": self.total.clusters, "parts": parts,
            "not_seen": {part.name: part.text for part in self.parts if part.differs is None},
        }  # fmt: skip

    def to_text(self) -> str:
        """Return the explanation for a terminal."""
        a, b = self.pass1
        problems = counted(self.total.clusters, "problem")
        lines = [f"pass@1 {self.b} {b:.1%}, {self.a} {a:.1%}: difference {_points(self.total)} on {problems}", ""]
        for part in self.parts:
            mark = {True: "differs", False: "same", None: "not seen"}[part.differs]
            word = "leaves" if part.name == "sampling" else "explains"
            effect = f" {word} {_points(part.effect)};" if part.effect is not None else ""
            lines.append(f"{part.name} ({mark}):{effect} {part.text}")
            if part.differs and part.trajectories:
                lines.append(f"   open: {', '.join(part.trajectories[:3])}")
        return "\n".join(lines)


def explain(run_a: str | Path, run_b: str | Path) -> Explanation:
    """Explain the difference of two evaluations of the same problems.

    Args:
        run_a: Folder of the first run.
        run_b: Folder of the second run.

    Raises:
        UserError: If the runs have no problem in common.
    """
    a, b = _Evaluation.read(Path(run_a)), _Evaluation.read(Path(run_b))
    of_a, of_b = set(a.rows.problem_id), set(b.rows.problem_id)
    if not (common := of_a & of_b):
        raise UserError(f"{a.name} and {b.name} have no problem in common, so their difference cannot be explained")
    a, b = a.only(common), b.only(common)
    right = [side.rows.reward.to_numpy() > 0 for side in (a, b)]
    total = _difference(a.rows, right[0], b.rows, right[1])
    model = _model(a, b)
    parts = [
        _problems(a, b, len(of_a ^ of_b)), model, _prompt(a, b), _settings(a, b), *_graders(a, b, total), _numerics(a, b, model),
    ]  # fmt: skip
    pass1 = float(right[0].mean()), float(right[1].mean())
    return Explanation(a.name, b.name, pass1, total, [*parts, _rest(total, parts)])


@dataclass(frozen=True)
class _Evaluation:
    name: str
    info: RunInfo
    rows: pd.DataFrame  # usable rollouts with their text and question, in the order of problem and sample
    runs: Runs

    @classmethod
    def read(cls, folder: Path) -> "_Evaluation":
        reader = RunReader(folder)
        runs = open_runs(folder)
        rows = runs.trajectories(order_by="problem_id, sample, traj_id")
        stored = runs.arrow("SELECT traj_id, question, messages FROM transcripts").to_pandas()
        if rows.empty or stored.empty:
            raise UserError(f"{folder}: the run has no trajectories with transcripts")
        stored["text"] = stored.pop("messages").map(lambda messages: "\n".join(own_texts(messages)))
        failed = rows.stop_reason.isin(UNUSABLE) | rows.reward.isna()
        if failed.all():
            raise UserError(f"{folder}: no rollout has a reward, so there is no pass@1 to explain")
        return cls(reader.run_id, reader.info, rows[~failed].merge(stored, on="traj_id"), runs)

    def only(self, problems: Collection[str]) -> "_Evaluation":
        return replace(self, rows=self.rows[self.rows.problem_id.isin(problems)].reset_index(drop=True))

    def key(self, name: str) -> Any:
        """Return a key of the recipe, such as `rl.answer`; None if the run does not have it."""
        rescored = (self.info.get("extra") or {}).get("rescored") or {}
        if name in ("rl.reward", "rl.answer") and rescored:
            return rescored.get(name.removeprefix("rl."))
        return self.info["recipe"].get(name)

    @property
    def identity(self) -> dict[str, Any]:
        return (self.info.get("extra") or {}).get("identity") or {}


def _problems(a: _Evaluation, b: _Evaluation, left_out: int) -> Part:
    truths = pd.concat([side.rows.groupby("problem_id").truth.first() for side in (a, b)], axis=1, keys=["a", "b"])
    known = truths.dropna().astype(str)
    other = known.index[known.a != known.b]
    text = f"{counted(len(truths), 'problem')} in common; left out, because only one run has them: {left_out}."
    if len(other):
        text += f" The true answer of {len(other)} differs, such as {other[0]}."
    if len(known) < len(truths):
        text += f" A run does not hold the true answers of {len(truths) - len(known)}."
    return Part("problems", bool(left_out or len(other)), text)


def _model(a: _Evaluation, b: _Evaluation) -> Part:
    hashes = [side.identity.get("model") for side in (a, b)]
    names = [str((side.info.get("extra") or {}).get("model")) for side in (a, b)]
    if None in hashes:
        return Part("model", None, f"{names[0]} against {names[1]}; a run does not record the hash of its weights.")
    if hashes[0] == hashes[1]:
        return Part("model", False, "same weights.")
    return Part("model", True, f"{names[0]} against {names[1]}: other weights.")


def _prompt(a: _Evaluation, b: _Evaluation) -> Part:
    tables = [_first_prompts(side) for side in (a, b)]
    if all(len(table) for table in tables) and a.identity.get("model") == b.identity.get("model"):
        both = tables[0].to_frame("a").join(tables[1].rename("b"), how="inner")
        other = [name for name, row in both.iterrows() if tuple(row.a) != tuple(row.b)]
        text = f"the prompt tokens of {len(other)} of {len(both)} problems differ."
        shown = a.rows[a.rows.problem_id.isin(other)].traj_id.head(_SHOWN).tolist()
        return Part("prompt", bool(other), text + " Its effect needs new rollouts." * bool(other), trajectories=shown)
    known = [side.identity.get("prompt") for side in (a, b)]
    asked = [side.rows.groupby("problem_id").question.first().dropna() for side in (a, b)]
    common = asked[0].index.intersection(asked[1].index)
    changed = int((asked[0][common] != asked[1][common]).sum())
    if None not in known or changed:
        templates = "not recorded" if None in known else "different" if known[0] != known[1] else "the same"
        text = f"{changed} questions differ; the templates are {templates}."
        return Part("prompt", known[0] != known[1] or changed > 0, text)
    sections = [side.key("rl.prompt") for side in (a, b)]
    if None not in sections and sections[0] != sections[1]:
        return Part("prompt", True, f"rl.prompt: {json.dumps(sections[0])} against {json.dumps(sections[1])}.")
    return Part("prompt", None, "the runs hold neither prompt tokens (`rl.token_arrays`) nor a hash of the template.")


def _first_prompts(side: _Evaluation) -> pd.Series:
    table = side.runs.arrow("SELECT traj_id, prompt_ids FROM transcripts WHERE prompt_ids IS NOT NULL").to_pandas()
    merged = table.merge(side.rows[["traj_id", "problem_id"]], on="traj_id")
    return merged.groupby("problem_id").prompt_ids.first()


def _settings(a: _Evaluation, b: _Evaluation) -> Part:
    for side in (a, b):
        if all(side.key(name) is None for name in SETTINGS):
            return Part("settings", None, f"{side.name} does not hold its settings.")
    differ = [f"{name} {a.key(name)} against {b.key(name)}" for name in SETTINGS if a.key(name) != b.key(name)]
    if not differ:
        return Part("settings", False, "sampling, limits, tools, sandbox and engine are the same.")
    return Part("settings", True, "; ".join(differ) + ". Their effect needs new rollouts.")


def _graders(a: _Evaluation, b: _Evaluation, total: Estimate) -> list[Part]:
    """Grade the rollouts of both runs with both graders."""
    rewards = [side.key("rl.reward") or "verify" for side in (a, b)]
    first, second = (cast(AnswerFormat, side.key("rl.answer") or "tagged") for side in (a, b))
    rows = pd.concat([a.rows, b.rows], ignore_index=True)
    if any(reward != "verify" for reward in rewards):
        text = f"rl.reward is {' and '.join(rewards)}; only `verify` is graded again here, see `rstar-lab rescore`."
        same = rewards[0] == rewards[1]
        return [Part("parser", first != second or None, text), Part("grader", None if same else True, text)]
    if missing := int(rows.truth.isna().sum()):
        text = f"not graded again: {counted(missing, 'rollout')} without a true answer."
        return [Part(name, None, text) for name in ("parser", "grader")]
    pairs = [*zip(rows.text, rows.truth.astype(str), strict=True)]
    try:
        graded = {form: np.array(verify_many(pairs, answer_format=form), dtype=bool) for form in {first, second}}
    except UserError as error:
        return [Part(name, None, f"not graded again: {error}.") for name in ("parser", "grader")]
    changed = graded[first] != graded[second]
    if first == second:
        parser = Part("parser", False, f"both read the answer as `{first}`.")
    else:
        effect = _difference(rows, graded[first], rows, graded[second])
        lost = [sum(extract_answer(text, form) is None for text in rows.text) for form in (first, second)]
        text = f"`{first}` finds no answer in {lost[0]} of {len(rows)} rollouts, `{second}` in {lost[1]}; "
        text += f"{int(changed.sum())} grades change."
        parser = Part("parser", True, text, effect, rows.traj_id[changed].head(_SHOWN).tolist())
    of_b = np.arange(len(rows)) >= len(a.rows)
    now = np.where(of_b, graded[second], graded[first])
    moved = [((rows.reward > 0).to_numpy() != now) & side for side in (~of_b, of_b)]
    if not any(part.any() for part in moved):
        return [parser, Part("grader", False, "today's grader gives both runs their stored rewards.")]
    # What the stored rewards add to the difference beyond one common grader.
    value = total.value - _difference(a.rows, now[~of_b], b.rows, now[of_b]).value
    shown = [name for part in moved for name in rows.traj_id[part].head(_SHOWN)]
    text = f"today's grader changes {moved[0].sum()} rewards of {a.name} and {moved[1].sum()} of {b.name}."
    return [parser, Part("grader", True, text, Estimate(value, np.nan, np.nan, total.n, total.clusters), shown)]


def _rest(total: Estimate, parts: Sequence[Part]) -> Part:
    """Compare what the graders do not explain with the noise of the samples."""
    half = (total.high - total.low) / 2
    rest = total.value - sum(part.effect.value for part in parts if part.effect is not None)
    causes = [part.name for part in parts if part.differs and part.effect is None]
    unseen = [part.name for part in parts if part.differs is None]
    if np.isnan(half):
        return Part("sampling", None, "needs at least two problems on which the runs differ.")
    text = f"sampling noise is up to {100 * half:.1f} points (95%)"
    if abs(rest) <= half:
        text += "; the rest is within it."
    else:
        text += f"; the rest is more than that, and comes from: {', '.join([*causes, *unseen]) or 'no cause found in the runs'}."
    return Part("sampling", True, text, Estimate(rest, rest - half, rest + half, total.n, total.clusters))


def _numerics(a: _Evaluation, b: _Evaluation, model: Part) -> Part:
    """Compare log-probs of the same tokens after the same tokens, up to the first token that differs."""
    if model.differs is not False:
        return Part("numerics", None, "needs the same weights in both runs.")
    query = "SELECT traj_id, prompt_ids, response_ids, loss_mask, engine_log_probs FROM transcripts WHERE response_ids IS NOT NULL"
    query += " AND prompt_ids IS NOT NULL AND loss_mask IS NOT NULL AND engine_log_probs IS NOT NULL"
    sides = [
        side.runs.arrow(query).to_pandas().merge(side.rows[["traj_id", "problem_id", "sample"]], on="traj_id") for side in (a, b)
    ]  # fmt: skip
    pairs = sides[0].merge(sides[1], on=["problem_id", "sample"], suffixes=("_a", "_b"))
    gaps, firsts = [], []
    for row in pairs.itertuples():
        if list(row.prompt_ids_a) != list(row.prompt_ids_b):
            continue
        ids = [np.asarray(own) for own in (row.response_ids_a, row.response_ids_b)]
        length = min(map(len, ids))
        other = np.flatnonzero(ids[0][:length] != ids[1][:length])
        shared = int(other[0]) if len(other) else length
        log_probs = [np.asarray(own, float)[:shared] for own in (row.engine_log_probs_a, row.engine_log_probs_b)]
        gaps.append(np.abs(log_probs[0] - log_probs[1])[np.asarray(row.loss_mask_a, bool)[:shared]])
        if len(other) or len(ids[0]) != len(ids[1]):
            firsts.append((shared, row.traj_id_a))
    values = np.concatenate(gaps) if gaps else np.empty(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return Part("numerics", None, "the runs hold no token arrays of the same prompts (`rl.token_arrays: all`).")
    seeds = a.info.get("seed") == b.info.get("seed")
    text = (
        f"{len(values):,} tokens after the same tokens: log-probs differ by {values.mean():.2g} on average, {values.max():.2g} at most; "
        f"{len(gaps) - len(firsts)} of {len(gaps)} pairs of rollouts are equal"
    )
    if firsts:
        text += f", the others part at token {int(np.median([first for first, _ in firsts]))} (median)"
    text += "." if seeds else "; the runs have different seeds, so their tokens differ anyway."
    shown = [name for _, name in sorted(firsts)[:_SHOWN]]
    return Part("numerics", bool(values.max() > 1e-2 or (seeds and firsts)), text, None, shown)


def _difference(rows_a: pd.DataFrame, right_a: np.ndarray, rows_b: pd.DataFrame, right_b: np.ndarray) -> Estimate:
    """Return pass@1 of b minus that of a, paired over problems."""
    sums = [
        pd.Series(right, dtype=float).groupby(rows.problem_id.to_numpy()).agg(["sum", "size"])
        for rows, right in ((rows_a, right_a), (rows_b, right_b))
    ]
    index = sums[0].index.union(sums[1].index)
    sides = [Side(*side.reindex(index).to_numpy(float).T[:, None]) for side in sums]
    return paired_difference(sides[0], sides[1], len(rows_a) + len(rows_b))


def _points(estimate: Estimate) -> str:
    value, low, high = (100 * number for number in (estimate.value, estimate.low, estimate.high))
    interval = "" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
    return f"{value:+.1f}{interval} points"
