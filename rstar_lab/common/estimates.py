"""Estimates over problems and over runs: intervals, comparisons and pass@k. Used by evaluations and by analysis.

The rollouts of one problem are correlated, so problems are the independent units (Cameron, Gelbach and Miller 2008, on clustered
errors). `benchmarks/intervals.py` measures how often the intervals contain the truth and how often comparisons of equal sides show a
difference; docs/benchmarks.md has the measured coverage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, isfinite, nan, sqrt

import numpy as np
from scipy.special import stdtr, stdtrit

from rstar_lab.untrusted.text import counted

LEVEL = 0.95
# Weight of an additional problem that is always solved, and of one that never is, in the variance of a rate. Without them, a few
# problems that are all solved would have a variance of 0.
PSEUDO_PROBLEMS = 0.25


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, from `n` rollouts of `clusters` problems. Undefined numbers are NaN."""

    value: float
    low: float
    high: float
    n: int
    clusters: int

    def as_list(self) -> list[float | None]:
        """Return [value, low, high] as JSON values: None instead of NaN."""
        return [number if isfinite(number) else None for number in (self.value, self.low, self.high)]

    def __str__(self) -> str:
        interval = format_interval(self.as_list(), ".3f")
        return f"{interval} (n={self.n}, {counted(self.clusters, 'problem')})"


def format_interval(interval: Sequence[float | None], form: str = ".1%") -> str:
    """Return "value [low, high]". interval: [value, low, high]; None is shown as a dash."""
    value, low, high = ("-" if number is None else format(number, form) for number in interval)
    return f"{value} [{low}, {high}]"


def ratio(numerator: np.ndarray, denominator: np.ndarray, n: int, *, level: float = LEVEL) -> Estimate:
    """Return sum(numerator) / sum(denominator), with its interval over clusters.

    If every cluster's ratio lies in [0, 1] (a rate), the interval is Wilson's (1927) at the effective number of observations,
    which follows from the variance between clusters, with the quantile of Student's t (after Korn and Graubard 1998). It is never of
    zero width. Otherwise it is Student's interval with the linearised variance of a ratio.

    Args:
        numerator: (clusters,), such as the correct rollouts of each problem.
        denominator: (clusters,), such as its rollouts. Clusters where it is 0 or NaN are left out.
        n: Number of rollouts.
        level: Share of cases in which the interval is to contain the truth.

    Returns:
        The estimate. With one cluster the interval is NaN; without any, the value is NaN too.
    """
    known = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    numerator, denominator = np.asarray(numerator[known], float), np.asarray(denominator[known], float)
    clusters = len(numerator)
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    value = float(numerator.sum() / denominator.sum())
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    t = critical_t(clusters - 1, level)
    positive = bool((numerator >= 0).all())
    if positive and (numerator <= denominator * (1 + 1e-9)).all():
        low, high = _rate_interval(
            numerator / denominator.mean(), denominator / denominator.mean(), max(n, clusters), t
        )
    else:
        residuals = (numerator - value * denominator) / denominator.sum()
        half = t * sqrt(clusters / (clusters - 1) * float((residuals**2).sum()))
        low, high = value - half, value + half
        low = max(low, 0.0) if positive else low
    return Estimate(value, low, high, n, clusters)


def _rate_interval(numerator: np.ndarray, weights: np.ndarray, n: int, t: float) -> tuple[float, float]:
    """Return Wilson's interval of a rate at the effective number of observations, at most n. weights: of the clusters, with
    mean 1. numerator: weight times rate. t: quantile."""
    clusters, extra = len(weights), PSEUDO_PROBLEMS
    value = float(numerator.mean())
    centre = (numerator.sum() + extra) / (clusters + 2 * extra)
    squares = float(((numerator - centre * weights) ** 2).sum()) + extra * ((1 - centre) ** 2 + centre**2)
    variance = squares / (clusters + 2 * extra - 1) / clusters
    size = min(float(centre * (1 - centre) / variance), float(n))
    middle = value + t * t / (2 * size)
    half = t * sqrt(max(value * (1 - value), 0.0) / size + (t / (2 * size)) ** 2)
    scale = 1 + t * t / size
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def pass_at_k(k: int, samples: int, correct: int) -> float:
    """Return the probability that k of the samples, drawn without replacement, contain a correct one: unbiased pass@k.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1. correct: number of correct samples.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


@dataclass(frozen=True)
class Side:
    """Sums of one side of a comparison, (runs, problems). The denominator is NaN or 0 if a run did not sample a problem."""

    numerator: np.ndarray
    denominator: np.ndarray


def paired_difference(a: Side, b: Side, n: int) -> Estimate:
    """Return the ratio of b minus the ratio of a over their common problems.

    The interval is Student's over the differences within problems. If both sides have several runs (seeds), it is at least as wide
    as Welch's interval over the ratios of the runs. It is NaN with one problem, or if all problems have the same difference.
    """
    sides = [(np.nan_to_num(side.numerator), np.nan_to_num(side.denominator)) for side in (a, b)]
    common = np.logical_and(*(denominator.sum(axis=0) > 0 for _, denominator in sides))
    clusters = int(common.sum())
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    ratios, influences = [], []
    for numerator, denominator in sides:
        numerator, denominator = numerator[:, common], denominator[:, common]
        ratios.append(float(numerator.sum() / denominator.sum()))
        influences.append((numerator - ratios[-1] * denominator) / denominator.sum())  # (runs, problems); sums to 0
    value = ratios[1] - ratios[0]
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    by_problem = influences[1].sum(axis=0) - influences[0].sum(axis=0)
    half = critical_t(clusters - 1) * sqrt(clusters / (clusters - 1) * float((by_problem**2).sum()))
    runs = [len(influence) for influence in influences]
    if min(runs) > 1:
        variances = [k / (k - 1) * float((x.sum(axis=1) ** 2).sum()) for x, k in zip(influences, runs, strict=True)]
        if total := sum(variances):
            parts = sum(variance**2 / (k - 1) for variance, k in zip(variances, runs, strict=True))
            half = max(half, critical_t(max(1, int(total**2 / parts))) * sqrt(total))
    if half < 1e-12:
        return Estimate(value, np.nan, np.nan, n, clusters)
    return Estimate(value, value - half, value + half, n, clusters)


def mean_difference(a: np.ndarray, b: np.ndarray, *, level: float = LEVEL) -> tuple[float, float, float]:
    """Return the mean of b minus that of a with Student's interval. Its width is never zero.

    a, b: shares of the groups of two sides, whose rollouts are independent of those of the other side.
    """
    value, degrees = float(b.mean() - a.mean()), max(1, len(a) + len(b) - 2)
    # 0.25: one more group, 0.5 from its mean. Without it, groups with equal shares would have a width of zero.
    squares = len(a) * float(a.var()) + len(b) * float(b.var()) + 0.25
    half = critical_t(degrees, level) * sqrt(squares / degrees * (1 / len(a) + 1 / len(b)))
    return value, value - half, value + half


def critical_t(degrees: int, level: float = LEVEL) -> float:
    """Return the half width, in standard errors, of a two-sided interval of this level."""
    return float(stdtrit(degrees, (1 + level) / 2))


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float, float]:
    """Return mean, lower end, upper end and two-sided p of "the mean is 0" for independent values.

    With one value, or if all values are equal, the ends and p are NaN: rates of few problems lie on a grid and are equal by
    chance. Without values everything is NaN.
    """
    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        return (float(data[0]) if len(data) else nan), nan, nan, nan
    mean, error = float(data.mean()), float(data.std(ddof=1)) / sqrt(len(data))
    if error <= 1e-12 * max(1.0, abs(mean)):
        return mean, nan, nan, nan
    half = critical_t(len(data) - 1, LEVEL) * error
    return mean, mean - half, mean + half, float(2 * stdtr(len(data) - 1, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for several comparisons (Holm 1979). NaN stays NaN and is not counted."""
    defined = sorted((p, index) for index, p in enumerate(p_values) if p == p)
    adjusted = [nan] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(defined):
        largest = max(largest, min(1.0, p * (len(defined) - rank)))
        adjusted[index] = largest
    return adjusted
