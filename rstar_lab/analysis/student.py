"""Student's t distribution for integer degrees of freedom, in closed form.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
"""

from collections.abc import Sequence
from math import atan, cos, isinf, nan, pi, sin, sqrt

import numpy as np


def two_sided_p(t: float, degrees: int) -> float:
    """Return the probability of |T| >= |t| for Student's t with `degrees` degrees of freedom."""
    if degrees < 1 or t != t:
        return nan
    if isinf(t):
        return 0.0
    theta = atan(abs(t) / sqrt(degrees))
    odd = degrees % 2
    term = cos(theta) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(3 if odd else 2, degrees - 1, 2):
        term *= cos(theta) ** 2 * (power - 1) / power
        total += term
    inside = 2 / pi * (theta + sin(theta) * total) if odd else sin(theta) * total
    return min(1.0, max(0.0, 1 - inside))


def critical_t(degrees: int, level: float = 0.95) -> float:
    """Return the half width, in standard errors, of a two-sided interval of this level."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > 1 - level else (low, middle)
    return high


def mean_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> tuple[float, float, float, float]:
    """Return mean, lower end, upper end and two-sided p of "the mean is 0" for independent values.

    With one value the ends and p are NaN; without values everything is NaN.
    """
    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        return (float(data[0]) if len(data) else nan), nan, nan, nan
    mean, error = float(data.mean()), float(data.std(ddof=1)) / sqrt(len(data))
    half = critical_t(len(data) - 1, level) * error
    p = two_sided_p(mean / error, len(data) - 1) if error else (1.0 if mean == 0 else 0.0)
    return mean, mean - half, mean + half, p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for several comparisons (Holm 1979). NaN stays NaN and is not counted."""
    defined = sorted((p, index) for index, p in enumerate(p_values) if p == p)
    adjusted = [nan] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(defined):
        largest = max(largest, min(1.0, p * (len(defined) - rank)))
        adjusted[index] = largest
    return adjusted
