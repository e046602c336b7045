"""Estimates over problems: bootstrap confidence intervals and pass@k. Used by evaluations and by analysis.

Intervals are percentile bootstraps over problems. The rollouts of one problem are correlated, so problems are the
independent units; a bootstrap over rollouts gives intervals that are too narrow (Cameron, Gelbach and Miller 2008, on
clustered errors). Every interval uses the same level, number of resamples and seed by default, so the same rollouts give
the same interval everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, isfinite

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
SEED = 0


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
        return f"{interval} (n={self.n}, {self.clusters} problems)"


def format_interval(interval: Sequence[float | None], form: str = ".1%") -> str:
    """Return "value [low, high]". interval: [value, low, high]; None is shown as a dash."""
    value, low, high = ("-" if number is None else format(number, form) for number in interval)
    return f"{value} [{low}, {high}]"


def resample_counts(clusters: int, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Return (resamples, clusters) float64: how often each resample, drawn with replacement, contains each cluster."""
    drawn = np.random.default_rng(seed).integers(0, clusters, (resamples, clusters))
    drawn += clusters * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * clusters)
    return counts.reshape(resamples, clusters).astype(np.float64)


def ratio(
    numerator: np.ndarray,
    denominator: np.ndarray,
    n: int,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = SEED,
) -> Estimate:
    """Return sum(numerator) / sum(denominator), both (clusters,), with its percentile bootstrap interval over clusters.

    n: number of rollouts. Clusters whose denominator is 0 or NaN are left out. With one cluster the interval is NaN;
    without any, the value is NaN too.
    """
    known = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    numerator, denominator = numerator[known], denominator[known]
    clusters = len(numerator)
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    value = float(numerator.sum() / denominator.sum())
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    counts = resample_counts(clusters, resamples, seed)
    samples = (counts @ numerator) / (counts @ denominator)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n, clusters)


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


def paired_difference(
    a: Side, b: Side, n: int, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = SEED
) -> Estimate:
    """Return the ratio of b minus the ratio of a over their common problems.

    Each resample draws the same problems for both sides. If a side has several runs (seeds), it draws runs too.
    """
    sides = [(np.nan_to_num(side.numerator), np.nan_to_num(side.denominator)) for side in (a, b)]
    common = np.logical_and(*(denominator.sum(axis=0) > 0 for _, denominator in sides))
    clusters = int(common.sum())
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    problems = resample_counts(clusters, resamples, seed)
    values, samples = [], []
    for number, (numerator, denominator) in enumerate(sides):
        numerator, denominator = numerator[:, common], denominator[:, common]
        runs = resample_counts(len(numerator), resamples, seed + 1 + number)
        values.append(numerator.sum() / denominator.sum())
        over = np.einsum("br,rp,bp->b", runs, denominator, problems)
        with np.errstate(invalid="ignore", divide="ignore"):
            samples.append(np.einsum("br,rp,bp->b", runs, numerator, problems) / over)
    value = float(values[1] - values[0])
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    low, high = np.nanquantile(samples[1] - samples[0], [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n, clusters)
