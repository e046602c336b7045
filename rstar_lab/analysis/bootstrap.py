"""Confidence intervals for ratios of sums, with the rollouts of one problem resampled together.

Rollouts of one problem resemble each other, so problems are the independent units: a bootstrap that resampled rollouts
would give intervals that are too narrow (Cameron, Gelbach, Miller 2008, on clustered errors).
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number with its interval: `n` observations in `clusters` clusters. NaN where there is nothing to say."""

    value: float
    low: float
    high: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n}, {self.clusters} problems)"


def draws(clusters: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """(resamples, clusters): how often each cluster is in each resample."""
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
    """sum(numerator) / sum(denominator), both (clusters,), with a percentile bootstrap over the clusters.

    Clusters whose denominator is 0 or NaN say nothing and are left out. One cluster alone has no interval: NaN.
    """
    known = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    numerator, denominator = numerator[known], denominator[known]
    clusters = len(numerator)
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, 0)
    value = float(numerator.sum() / denominator.sum())
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    weights = draws(clusters, resamples, seed)
    samples = (weights @ numerator) / (weights @ denominator)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n, clusters)


def paired_difference(
    numerator_a: np.ndarray,
    denominator_a: np.ndarray,
    numerator_b: np.ndarray,
    denominator_b: np.ndarray,
    n: int,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Estimate:
    """Ratio of b minus ratio of a over the same clusters, resampled together; all arguments (clusters,)."""
    parts = np.stack([numerator_a, denominator_a, numerator_b, denominator_b])
    parts = parts[:, np.isfinite(parts).all(axis=0)]
    clusters = parts.shape[1]
    if not clusters or parts[1].sum() == 0 or parts[3].sum() == 0:
        return Estimate(np.nan, np.nan, np.nan, 0, clusters)
    value = float(parts[2].sum() / parts[3].sum() - parts[0].sum() / parts[1].sum())
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, n, 1)
    sums = draws(clusters, resamples, seed) @ parts.T
    with np.errstate(invalid="ignore", divide="ignore"):
        samples = sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
    low, high = np.nanquantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n, clusters)
