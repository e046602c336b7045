"""Judge the rollouts on which two graders disagree, and estimate precision and recall of both.

`rstar-lab audit REWARD --problems FILE --runs RUN` stores the disagreements of the stored rewards and another reward, in random order,
in the folder of the run. `judge` shows them in the inspector: y tags a rollout as `right`, n as `wrong`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.inspector.notes import read_notes
from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import ratio
from rstar_lab.runs.files import atomic_write
from rstar_lab.untrusted.files import parse_json, read_text, reading

if TYPE_CHECKING:
    from rstar_lab.analysis.inspector.inspector import Inspector

FILE = "disagreements.json"
RIGHT, WRONG = "right", "wrong"


def judge(run: str | Path, n: int = 50) -> "Inspector":
    """Return an inspector of the first `n` disagreements of a run, which are a random sample of all.

    The key y tags the open rollout as right, n as wrong; both open the next one. Raises UserError if no audit of the run is stored.
    """
    from rstar_lab.analysis.inspector.inspector import inspect

    rows = read_disagreements(Path(run))["disagreements"][:n]
    return inspect(run, where={"traj_id": [row["traj_id"] for row in rows]}, judging=True)


def judged(run: str | Path) -> pd.DataFrame:
    """Return precision and recall of the stored reward and of the audited one, from the rollouts that were judged.

    Rollouts on which both agree are taken as correctly graded. The intervals are those of the judged samples (Wilson, 97.5% each, so
    that both hold together in 95% of all cases).

    Returns:
        A row for each grader: grader, accepts (rollouts), judged, precision, precision_low, precision_high, recall, recall_low,
        recall_high. Unknown values are NaN.
    """
    stored = read_disagreements(Path(run))
    notes = read_notes(Path(run))
    parts: dict[str, list[dict[str, Any]]] = {"stored": [], stored["reward"]: []}
    for row in stored["disagreements"]:
        if row["reward"] is not None:  # a reward that failed is no judgement
            parts["stored" if row["stored"] > 0 else stored["reward"]].append(row)
    shares = {}
    for grader, rows in parts.items():
        tags = [set(notes.get(row["traj_id"], {}).get("tags", ())) & {RIGHT, WRONG} for row in rows]
        known = [RIGHT in tag for tag in tags if len(tag) == 1]
        found = ratio(np.array(known, float), np.ones(len(known)), len(known), level=0.975)
        shares[grader] = (len(rows), len(known), (found.value, found.low, found.high) if rows else (1.0, 1.0, 1.0))
    agreed, table = stored["agreed_right"], []
    (first, second) = parts
    for grader, other in ((first, second), (second, first)):
        count, seen, (share, low, high) = shares[grader]
        more, _, (missed, missed_low, missed_high) = shares[other]
        accepts = agreed + count

        def recall(right: float, lost: float, count: int = count, more: int = more) -> float:
            return (agreed + count * right) / (agreed + count * right + more * lost)

        precision = [(agreed + count * value) / accepts if accepts else float("nan") for value in (share, low, high)]
        recalls = (
            [recall(share, missed), recall(low, missed_high), recall(high, missed_low)]
            if agreed
            else [float("nan")] * 3
        )
        table.append((grader, accepts, seen, *precision, *recalls))
    names = ("precision", "precision_low", "precision_high", "recall", "recall_low", "recall_high")
    return pd.DataFrame(table, columns=["grader", "accepts", "judged", *names])


def write_disagreements(run: Path, content: dict[str, Any]) -> None:
    """Store the disagreements of an audit in the folder of a run. Does not follow links."""
    with atomic_write(run / FILE) as file:
        file.write(json.dumps(content).encode())


def read_disagreements(run: Path) -> dict[str, Any]:
    """Return the stored disagreements: reward, agreed_right and disagreements (traj_id, stored, reward, ...)."""
    if not (run / FILE).exists():
        raise UserError(f"{run} has no stored audit: run rstar-lab audit REWARD --problems FILE --runs {run.name}")
    where = f"{run / FILE}: not the disagreements of an audit"
    with reading(where, "; repeat the audit"):
        content = parse_json(read_text(run / FILE), where, dict)
        rows = [
            {**row, "traj_id": str(row["traj_id"]), "reward": row["reward"], "stored": float(row["stored"])}
            for row in content["disagreements"]
        ]
        return content | {
            "reward": str(content["reward"]), "agreed_right": int(content["agreed_right"]), "disagreements": rows,
        }  # fmt: skip
