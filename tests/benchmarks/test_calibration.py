"""The simulator against two real vLLM servers, small. The full comparison: `python -m benchmarks.calibration`."""

import pytest

from benchmarks.calibration import REGIME, Measurement, calibrate, disagreements, recorded_measurements


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_two_servers_rank_the_policies_as_the_simulator_does():
    regime = REGIME.model_copy(update={"rollouts": 16, "mean_tokens": 120, "max_tokens": 400, "kv_tokens": 2112})
    rates, results = await calibrate(regime, rounds=1)
    assert rates.step_s + rates.token_s > 0
    assert [result.policy for result in results] == ["turn-barrier", "static", "least-in-flight", "kv", "adaptive"]
    assert all(result.predicted_s > 0 and result.measured > 0 for result in results)
    assert disagreements(results, margin=0.3) == []  # one replay of so small a step blurs what lies closer together


def test_disagreements_are_clear_predictions_with_the_opposite_order():
    fast = Measurement("fast", 10, [30.0], 0, [0.0])
    near = Measurement("near", 10.4, [20.0], 0, [0.0])
    slow = Measurement("slow", 20, [25.0, 25.0, 99.0], 0, [0.0])
    assert disagreements([fast, near, slow]) == [("fast", "slow")]


def test_recorded_calibration_is_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {result.policy for result in recorded_measurements()} >= {"adaptive", "kv", "least-in-flight"}
