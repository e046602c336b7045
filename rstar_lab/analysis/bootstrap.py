"""Confidence intervals for ratios of sums, by a bootstrap over problems.

The rollouts of one problem are correlated, so problems are the independent units. A bootstrap over rollouts gives
intervals that are too narrow (Cameron, Gelbach and Miller 2008, on clustered errors).
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, from `n` rollouts of `clusters` problems. NaN if it is undefined."""

    value: float
    low: float
    high: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n}, {self.clusters} problems)"


def resample_counts(clusters: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return (resamples, clusters) float64: how often each resample contains each cluster."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples).astype(np.float64)


def ratio(
    numerator: np.ndarray,
    denominator: np.ndarray,
    n: int,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Estimate:
    """Return sum(numerator) / sum(denominator), both (clusters,), with a percentile bootstrap over the clusters.

    Clusters whose denominator is 0 or NaN are left out. With one cluster the interval is NaN.
    """
    known = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    numerator, denominator = numerator[known], denominator[known]
    clusters = len(numerator)
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    value = float(numerator.sum() / denominator.sum())
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    weights = resample_counts(clusters, resamples, seed)
    samples = (weights @ numerator) / (weights @ denominator)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n, clusters)


@dataclass(frozen=True)
class Side:
    """Sums of one side of a comparison, (runs, problems). The denominator is NaN or 0 if a run did not sample a problem."""

    numerator: np.ndarray
    denominator: np.ndarray


def paired_difference(
    a: Side, b: Side, n: int, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
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
