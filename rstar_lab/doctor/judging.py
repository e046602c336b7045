"""Judge the rollouts on which two graders disagree, and estimate precision and recall of both.

`rstar-lab audit REWARD --problems FILE --runs RUN` stores the disagreements of the stored rewards and another reward, in random order,
in the folder of the run. `judge` shows them in the inspector: y tags a rollout as `right`, n as `wrong`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from rstar_lab.analysis.inspector.notes import read_notes
from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import ratio
from rstar_lab.runs.files import atomic_write
from rstar_lab.untrusted.files import parse_json, read_text

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
    notes, agreed = read_notes(Path(run)), stored["agreed_right"]
    sides = []  # of each grader: rollouts that only it accepts, how many were judged, and the share of right ones among them
    for of_stored in (True, False):
        rows = [
            row for row in stored["disagreements"] if row["reward"] is not None and (row["stored"] > 0) is of_stored
        ]
        tags = [set(notes.get(row["traj_id"], {}).get("tags", ())) & {RIGHT, WRONG} for row in rows]
        known = [RIGHT in tag for tag in tags if len(tag) == 1]
        found = ratio(np.array(known, float), np.ones(len(known)), len(known), level=0.975)
        sides.append(
            (len(rows), len(known), np.array((found.value, found.low, found.high) if rows else (1.0, 1.0, 1.0)))
        )
    table = []
    for grader, own, other in zip(("stored", stored["reward"]), sides, sides[::-1], strict=True):
        count, seen, share = own
        right, lost = agreed + count * share, other[0] * other[2][[0, 2, 1]]
        recall = right / (right + lost) if agreed else np.full(3, np.nan)
        table.append((grader, agreed + count, seen, *right / (agreed + count or np.nan), *recall))
    names = ("precision", "precision_low", "precision_high", "recall", "recall_low", "recall_high")
    return pd.DataFrame(table, columns=["grader", "accepts", "judged", *names])


def write_disagreements(run: Path, content: dict[str, Any]) -> None:
    """Store the disagreements of an audit in the folder of a run. Does not follow links."""
    with atomic_write(run / FILE) as file:
        file.write(json.dumps(content).encode())


class Disagreement(TypedDict):
    """A rollout that two rewards judge differently. reward: of the audited function; None if it failed."""

    traj_id: str
    stored: float
    reward: float | None


class Disagreements(TypedDict):
    """What an audit stores. agreed_right: number of rollouts that both rewards accept."""

    reward: str
    agreed_right: int
    disagreements: list[Disagreement]


def read_disagreements(run: Path) -> Disagreements:
    """Return the stored disagreements. Raises UserError."""
    file = run / FILE
    if not file.exists():
        raise UserError(f"{run} has no stored audit: run rstar-lab audit REWARD --problems FILE --runs {run.name}")
    return parse_json(read_text(file), f"{file}: not the disagreements of an audit; repeat the audit", Disagreements)
