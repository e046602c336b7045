"""Results of `Inspector.fork`: the continuations of a rollout, and the Monte-Carlo value of its turns."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.figure_theme import COLOURS
from rstar_lab.analysis.runs import Runs, open_runs
from rstar_lab.runs.tables import UNUSABLE


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
        tree = self.tree
        tree = tree[~tree.stop_reason.isin(UNUSABLE)]
        rows = []
        for turn, part in tree.groupby("turn"):
            n, correct = len(part), int((part.reward > 0).sum())
            low, high = wilson(correct, n)
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


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a share."""
    z, share = 1.959964, correct / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * float(np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)))
    return max(0.0, centre - half), min(1.0, centre + half)
