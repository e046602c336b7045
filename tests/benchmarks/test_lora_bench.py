"""The lines of `bench trainer` that compare LoRA with the training of all weights, with a model of 0.1 million parameters."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import lora
from rstar_lab.rl.preflight.context import Architecture
from rstar_lab.rl.training.update import Learner

SHAPE = Architecture(2, 64, 2, 1, 32, 128, 256, True)


@pytest.fixture
def trained(monkeypatch):
    """Number of trained parameters of each policy update. Measurements run in this process."""
    found = []

    def update(learner, *args, **settings):
        found.append(sum(p.numel() for p in learner.model.parameters() if p.requires_grad))
        return own(learner, *args, **settings)

    own = Learner.update
    monkeypatch.setattr(Learner, "update", update)
    monkeypatch.setattr(lora, "process_pool", ThreadPoolExecutor)
    monkeypatch.setattr(lora, "UPDATES", 2)
    monkeypatch.setattr(lora, "TOKENS", 8)
    return found


@pytest.mark.slow
def test_lora_and_all_weights_are_measured_in_turn(trained, monkeypatch):
    seconds, memory = lora.lora_lines(SHAPE)
    every = sum(p.numel() for p in lora.build_model(SHAPE, "cpu", 8).parameters())
    runs = [trained[start : start + 3] for start in range(0, 12, 3)]
    assert len(trained) == 12 and all(len(set(run)) == 1 for run in runs)
    full, adapters, again, last = (run[0] for run in runs)
    assert full == last == every and 0 < adapters == again < every
    assert [seconds["name"], memory["name"]] == ["trainer_update_lora", "trainer_memory_lora"]
    assert (seconds["unit"], seconds["n"], memory["unit"], memory["n"]) == ("s", 4, "GB", 2)
    for line in (seconds, memory):
        others = float(line["against"].removeprefix("all weights, ").removesuffix(f" {line['unit']}"))
        assert line["value"] > 0 and line["ratio"] == pytest.approx(others / line["value"], rel=0.01)


def test_memory_is_what_a_measurement_adds_to_the_process():
    before = lora._status_gb("VmRSS")
    with mmap.mmap(-1, 100_000_000) as block:  # an allocator could reuse freed memory of other tests
        for start in range(0, len(block), 1_000_000):
            block[start : start + 1_000_000] = b"1" * 1_000_000
        assert lora._status_gb("VmRSS") - before == pytest.approx(0.1, abs=0.02)
        assert lora._status_gb("VmHWM") >= lora._status_gb("VmRSS")
