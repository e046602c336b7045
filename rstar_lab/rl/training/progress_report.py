"""What a run has achieved: each model against the one before it, on the same held-out problems."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rstar_lab.common.estimates import Side, format_interval, mean_difference, paired_difference, ratio
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.text import counted

MOST_FAIL = 0.5  # share of failed calls above which RL has little to learn from
TOO_LARGE_UPDATES = "the updates are too large: lower `lr`, and raise `rl.warmup_steps` or `sft.warmup`"


def compare_models(before: Path, after: Path) -> tuple[list[str], bool]:
    """Compare two evaluations of the same problems.

    Returns lines with the paired difference of pass@1, failed calls, truncation and, if it rose, the remedy; and whether most calls of
    the second model fail.
    """
    names = [folder.name for folder in (before, after)]
    rows = [[row for row in _rollouts(folder) if row["stop_reason"] not in UNUSABLE] for folder in (before, after)]
    solved = [_by_problem(own, lambda row: row["reward"] > 0) for own in rows]
    common = sorted(solved[0].keys() & solved[1].keys())
    sides = [Side(*np.array([side[name] for name in common]).reshape(-1, 2).T[:, None]) for side in solved]
    estimate = paired_difference(sides[0], sides[1], sum(map(len, rows)))
    certain = estimate.low > 0 or estimate.high < 0  # False without an interval
    verdict = ("better" if estimate.value > 0 else "worse") if certain else "not shown to differ"
    interval, problems = format_interval(estimate.as_list(), "+.1%"), counted(len(common), "problem")
    lines = [f"{names[1]} against {names[0]}: pass@1 {interval} on {problems}: {verdict}"]
    failed = [_failed_share(own) for own in rows]
    by = [np.array([*_by_problem(own, lambda row: row["truncated"]).values()]).reshape(-1, 2) for own in rows]
    cut = [ratio(side[:, 0], side[:, 1], len(own)) for side, own in zip(by, rows, strict=True)]
    lines.append(f"  failed calls {_arrow(failed)}, truncated {_arrow([side.as_list()[0] for side in cut])}")
    if (rise := mean_difference(*(side[:, 0] / side[:, 1] for side in by)))[1] > 0.1:
        lines.append(f"  truncated {format_interval(rise, '+.0%')}: {TOO_LARGE_UPDATES}")
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


def _by_problem(rows: Sequence[dict], hit: Callable[[dict], bool]) -> dict[str, np.ndarray]:
    """Return (rollouts that hit, rollouts) by problem."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for row in rows:
        sums[row["problem_id"]] += hit(row), 1
    return sums


def _arrow(shares: Sequence[float | None]) -> str:
    before, after = ("none" if share is None else f"{share:.0%}" for share in shares)
    return f"{before} → {after}"
