"""Counterfactuals: the rollouts of a stored step that other recipe keys would have selected, and the gradient of the
resulting update.

The rollouts are selected, weighted and differentiated by the functions that training uses. Nothing is sampled. The
gradients need torch, a stored checkpoint, and the token arrays of the selected rollouts.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.line_panels import Panel, draw_panels, panel_place
from rstar_lab.runs import RunStoreError
from rstar_lab.untrusted.text import counted

if TYPE_CHECKING:
    from rstar_lab.rl.training.counterfactual import Selection, StoredStep

TRAINED = "as trained"
RULES: dict[str, dict[str, Any]] = {
    "paper rule": {"method.roc.rule": "paper"},
    "released rule": {"method.roc.rule": "released"},
    "random": {"method.roc.rule": "random"},
    # RoC's numbers of successes and failures, drawn uniformly
    "quotas": {"method.roc.rule": "paper", "method.roc.penalties": []},
    "all rollouts": {"method.roc.rule": "none"},
}
_ROWS = [
    "step", "rule", "traj_id", "group_id", "problem_id", "reward", "penalty", "kept", "kept_share", "advantage",
]  # fmt: skip
_NO_GRADIENT = {
    "loss": np.nan, "gradient_norm": np.nan, "gradient_cosine": np.nan, "weights_step": None, "note": "", "without_effect": "",
}  # fmt: skip
_PANELS = {
    "changed": ("rollouts replaced", ".0%"),
    "error_rate_correct": ("tool-error rate, kept and correct", ".0%"),
    "mean_positive_advantage": ("mean positive advantage", ".2f"),
    "gradient_cosine": ("gradient cosine to the trained batch", ".2f"),
}


@dataclass(frozen=True)
class Counterfactual:
    """Result of `counterfactual`.

    rows: one row per rollout and rule, with `as trained` as the first rule: step, rule, traj_id, group_id, problem_id,
    reward, penalty (of this rule), kept, kept_share (share of draws that kept it), advantage (NaN if not kept).
    summary: one row per step and rule: kept, groups, changed (share of the kept rollouts that were not trained on),
    positive_share, error_rate_correct, mean_positive_advantage, loss, gradient_norm, gradient_cosine (to the gradient of
    the trained batch under the run's own settings), weights_step, note (why a gradient is missing).
    """

    rows: pd.DataFrame
    summary: pd.DataFrame

    def advantages(self, step: int | None = None) -> pd.DataFrame:
        """Return one row per rollout of a step and one column per rule: its advantage, NaN where it is not kept.

        step: default: the first.
        """
        rows = self.rows[self.rows.step == (self.rows.step.min() if step is None else step)]
        names = list(dict.fromkeys(rows.rule))
        table = rows.pivot(index="traj_id", columns="rule", values="advantage")[names]
        first = rows[rows.rule == TRAINED].set_index("traj_id")[["problem_id", "reward", "penalty"]]
        return first.join(table).reset_index()

    @property
    def figure(self) -> Figure:
        """Return the summary as bars for one step, or as lines over several steps."""
        panels = {column: panel for column, panel in _PANELS.items() if self.summary[column].notna().any()}
        if not panels:
            raise RunStoreError(
                "no rollout of these steps is kept: the rewards of each group are equal; choose other steps"
            )
        several = self.summary.step.nunique() > 1
        at = self.summary.step if several else self.summary.rule
        drawn = [
            Panel(title, pd.DataFrame({"line": self.summary.rule, "x": at, "value": self.summary[name]}))
            for name, (title, _) in panels.items()
        ]
        figure = draw_panels(drawn, x="step" if several else "", hover="%{y:.3g}")
        for number, (_, number_format) in enumerate(panels.values()):
            figure.update_yaxes(tickformat=number_format, **panel_place(number))
        return Figure(figure, self.summary)


def counterfactual(
    run: str | Path,
    step: int | Sequence[int],
    rules: Sequence[str | Mapping[str, Any]] = tuple(RULES),
    *,
    draws: int = 20,
    gradients: bool = True,
    functions: Collection[str] = (),
) -> Counterfactual:
    """Compare the selection that a step of a run was trained on with the selections of other recipe keys.

    run: folder of a training run. step: one or several. rules: names of RULES, or mappings of keys of the recipe section
    `rl` to changed values, such as {"method.roc.penalties": ["errors"]}. draws: number of
    draws of a random rule from which kept_share is computed; the other columns use the draw with the seed of training.
    gradients: compute losses and gradients, at the weights of the stored checkpoint that is nearest to the step (column
    weights_step). functions: functions in the run's method that are yours. Others are not imported, because the run folder may come
    from somebody else.

    Raises RunStoreError for an unknown rule, run or step, and RecipeError for an unknown key.
    """
    # rl imports torch, which the other functions of this package do not need.
    from rstar_lab.rl.training import counterfactual as lab

    named: dict[str, dict[str, Any]] = {}
    for rule in rules:
        if isinstance(rule, str) and rule not in RULES:
            choices = ", ".join(RULES)
            raise RunStoreError(f"rules: {rule!r} is unknown; choose from {choices}, or give a mapping of rl keys")
        changes = dict(RULES[rule] if isinstance(rule, str) else rule)
        named[rule if isinstance(rule, str) else ", ".join(f"{key}={value}" for key, value in rule.items())] = changes
    rows, summaries = [], []
    model: Any = None
    loaded: Path | None = None
    for number in [step] if isinstance(step, int | np.integer) else step:
        stored = lab.StoredStep(Path(run), int(number), functions)
        weights = stored.checkpoint() if gradients else None
        if weights is not None and weights[1] != loaded:
            model, loaded = lab.open_model(weights[1]), weights[1]
        settings = {TRAINED: stored.rl} | {name: stored.settings(changes) for name, changes in named.items()}
        trained_gradient = None
        for name, rl in settings.items():
            selections = [stored.trained]
            if name != TRAINED:
                times = 1 if rl.method.roc.rule in ("released", "none") else draws
                selections = [stored.select(rl, draw) for draw in range(times)]
            table = _rows(stored, name, selections, stored.penalties(rl))
            line = {"step": int(number), "rule": name} | _summary(stored, table, selections[0]) | _NO_GRADIENT
            missing = lab.missing_tokens(selections[0])
            if not gradients:
                line["note"] = "gradients=False"
            elif weights is None:
                line["note"] = "the run has no checkpoint"
            elif missing:
                line["note"] = f"{counted(missing, 'selected rollout')} without token arrays"
            elif selections[0].trajectories:
                gradient = lab.batch_gradient(model, selections[0], rl, stored.seed)
                trained_gradient = gradient if name == TRAINED else trained_gradient
                line |= {"loss": gradient.loss, "gradient_norm": float(gradient.vector.norm())} | gradient.stats
                line["weights_step"] = weights[0]
                line["note"] = "; ".join(lab.gradient_notes(rl))
                line["without_effect"] = ", ".join(lab.keys_without_effect(rl, named.get(name, {})))
                if trained_gradient is not None:
                    line["gradient_cosine"] = lab.cosine(gradient.vector, trained_gradient.vector)
            else:
                line["note"] = "no rollout is kept: the rewards of each group are equal"
            rows.append(table)
            summaries.append(line)
    return Counterfactual(pd.concat(rows, ignore_index=True), pd.DataFrame(summaries))


def _rows(
    stored: "StoredStep", rule: str, selections: Sequence["Selection"], penalties: Mapping[str, float]
) -> pd.DataFrame:
    kept = {t.traj_id: value for t, value in zip(selections[0].trajectories, selections[0].advantages, strict=True)}
    times = Counter(t.traj_id for selection in selections for t in selection.trajectories)
    rows = [
        (stored.step, rule, t.traj_id, t.group_id, t.problem_id, t.reward, penalties[t.traj_id], t.traj_id in kept,
         times[t.traj_id] / len(selections), kept.get(t.traj_id, np.nan))
        for t in stored.rollouts
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=_ROWS)


def _summary(stored: "StoredStep", table: pd.DataFrame, selection: "Selection") -> dict[str, Any]:
    trained = {t.traj_id for t in stored.trained.trajectories}
    kept = selection.trajectories
    correct = [t.errors_and_calls for t in kept if t.reward > 0]
    calls = sum(count for _, count in correct)
    positive = table.advantage[table.advantage > 0]
    return {
        "kept": len(kept),
        "groups": selection.groups,
        "changed": float(np.mean([t.traj_id not in trained for t in kept])) if kept else np.nan,
        "positive_share": float(np.mean([t.reward > 0 for t in kept])) if kept else np.nan,
        "error_rate_correct": sum(errors for errors, _ in correct) / calls if calls else np.nan,
        "mean_positive_advantage": float(positive.mean()) if len(positive) else np.nan,
    }
