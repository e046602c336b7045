"""The LoRA lines of `rstar-lab bench trainer`, with a small model."""

import pytest

from rstar_lab.rl.bench.lora import UPDATES, lora_lines
from rstar_lab.rl.preflight.architecture import Architecture


@pytest.mark.soak
def test_adapters_need_less_memory_than_all_weights():
    time, memory = lora_lines(Architecture(4, 768, 12, 4, 64, 2048, 1024, True))
    assert (time["name"], memory["name"]) == ("trainer_update_lora", "trainer_memory_lora")
    assert time["value"] > 0 and time["n"] == 2 * UPDATES and time["against"].startswith("all weights, ")
    assert memory["ratio"] > 1.2  # a quarter of the training state of all weights, and the same activations
