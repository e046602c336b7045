"""Tests that the sizing formulas of docs/sandbox.md agree with the simulated queue."""

import numpy as np
import pytest

from benchmarks.sandbox_sizing import MIX, cores_for_burst, cores_for_rate, draw_service_s, mean_cpu_ms, simulate


@pytest.mark.parametrize(("calls", "latency_s"), [(45_000, 0.3), (5_000, 0.5), (20_000, 2.0)])
def test_a_burst_on_the_computed_cores_has_the_expected_latency(calls, latency_s):
    cores = cores_for_burst(calls, latency_s, mean_cpu_ms(MIX))
    latencies = simulate(np.zeros(calls), draw_service_s(calls, MIX), cores)
    assert latencies.mean() == pytest.approx(latency_s, rel=0.05)


def test_spread_arrivals_wait_little_on_the_computed_cores():
    calls, seconds = 45_000, 60.0
    cores = cores_for_rate(calls / seconds, mean_cpu_ms(MIX))
    service_s = draw_service_s(calls, MIX)
    latencies = simulate(np.sort(np.random.default_rng(1).uniform(0, seconds, calls)), service_s, cores)
    assert latencies.mean() < 2 * service_s.mean()
    assert (latencies >= service_s - 1e-9).all()


def test_two_simulated_servers_share_the_calls():
    assert simulate(np.array([0.0, 0.0, 0.0, 5.0]), np.array([1.0, 3.0, 1.0, 1.0]), 2).tolist() == [1.0, 3.0, 2.0, 1.0]


def test_documented_numbers_equal_the_computed_ones(request):
    text = (request.config.rootpath / "docs" / "sandbox.md").read_text()
    assert f"**{mean_cpu_ms(MIX):.1f} CPU ms per call**" in text
    assert f"**{cores_for_burst(45_000, 0.3, mean_cpu_ms(MIX))} cores**" in text
