"""How many cores a sandbox needs: the arithmetic, and a simulation of the queue to check it.

The CPU time of a call is what `rstar-lab bench sandbox` measures (its lines cpu_a, cpu_b, cpu_c).
"""

import heapq
import math

import numpy as np

# The share of each kind of call and its CPU time in ms, zygote, HTTP and JSON included; docs/sandbox.md names the machine.
MIX = {"bare": (0.72, 3.1), "numpy": (0.16, 4.2), "sympy": (0.12, 15.0)}


def mean_cpu_ms(mix: dict[str, tuple[float, float]]) -> float:
    """Of one call: the mean over kinds of (share, CPU ms)."""
    total = sum(share for share, _ in mix.values())
    return sum(share * ms for share, ms in mix.values()) / total


def cores_for_burst(calls: int, mean_latency_s: float, cpu_ms: float) -> int:
    """Cores that answer `calls` arriving at once within `mean_latency_s` on average.

    The k-th of n calls on c cores is done after about k * cpu / c, the mean call after n * cpu / (2 c).
    """
    return math.ceil(calls * cpu_ms / 1000 / (2 * mean_latency_s))


def cores_for_rate(calls_per_s: float, cpu_ms: float, utilisation: float = 0.7) -> int:
    """Cores for calls that arrive spread over time, busy for `utilisation` of it so that queues stay short."""
    return math.ceil(calls_per_s * cpu_ms / 1000 / utilisation)


def simulate(arrivals_s: np.ndarray, service_s: np.ndarray, cores: int) -> np.ndarray:
    """Latency (s) of each call: first come, first served by `cores` servers.

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
    """Service times (s) of so many calls of the mix, in random order, scattered by 20% about each kind's mean."""
    rng = np.random.default_rng(seed)
    shares = np.array([share for share, _ in mix.values()])
    means = np.array([ms for _, ms in mix.values()]) / 1000
    kinds = rng.choice(len(means), size=calls, p=shares / shares.sum())
    return means[kinds] * rng.gamma(25.0, 1 / 25.0, size=calls)
