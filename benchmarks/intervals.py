"""How often intervals contain the truth and comparisons of equal sides show a difference: `rstar-lab bench intervals`.

Problems have pass rates from a beta distribution, rollouts are binomial. The interval of a rate claims to contain the mean pass rate
of the distribution; `compare` and the ablation report claim to show a difference in at most 5% of the cases without one.
`python -m benchmarks.intervals` prints tables; docs/benchmarks.md has the first one and the ranges of the others.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.ablation import SIGNIFICANT, ablation_report
from rstar_lab.common.estimates import Side, paired_difference, ratio

SIMULATIONS = 2000
SIZES = ((5, 16), (8, 16), (16, 16), (30, 16), (64, 4), (128, 4), (500, 4))  # problems, rollouts of each
RATES = (0.5, 0.2, 0.9, 0.97, 0.03)
SPREAD = 1.0  # sum of the parameters of the beta distribution: most problems are nearly always or nearly never solved


def coverage(problems: int, rollouts: int, rate: float, simulations: int = SIMULATIONS, seed: int = 0) -> float:
    """Return the share of simulated evaluations whose 95% interval of the pass rate contains the truth."""
    rng = np.random.default_rng([seed, problems, rollouts, round(1000 * rate)])
    hits = 0
    for _ in range(simulations):
        correct = rng.binomial(rollouts, rng.beta(rate * SPREAD, (1 - rate) * SPREAD, problems))
        found = ratio(correct.astype(float), np.full(problems, float(rollouts)), problems * rollouts)
        hits += found.low <= rate <= found.high
    return hits / simulations


def size_of_comparison(
    problems: int,
    rollouts: int,
    rate: float,
    runs: int = 1,
    seed_deviation: float = 0.0,
    simulations: int = SIMULATIONS,
    seed: int = 0,
) -> float:
    """Return the share of comparisons of equal sides that show a difference.

    runs: runs of each side. seed_deviation: standard deviation of the logit of the pass rates between runs.
    """
    rng = np.random.default_rng([seed, problems, rollouts, round(1000 * rate), runs, round(1000 * seed_deviation)])
    shown = 0
    samples = np.full((runs, problems), float(rollouts))
    for _ in range(simulations):
        rates = np.clip(rng.beta(rate * SPREAD, (1 - rate) * SPREAD, problems), 1e-9, 1 - 1e-9)
        logits = np.log(rates / (1 - rates))
        sides = []
        for _side in range(2):
            shifted = 1 / (1 + np.exp(-(logits + seed_deviation * rng.standard_normal((runs, 1)))))
            sides.append(Side(rng.binomial(rollouts, shifted).astype(float), samples))
        found = paired_difference(sides[0], sides[1], 2 * runs * problems * rollouts)
        shown += not (np.isnan(found.low) or found.low <= 0 <= found.high)
    return shown / simulations


def size_of_ablation(seeds: int, problems: int, arms: int = 3, simulations: int = 500, seed: int = 0) -> float:
    """Return the share of ablation reports of equal arms, with two metrics, that show a difference in any of them."""
    rng = np.random.default_rng([seed, seeds, problems, arms])
    shown = 0
    keys = [(f"arm {arm}", number) for arm in range(arms) for number in range(seeds)]
    for _ in range(simulations):
        frame = pd.DataFrame(keys, columns=["arm", "seed"]).assign(step=1)
        frame["run_id"] = frame.arm + "-" + frame.seed.astype(str)
        for metric, rate in (("held_out", 0.6), ("tool_error_rate_correct", 0.2)):
            frame[f"{metric}_numerator"] = rng.binomial(problems, rate, len(frame)).astype(float)
            frame[f"{metric}_denominator"] = float(problems)
        report = ablation_report(frame, control="arm 0")
        shown += bool((report.table.p_holm < SIGNIFICANT).any())
    return shown / simulations


def bench() -> Iterator[dict[str, Any]]:
    """Yield one row per simulation: the coverage of 95% intervals, and the share of false differences."""
    for problems, rollouts in SIZES:
        for rate in RATES:
            name = f"coverage, {problems} x {rollouts}, rate {rate:g}"
            yield _line(name, coverage(problems, rollouts, rate), "coverage", SIMULATIONS)
    for problems in (5, 8, 30, 128):
        for rollouts in (1, 4, 16):
            found = size_of_comparison(problems, rollouts, 0.5)
            yield _line(f"compare, {problems} x {rollouts}, one run", found, "false differences", SIMULATIONS)
    for deviation in (0.0, 0.15, 0.4):
        for runs in (2, 3, 5, 8):
            found = size_of_comparison(96, 2, 0.5, runs, deviation)
            yield _line(f"compare, 96 x 2, {runs} runs, sd {deviation:g}", found, "false differences", SIMULATIONS)
    for seeds in (2, 3, 5, 8):
        for problems in (30, 192):
            found = size_of_ablation(seeds, problems)
            yield _line(f"ablation, {seeds} seeds, {problems} problems", found, "false differences", 500)


def _line(name: str, value: float, unit: str, n: int) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "against": None, "ratio": None, "n": n}


def tables() -> str:
    """Return the coverage of intervals, and how often comparisons of equal sides show a difference, as Markdown tables."""
    lines = ["| problems x rollouts | " + " | ".join(f"rate {rate:g}" for rate in RATES) + " |", "|---" * 6 + "|"]
    for problems, rollouts in SIZES:
        cells = [f"{coverage(problems, rollouts, rate):.1%}" for rate in RATES]
        lines.append(f"| {problems} x {rollouts} | {' | '.join(cells)} |")
    lines += ["", "| one run on each side | 1 rollout | 4 rollouts | 16 rollouts |", "|---|---|---|---|"]
    for problems in (5, 8, 30, 128):
        cells = [f"{size_of_comparison(problems, rollouts, 0.5):.1%}" for rollouts in (1, 4, 16)]
        lines.append(f"| {problems} problems | {' | '.join(cells)} |")
    lines += ["", "| runs on each side | seeds equal | sd 0.15 | sd 0.4 |", "|---|---|---|---|"]
    for runs in (2, 3, 5, 8):
        cells = [f"{size_of_comparison(96, 2, 0.5, runs, deviation):.1%}" for deviation in (0.0, 0.15, 0.4)]
        lines.append(f"| {runs} | {' | '.join(cells)} |")
    lines += ["", "| seeds of an arm | 30 held-out problems | 192 |", "|---|---|---|"]
    for seeds in (2, 3, 5, 8):
        cells = [f"{size_of_ablation(seeds, problems):.1%}" for problems in (30, 192)]
        lines.append(f"| {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
