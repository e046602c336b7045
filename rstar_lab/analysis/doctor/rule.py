"""What a rule of the doctor reads and returns.

A rule is one file in `rules/`. It names the columns that it reads, so that the doctor can say what it could not check, and returns
`Evidence` or None. A user adds a rule with `--rule module:NAME`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa

from rstar_lab.estimates import critical_t, ratio
from rstar_lab.runs.messages import read_messages

if TYPE_CHECKING:
    from rstar_lab.analysis.runs import Runs

SHOWN = 20  # trajectories that a finding names
WINDOW = 5  # steps at the end of the run that most rules look at


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
        notes: What of the log was not understood.
    """

    name: str
    source: str
    steps: pd.DataFrame
    rollouts: pd.DataFrame
    runs: "Runs | None" = None
    evaluations: "Runs | None" = None
    fp32: bool = False
    mini_batches: int | None = None
    notes: tuple[str, ...] = ()

    def missing(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that the log does not have. columns: `steps.NAME` or `rollouts.NAME`; `texts` for transcripts, `tokens` for
        stored arrays of tokens, `evaluations` for evaluations during the run, `mini_batches` for several updates per step."""
        return [column for column in columns if not self.has(column)]

    def has(self, column: str) -> bool:
        """Return whether the log has a column, see `missing`."""
        if column == "texts":
            return self.runs is not None and not self.rollouts.empty
        if column == "tokens":
            return self.has("texts") and not self.tokens(1).empty
        if column == "mini_batches":
            return (self.mini_batches or 1) > 1
        if column == "evaluations":
            return self.evaluations is not None
        table, _, name = column.partition(".")
        frame = self.steps if table == "steps" else self.rollouts
        return name in frame and bool(frame[name].notna().any())

    def texts(self, steps: int = 6) -> pd.DataFrame:
        """Return the rows of the rollouts of up to `steps` steps, spread over the run, with their question, the first message
        (`prompt`), the model's own text (`own`), and the outputs of successful tool calls (`outputs`)."""
        rows = []
        for stored in self._transcripts("question, messages", steps):
            for row in stored.to_pylist():
                messages = read_messages(row["messages"])
                own = "\n".join(message["content"] for message in messages if message["role"] == "assistant")
                system = [message["content"] for message in messages[:1] if message["role"] == "system"]
                outputs = [
                    message["content"]
                    for message in messages
                    if message["role"] == "tool" and message.get("outcome") in (None, "ok")
                ]
                rows.append((row["traj_id"], row["question"], "".join(system), own, outputs))
        texts = pd.DataFrame(rows, columns=["traj_id", "question", "prompt", "own", "outputs"])
        return self.rollouts.merge(texts, on="traj_id")

    def tokens(self, steps: int = 6) -> pd.DataFrame:
        """Return traj_id, step, prompt_ids, loss_mask and engine_log_probs of the rollouts whose arrays are stored, of up to `steps`
        steps, spread over the run."""
        names = "step, prompt_ids, loss_mask, engine_log_probs"
        tables = [table.to_pandas() for table in self._transcripts(names, steps)]
        found = pd.concat(tables, ignore_index=True)
        return found[found.loss_mask.notna()]

    def _transcripts(self, columns: str, steps: int) -> list[pa.Table]:
        """Return the columns of the transcripts of up to `steps` steps, spread over the run."""
        assert self.runs is not None
        known = sorted(self.rollouts.step.unique())
        chosen = sorted({int(known[i]) for i in np.linspace(0, len(known) - 1, steps).astype(int)})
        query = f"SELECT traj_id, {columns} FROM transcripts WHERE step = ?"
        return [self.runs.arrow(query, [step]) for step in chosen]

    def last(self, window: int = WINDOW) -> pd.DataFrame:
        """Return the rollouts of the last steps."""
        return self.rollouts[self.rollouts.step.isin(sorted(self.rollouts.step.unique())[-window:])]


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


@dataclass(frozen=True)
class Rule:
    """A rule: what it reads, the cause that it names, what to do, and where the idea comes from."""

    name: str
    reads: tuple[str, ...]
    cause: str
    remedy: str
    source: str
    check: Callable[[Log], Evidence | None]


def share(hits: pd.Series, rollouts: pd.DataFrame) -> tuple[float, float, float]:
    """Return the share of rollouts that hit, with its 95% interval over problems."""
    by = hits.astype(float).groupby(rollouts.problem_id.fillna(rollouts.group_id)).agg(["sum", "size"])
    found = ratio(by["sum"].to_numpy(float), by["size"].to_numpy(float), len(hits))
    return found.value, found.low, found.high


def percent(value: tuple[float, float, float]) -> str:
    """Return "12% [9%, 15%]"."""
    middle, low, high = value
    return f"{middle:.0%}" if np.isnan(low) else f"{middle:.0%} [{low:.0%}, {high:.0%}]"


def change(series: pd.Series) -> tuple[float, float, float]:
    """Return the mean of the last third of the steps minus that of the first third, with a 95% interval over steps (Welch)."""
    values = series.dropna().to_numpy(float)
    third = len(values) // 3
    if third < 2:
        return np.nan, np.nan, np.nan
    first, last = values[:third], values[-third:]
    error = float(np.sqrt(first.var(ddof=1) / third + last.var(ddof=1) / third))
    difference = float(last.mean() - first.mean())
    half = critical_t(2 * third - 2) * error
    return difference, difference - half, difference + half


def steps_where(log: Log, condition: pd.Series) -> list[int]:
    """Return the steps at which a condition on the rows of `log.steps` holds."""
    return log.steps.step[condition.fillna(False).astype(bool)].astype(int).tolist()


def examples(rollouts: pd.DataFrame) -> list[str]:
    """Return up to `SHOWN` ids of rollouts, newest first."""
    return rollouts.sort_values("step", ascending=False).traj_id.head(SHOWN).tolist()
