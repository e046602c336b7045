"""What a rule of the doctor reads and returns.

A rule names the columns that it reads and how many values it needs, so that the doctor can say what it could not check, and returns
`Evidence` or None. The rules are rows of the tables in `rules/`. A user adds a rule with `--rule module:NAME`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rstar_lab.common.estimates import critical_t, format_interval, ratio
from rstar_lab.doctor.answers import compare
from rstar_lab.runs.messages import read_messages

if TYPE_CHECKING:
    from rstar_lab.analysis.runs import Runs

SHOWN = 20  # trajectories that a finding names
WINDOW = 5  # steps at the end of the run that most rules look at
# Confidence that a rule needs. About 50 rules look at each run, step by step: with 95% each, most honest runs would have a finding.
LEVEL = 0.999
SUPERVISED = {"steps.loss", "steps.lr", "steps.grad_norm", "steps.step_s"}  # what a log of SFT is expected to have


@dataclass(frozen=True)
class Log:
    """The log of one run.

    Args:
        name: Run id.
        source: Format that it was read from.
        steps: One row per step: `step` and the metrics that the log has, under the names of `metric_names`.
        rollouts: One row per rollout of training: traj_id, step, group_id, problem_id, reward, correct, answer, truth,
            response_tokens, model_tokens, truncated, calls, errors, outcomes, kept, advantage, engine, ...
        runs: The opened run, for texts; None if the log has metrics only.
        evaluations: The evaluations during the run; None if the log has none.
        fp32: Whether engine and trainer are known to compute in fp32.
        mini_batches: Updates per step, if known. With one, the policy does not move within a step.
        gpus: GPUs of the run, if known.
        notes: What of the log was not understood.
        training: Whether the rollouts train a policy. Most rules do not judge an evaluation.
        plain_advantages: Whether the advantages follow from the stored rewards alone, without shaping.
        not_finite: Steps at which a metric is NaN or infinite, by metric.
    """

    name: str
    source: str
    steps: pd.DataFrame
    rollouts: pd.DataFrame
    runs: "Runs | None" = None
    evaluations: "Runs | None" = None
    fp32: bool = False
    mini_batches: int | None = None
    gpus: int | None = None
    notes: tuple[str, ...] = ()
    training: bool = True
    plain_advantages: bool = True
    not_finite: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _texts: dict[int, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)  # results of `texts`

    def missing(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that the log does not have.

        Args:
            columns: `steps.NAME` or `rollouts.NAME`; `texts` for transcripts, `tokens` for stored arrays of tokens, `metrics` for any
                metric of steps, `evaluations` for evaluations during the run, `reward_parts` for a reward of several parts,
                `mini_batches` for several updates per step.
        """
        return [column for column in columns if not self.has(column)]

    def has(self, column: str) -> bool:
        """Return whether the log has a column, see `missing`."""
        parts: dict[str, Callable[[], bool]] = {
            "texts": lambda: self.runs is not None and not self.rollouts.empty,
            "tokens": lambda: self.has("texts") and not self.tokens(1).empty,
            "reward_parts": lambda: len(self.reward_parts().columns) > 3,
            "mini_batches": lambda: (self.mini_batches or 1) > 1,
            "evaluations": lambda: self.evaluations is not None,
            "metrics": lambda: len(self.steps.columns) > 1,
        }
        return parts[column]() if column in parts else self.count(column) > 0

    def count(self, column: str) -> int:
        """Return how many values a column has: `steps.NAME` or `rollouts.NAME`; 0 if the log does not have it."""
        table, _, name = column.partition(".")
        frame = self.steps if table == "steps" else self.rollouts
        return int(frame[name].notna().sum()) if name in frame else 0

    def lacks(self, rule: "Rule") -> str:
        """Return what the log has less of than a rule needs, such as "2 of 9 steps"; "" if it has enough."""
        least = {"steps": rule.steps, "rollouts": rule.rollouts}
        counts = {table: [self.count(name) for name in rule.reads if name.startswith(table)] for table in least}
        if "texts" in rule.reads:
            counts["rollouts"].append(len(self.rollouts))
        if not counts["steps"] and len(self.rollouts):
            counts["steps"].append(self.rollouts.step.nunique())
        known = {table: min(own) for table, own in counts.items() if own}
        return ", ".join(f"{n} of {least[table]} {table}" for table, n in known.items() if n < least[table])

    @property
    def supervised(self) -> bool:
        """Whether this is a log of supervised training: it has losses, and nothing of RL."""
        has_rl = len(self.rollouts) > 0 or self.has("steps.reward") or self.has("steps.clip_share")
        return self.has("steps.loss") and not has_rl

    @property
    def rewarded(self) -> pd.Series:
        """Whether each rollout counts as successful: a reward above 0, or above the middle of the rewards of a log of another tool,
        which can pay for a format, or have a scale from 1 to 10."""
        rewards = self.rollouts.reward
        middle = 0.0 if self.source == "rstar_lab" or rewards.nunique() < 2 else (rewards.min() + rewards.max()) / 2
        return rewards > (middle if rewards.max() <= 0 else max(0.0, middle))

    @cached_property
    def right(self) -> pd.Series:
        """Whether the answer of each rollout is equal to the true one; None if that is not known."""
        found = compare(self.rollouts.answer, self.rollouts.truth)
        return pd.Series(found, index=self.rollouts.index, dtype=object)

    @property
    def complete_groups(self) -> pd.DataFrame:
        """The rollouts with advantage and reward, in groups with different rewards; `centred`: reward minus the mean of the group."""
        rows = self.rollouts.dropna(subset=["advantage", "reward"])
        rewards = rows.groupby("group_id").reward
        rows = rows.assign(centred=rows.reward - rewards.transform("mean"))
        return rows[rewards.transform("max") - rewards.transform("min") > 1e-6]

    def texts(self, steps: int = 6) -> pd.DataFrame:
        """Return the rows of the rollouts of up to `steps` steps, spread over the run, with their question, the first message
        (`prompt`), the model's own text (`own`), the outputs of successful tool calls (`outputs`), and the program and the output of the
        first call (`first_call`)."""
        if steps not in self._texts:
            rows = []
            for row in self._transcripts("question, messages", steps).to_pylist():
                messages = read_messages(row["messages"])
                own = "\n".join(message["content"] for message in messages if message["role"] == "assistant")
                system = [message["content"] for message in messages[:1] if message["role"] == "system"]
                tools = [message for message in messages if message["role"] == "tool"]
                outputs = [message["content"] for message in tools if message.get("outcome") in (None, "ok")]
                rows.append((row["traj_id"], row["question"], "".join(system), own, outputs, _first_call(messages)))
            texts = pd.DataFrame(rows, columns=["traj_id", "question", "prompt", "own", "outputs", "first_call"])
            self._texts[steps] = self.rollouts.merge(texts, on="traj_id")
        return self._texts[steps]

    def reward_parts(self) -> pd.DataFrame:
        """Return traj_id, step and one column per part of the reward, for logs that have several."""
        if self.runs is None or self.rollouts.empty:
            return pd.DataFrame(columns=["traj_id", "step"])
        parts = self.runs.rewards().drop(columns="run_id")
        return self.rollouts[["traj_id", "step"]].merge(parts, on="traj_id")

    def tokens(self, steps: int = 6) -> pd.DataFrame:
        """Return traj_id, step, prompt_ids, loss_mask and engine_log_probs of the rollouts whose arrays are stored, of up to `steps`
        steps, spread over the run."""
        found = self._transcripts("step, prompt_ids, loss_mask, engine_log_probs", steps).to_pandas()
        return found[found.loss_mask.notna()]

    def _transcripts(self, columns: str, steps: int) -> pa.Table:
        """Return columns of the transcripts of up to `steps` steps, spread over the run."""
        assert self.runs is not None
        known = sorted(self.rollouts.step.unique())
        chosen = sorted({int(known[i]) for i in np.linspace(0, len(known) - 1, steps).astype(int)})
        query = f"SELECT traj_id, {columns} FROM transcripts WHERE step = ?"
        return pa.concat_tables([self.runs.arrow(query, [step]) for step in chosen])

    def last(self) -> pd.DataFrame:
        """Return the rollouts of the last steps."""
        return self.rollouts[self.rollouts.step.isin(sorted(self.rollouts.step.unique())[-WINDOW:])]


def _first_call(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the text and the output of the first tool call, if the turn has no other one."""
    tools = [number for number, message in enumerate(messages) if message["role"] == "tool"]
    if not tools or tools[0] == 0 or tools[1:2] == [tools[0] + 1]:
        return None
    call = messages[tools[0] - 1]["content"].rpartition("<tool_call>")[2]
    return call.partition("</tool_call>")[0].strip(), messages[tools[0]]["content"]


@dataclass(frozen=True)
class Evidence:
    """Why a rule fired.

    Args:
        text: The observation in one sentence, with numbers and their intervals.
        numbers: The same numbers for programs.
        steps: Steps at which it was seen.
        trajectories: Rollouts to open, at most `SHOWN`.
        cost: Estimated share of the training that it makes useless, 0 to 1. Orders the findings.
    """

    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    steps: Sequence[int] = ()
    trajectories: Sequence[str] = ()
    cost: float = 0.5


Check = Callable[[Log], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """A rule: what it reads, the cause that it names, what to do, and where the idea comes from.

    Args:
        steps: Number of steps that have every column of `steps` that is read, below which the rule is not applied.
        rollouts: The same for rollouts.
        evaluations: Whether the rule judges evaluations, too.
    """

    name: str
    reads: tuple[str, ...]
    cause: str
    remedy: str
    source: str
    check: Check
    steps: int = 1
    rollouts: int = 1
    evaluations: bool = False


def rule(name: str, **fields: Any) -> Callable[[Check], Rule]:
    """Make a rule of the decorated function. fields: the other arguments of `Rule`."""
    return lambda check: Rule(name, check=check, **fields)


def share(hits: pd.Series, rollouts: pd.DataFrame, level: float = 0.95) -> tuple[float, float, float]:
    """Return the share of rollouts that hit, with its interval over problems, or over rollouts if there is one problem only."""
    problems = rollouts.problem_id.fillna(rollouts.group_id) if "problem_id" in rollouts else rollouts.traj_id
    numbers = pd.factorize(problems if problems.nunique() > 1 else rollouts.traj_id, sort=True)[0] + 1  # 0: unknown
    sums, sizes = np.bincount(numbers, hits.astype(float)), np.bincount(numbers).astype(float)
    found = ratio(sums[1:], sizes[1:], len(hits), level=level)
    return found.value, found.low, found.high


def among(
    rows: pd.DataFrame, hit: pd.Series, what: str, *, above: float, least: int = 20, cost: float | None = None
) -> Evidence | None:
    """Return evidence that more than a share of the rows hits, else None.

    Args:
        rows: Rollouts or problems, with traj_id, step and problem_id.
        hit: Whether each row hits.
        what: The end of the sentence "12% [9%, 15%] of 384 ...".
        above: The rule fires if the share is above this value with a confidence of `LEVEL`.
        least: Number of rows below which nothing is said.
        cost: Estimated share of the training that it makes useless. Default: twice the share.
    """
    if len(rows) < least:
        return None
    value = share(hit, rows)
    if not share(hit, rows, LEVEL)[1] > above:
        return None
    steps = sorted(rows.step[hit].unique().astype(int))
    numbers = dict(zip(("share", "low", "high"), value, strict=True))
    text = f"{format_interval(value, '.0%')} of {len(rows):,} {what}"
    return Evidence(text, numbers, steps, examples(rows[hit]), min(1.0, 2 * value[0]) if cost is None else cost)


def groups_where(rollouts: pd.DataFrame, hit: pd.Series, what: str) -> Evidence | None:
    """Return evidence that most groups hit, else None. hit: by group_id. what: what holds in them."""
    by = pd.Series(hit.to_numpy(float))
    if by.mean() < 0.9 or not ratio(by.to_numpy(), np.ones(len(by)), len(by), level=LEVEL).low > 0.25:
        return None
    steps = sorted(rollouts.step.unique().astype(int))
    text = f"in {by.mean():.0%} of {len(by)} groups of the last {len(steps)} steps, {what}"
    chosen = rollouts[rollouts.group_id.isin(hit.index[hit])]
    return Evidence(text, {"share": float(by.mean()), "groups": len(by)}, steps, examples(chosen), float(by.mean()))


def at_steps(log: Log, values: pd.Series, hit: pd.Series, text: str, *, least: int = 2, cost: float) -> Evidence | None:
    """Return the evidence if `hit` is true in at least `least` steps, otherwise None.

    text: observation with {last} (the value at the last such step), {median} and {first} (in the first steps).
    """
    steps = log.steps.step[hit.fillna(False).astype(bool)].astype(int).tolist()
    if len(steps) < least:
        return None
    last = float(values[log.steps.step == steps[-1]].iloc[-1])
    numbers = {"last": last, "first": first(values), "median": values.median()}
    count = f", at {len(steps)} of {int(values.notna().sum())} steps"
    return Evidence(text.format(**numbers) + count, numbers, steps, (), cost)


def first(values: pd.Series) -> float:
    """Return the median of the first three values of a metric."""
    return float(values.dropna().head(3).median())


def change(series: pd.Series, level: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of the last third of the steps minus that of the first third, with its interval.

    The noise of a step follows from the differences of consecutive steps (von Neumann 1941): within a third of few steps the
    variance is often far too small by chance, and a trend does not count as noise.
    """
    values = series.dropna().to_numpy(float)
    n, third = len(values), len(values) // 3
    if third < 2:
        return np.nan, np.nan, np.nan
    error = float(np.sqrt((np.diff(values) ** 2).mean() / third))
    difference = float(values[-third:].mean() - values[:third].mean())
    half = critical_t(max(2, 2 * (n - 1) // 3), level) * error
    return difference, difference - half, difference + half


def examples(rollouts: pd.DataFrame) -> list[str]:
    """Return up to `SHOWN` ids of rollouts, newest first."""
    return rollouts.sort_values("step", ascending=False).traj_id.head(SHOWN).tolist()
