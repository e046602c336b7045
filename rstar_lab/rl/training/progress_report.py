"""What a run has achieved: each model against the one before it, on the same held-out problems."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rstar_lab.common.estimates import Side, format_interval, paired_difference
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.text import counted

MOST_FAIL = 0.5  # share of failed calls above which RL has little to learn from


def compare_models(before: Path, after: Path) -> tuple[list[str], bool]:
    """Compare two evaluations of the same problems.

    Returns lines with the paired difference of pass@1 with its interval, and failed calls and truncated rollouts before and after; and
    whether most calls of the second model fail.
    """
    names = [folder.name for folder in (before, after)]
    rows = [[row for row in _rollouts(folder) if row["stop_reason"] not in UNUSABLE] for folder in (before, after)]
    common = sorted({row["problem_id"] for row in rows[0]} & {row["problem_id"] for row in rows[1]})
    solved = [{name: [0.0, 0.0] for name in common} for _ in rows]
    for side, own in zip(solved, rows, strict=True):
        for row in own:
            if row["problem_id"] in side:
                side[row["problem_id"]][0] += row["reward"] > 0
                side[row["problem_id"]][1] += 1
    sides = [Side(*(np.array([[side[name][part] for name in common]]) for part in (0, 1))) for side in solved]
    estimate = paired_difference(sides[0], sides[1], sum(map(len, rows)))
    certain = estimate.low > 0 or estimate.high < 0  # False without an interval
    verdict = ("better" if estimate.value > 0 else "worse") if certain else "not shown to differ"
    interval, problems = format_interval(estimate.as_list(), "+.1%"), counted(len(common), "problem")
    lines = [f"{names[1]} against {names[0]}: pass@1 {interval} on {problems}: {verdict}"]
    failed, truncated = [_failed_share(own) for own in rows], [_mean([row["truncated"] for row in own]) for own in rows]
    lines.append(f"  failed calls {_arrow(failed)}, truncated {_arrow(truncated)}")
    return lines, (failed[1] or 0.0) > MOST_FAIL


def failed_calls(folder: Path) -> float | None:
    """Return the share of failed calls of an evaluation; None without calls."""
    return _failed_share(_rollouts(folder))


def _rollouts(folder: Path) -> list[dict]:
    columns = ["problem_id", "reward", "calls", "errors", "truncated", "stop_reason"]
    return RunReader(folder).read("trajectories", columns).to_pylist()


def _failed_share(rows: Sequence[dict]) -> float | None:
    calls = sum(row["calls"] for row in rows)
    return sum(row["errors"] for row in rows) / calls if calls else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _arrow(shares: Sequence[float | None]) -> str:
    before, after = ("none" if share is None else f"{share:.0%}" for share in shares)
    return f"{before} → {after}"
