"""The trainer's process under verl at the size of the paper's step, with scripted rollouts of 8,000 tokens."""

import pytest

from benchmarks.scale import bench
from benchmarks.verl_scale import RUN, TOKENS, measure_step
from rstar_lab.runs.reader import RunReader


@pytest.mark.soak
def test_tokens_and_texts_do_not_reach_the_trainers_process(tmp_path):
    rollouts = 512
    found = measure_step(rollouts, tmp_path)
    tokens = rollouts * TOKENS * 9  # bytes: ids, mask and log-probs in compact form
    assert found["memory_gb"] * 1e9 < tokens, found
    reader = RunReader(tmp_path / RUN)
    table = reader.read("transcripts", ["traj_id", "response_ids", "trainer_log_probs"])
    assert table.num_rows == rollouts and table["traj_id"].to_pylist() == sorted(table["traj_id"].to_pylist())
    assert set(len(ids) for ids in table["response_ids"].to_pylist()) == {TOKENS}
    assert table["trainer_log_probs"].null_count == rollouts // 2


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_step_of_the_paper_stays_under_2_gb_and_10_s():
    lines = {line["name"]: line["value"] for line in bench()}
    print(lines)
    assert lines["driver_memory"] < 2, lines
    assert lines["driver_select"] + lines["driver_store"] < 10, lines
    assert lines["scheduler_decision"] < 1, lines
