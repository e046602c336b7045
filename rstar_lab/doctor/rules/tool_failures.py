"""Calls fail in the infrastructure."""

import numpy as np
import pandas as pd

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.doctor.rule import Evidence, Log, examples, rule


@rule(
    "tools fail through our fault",
    reads=("rollouts.outcomes", "rollouts.calls"),
    cause=(
        "tool calls fail in the infrastructure (sandbox errors, queue time-outs), and the rollouts are trained on"
        " as if the model had failed"
    ),
    remedy=(
        "start more sandbox workers; look at the log of the sandbox; mask such rollouts in the loss and in the "
        "statistics of their group"
    ),
    source="NeMo-Gym #2552; ToRL #27",
)
def check(log: Log) -> Evidence | None:
    called = log.rollouts[log.rollouts.calls.fillna(0) > 0]
    counts = [sum(outcome in FAILURES for outcome in outcomes) for outcomes in called.outcomes.map(_listed)]
    failed, calls = sum(counts), float(called.calls.sum())
    if calls < 50 or failed / calls < 0.02:
        return None
    hit = called[pd.Series(counts, index=called.index) > 0]
    text = (
        f"{failed:,} of {int(calls):,} calls ({failed / calls:.0%}) failed in the infrastructure, in {len(hit):,} "
        f"rollouts"
    )
    return Evidence(
        text, {"share": failed / calls}, sorted(hit.step.unique().astype(int)), examples(hit), len(hit) / len(called)
    )


FAILURES = {str(outcome) for outcome in INFRASTRUCTURE_FAILURES}


def _listed(outcomes: object) -> list[str]:
    return [str(outcome) for outcome in outcomes] if isinstance(outcomes, list | tuple | np.ndarray) else []
