"""Forks of rollouts, and the most likely tokens at a position: what the inspector's panels that run a model show."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.inspector.listing import frame_rows, to_json_rows
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE

_END = re.compile(r"(?<!\s)\s*+<\|[a-z_]+\|>\s*$")


@dataclass(frozen=True)
class Fork:
    """Continuations of one rollout, stored as a run of kind `fork`.

    run: its folder. traj_id: the original rollout. reward: reward of the original. state: how the state of the tools was
    restored: `replay`, or `stateless` if they keep none. differing: number of replayed calls whose response differed from
    the stored one. weights: the model folder or URL that was sampled.
    """

    run: Path
    traj_id: str
    reward: float
    state: str
    differing: int
    weights: str

    @property
    def runs(self) -> Runs:
        """The stored run, for `inspect` and data frames."""
        return open_runs(self.run)

    @property
    def tree(self) -> pd.DataFrame:
        """One row per continuation: turn (of the fork, from 0), sample, traj_id, reward, correct (None with a reward of
        your own), answer, turns, calls, errors, response_tokens, stop_reason."""
        columns = [
            "step", "sample", "traj_id", "reward", "correct", "answer", "turns", "calls", "errors",
            "response_tokens", "stop_reason",
        ]  # fmt: skip
        frame = self.runs.trajectories(columns=columns, order_by="step, sample")
        frame.insert(0, "turn", frame.pop("step") - 1)
        return frame

    @property
    def values(self) -> pd.DataFrame:
        """One row per forked turn: turn (from 0), value (share of correct continuations from the start of the turn), low,
        high (95%, Wilson), n. Continuations without a result (engine or environment failed, answer undecided) are excluded."""
        from scipy.stats import binomtest  # half a second

        tree = self.tree
        tree = tree[~tree.stop_reason.isin(UNUSABLE)]
        rows = []
        for turn, part in tree.groupby("turn"):
            n, correct = len(part), int((part.reward > 0).sum())
            low, high = binomtest(correct, n).proportion_ci(method="wilson")
            rows.append({"turn": turn, "value": correct / n, "low": low, "high": high, "n": n})
        return pd.DataFrame(rows, columns=["turn", "value", "low", "high", "n"])

    @property
    def lost_at(self) -> int | None:
        """The turn (from 0) over which the value falls most, or None if it never falls.

        The value after the last turn is the outcome of the original rollout.
        """
        values = self.values
        after = np.append(values.value.to_numpy()[1:], float(self.reward > 0))
        drop = values.value.to_numpy() - after
        return int(values.turn.iloc[int(drop.argmax())]) if len(drop) and drop.max() > 0 else None

    @property
    def figure(self) -> Figure:
        """The value of each forked turn with its interval, and the outcome of the original rollout.

        The axis numbers turns from 1, as the inspector does. `values`, `tree` and `lost_at` number them from 0, as the
        argument `turn` of `Inspector.fork`.
        """
        values = self.values
        figure = go.Figure()
        figure.add_scatter(
            x=values.turn + 1, y=values.value, mode="lines+markers", name="share of correct continuations", line_color=COLOURS[0],
            error_y={"array": values.high - values.value, "arrayminus": values.value - values.low},
            customdata=values[["low", "high", "n"]],
            hovertemplate="turn %{x}: %{y:.0%} [%{customdata[0]:.0%}, %{customdata[1]:.0%}], n = %{customdata[2]}<extra></extra>",
        )  # fmt: skip
        figure.add_hline(y=float(self.reward > 0), line_dash="dot", annotation_text="the original rollout")
        figure.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", title="value")
        figure.update_xaxes(title="fork at the start of turn", dtick=1)
        return Figure(figure, values)

    def payload(self) -> dict[str, Any]:
        """Return values, continuations (tree) and provenance as JSON values. Turns are numbered from 0."""
        return {
            "values": json_rows(self.values), "tree": json_rows(self.tree), "lost_at": self.lost_at, "reward": self.reward,
            "run": self.run.name, "weights": self.weights, "differing": self.differing,
        }  # fmt: skip


def model_argument(weights: str, source: Source, traj_id: str, *, fork: bool = False) -> dict[str, Any]:
    """Return the argument `model` or `url` of `Inspector.alternatives` (or `fork`) for the text of a panel's field.

    weights: a model folder, the URL of a server, or empty for the run's nearest checkpoint. Raises UserError if the run has no
    checkpoint and one is needed: without `weights`, and for a fork on a server, whose tokenizer encodes the edited text.
    """
    is_url = weights.startswith(("http://", "https://"))
    advice = "enter a model folder" if fork else "enter a model folder or the URL of a server"
    if is_url:
        advice = "a server needs its tokenizer; enter a model folder instead of a URL"
    if not weights or (is_url and fork):
        run_id = source.row(traj_id)["run_id"]
        if not RunReader(source.store.run_dir(run_id)).checkpoints():
            raise UserError(f"run {run_id} has no checkpoint: {advice}")
    return {"url": weights} if is_url else {"model": weights or None}


def turn_text(record: Mapping[str, Any], turn: int) -> str:
    """Return the text that the model wrote in a turn (from 0), without the special token at its end."""
    written = own_texts(record.get("messages"))
    return _END.sub("", written[turn]) if turn < len(written) else ""


def alternatives_table(
    run_dir: Path, traj_id: str, position: int, *, k: int, model: str | Path | None, url: str
) -> pd.DataFrame:
    """Return the table of `Inspector.alternatives`. run_dir: folder of the run."""
    from rstar_lab.rl.engines.alternatives import most_likely_tokens  # imports torch

    reader, runs = RunReader(run_dir), open_runs(run_dir)
    record = runs.record(traj_id)
    prompt, response = record["prompt_ids"], record["response_ids"]
    if prompt is None or response is None:
        raise UserError(f"trajectory {traj_id} has no token arrays, which alternatives need: see rl.token_arrays")
    if not 0 <= position < len(response):
        raise UserError(f"position {position}: trajectory {traj_id} has the response tokens 0 to {len(response) - 1}")
    folder = None if model is None else Path(model)
    if folder is None and not url:
        folder = reader.nearest_checkpoint(record["step"])
    likely = most_likely_tokens([*prompt, *response[:position]], response[position], k=k, model=folder, url=url)
    ids = list(likely.log_probs)
    frame = pd.DataFrame({"token_id": ids, "text": runs.texts(reader.run_id, ids) or [None] * len(ids)})
    frame["log_prob"] = list(likely.log_probs.values())
    frame.insert(0, "rank", [likely.rank if token == likely.token_id else i + 1 for i, token in enumerate(ids)])
    frame.insert(3, "probability", np.exp(frame.log_prob))
    frame["stored"] = frame.token_id == likely.token_id
    frame.attrs = {"weights": likely.weights}
    return frame


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as JSON objects."""
    return to_json_rows(*frame_rows(frame))
