"""What became of the rollouts of a run: each was trained on, or left out for one reason."""

import pandas as pd

from rstar_lab.analysis.runs import Runs

NAMES = {"trained": "trained on", "roc": "not selected by RoC", "equal_group": "group with equal rewards"}
_PREFIX = "class/"


def rollout_classes(runs: Runs) -> pd.DataFrame:
    """Return one row per run and class: run_id, rollout_class, rollouts, share.

    The rows of a run add up to its stored rollouts. Classes are those of the metrics `class/...`; rollouts that no step counts in
    a class, such as groups dropped for their age, are `not in a batch`. Runs without these metrics have no rows.
    """
    measured = runs.trainer_metrics()
    names = [name for name in measured.columns if name.startswith(_PREFIX)]
    rows = []
    stored = runs.sql("SELECT run_id, count(*) AS n FROM trajectories GROUP BY 1").set_index("run_id").n
    for run_id, own in measured.groupby("run_id") if names else ():
        counts = own[names].sum().astype(int)
        if not own[names].notna().any(axis=None) or run_id not in stored:
            continue
        counts["not in a batch"] = int(stored[run_id]) - int(counts.sum())
        rows += [
            (run_id, name.removeprefix(_PREFIX), int(count), count / int(stored[run_id]))
            for name, count in zip(map(str, counts.index), counts, strict=True)
            if count or name == _PREFIX + "trained"
        ]
    frame = pd.DataFrame(rows, columns=["run_id", "rollout_class", "rollouts", "share"])
    return frame.sort_values(["run_id", "rollouts"], ascending=[True, False], ignore_index=True)


def class_title(name: str) -> str:
    """Return a class for readers, such as "masked (sandbox_error)"."""
    kind, _, reason = name.partition("/")
    return NAMES.get(kind, kind) + (f" ({reason})" if reason else "")
