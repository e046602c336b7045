"""Computes how many cores a sandbox needs, with a simulation of the queue as a check.

The CPU time of a call is measured by `rstar-lab bench sandbox` (lines cpu_a, cpu_b, cpu_c).
"""

import heapq
import math

import numpy as np

# Kind of call -> (share, CPU ms with zygote, HTTP and JSON). docs/sandbox.md describes the machine.
MIX = {"bare": (0.72, 3.1), "numpy": (0.16, 4.2), "sympy": (0.12, 15.0)}


def mean_cpu_ms(mix: dict[str, tuple[float, float]]) -> float:
    """Return the mean CPU ms of a call. mix: kind -> (share, CPU ms)."""
    total = sum(share for share, _ in mix.values())
    return sum(share * ms for share, ms in mix.values()) / total


def cores_for_burst(calls: int, mean_latency_s: float, cpu_ms: float) -> int:
    """Return the number of cores for which a burst of `calls` calls has a mean latency of `mean_latency_s`.

    On c cores, the k-th of n calls ends after about k * cpu / c, so the mean latency is n * cpu / (2 c).
    """
    return math.ceil(calls * cpu_ms / 1000 / (2 * mean_latency_s))


def cores_for_rate(calls_per_s: float, cpu_ms: float, utilisation: float = 0.7) -> int:
    """Return the number of cores for calls spread over time. A utilisation below 1 keeps the queue short."""
    return math.ceil(calls_per_s * cpu_ms / 1000 / utilisation)


def simulate(arrivals_s: np.ndarray, service_s: np.ndarray, cores: int) -> np.ndarray:
    """Return the latency (s) of each call, with `cores` servers and first come, first served.

    arrivals_s: (calls,), ascending. service_s: (calls,), CPU seconds.
    """
    free = [0.0] * cores
    latencies = np.empty(len(arrivals_s))
    for index, (arrival, service) in enumerate(zip(arrivals_s.tolist(), service_s.tolist(), strict=True)):
        done = max(arrival, heapq.heappop(free)) + service
        heapq.heappush(free, done)
        latencies[index] = done - arrival
    return latencies


def draw_service_s(calls: int, mix: dict[str, tuple[float, float]], seed: int = 0) -> np.ndarray:
    """Draw service times (s) of calls of the mix in random order, with a standard deviation of 20% of each kind's mean."""
    rng = np.random.default_rng(seed)
    shares = np.array([share for share, _ in mix.values()])
    means = np.array([ms for _, ms in mix.values()]) / 1000
    kinds = rng.choice(len(means), size=calls, p=shares / shares.sum())
    return means[kinds] * rng.gamma(25.0, 1 / 25.0, size=calls)
