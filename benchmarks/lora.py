"""The lines of `rstar-lab bench trainer` that compare a policy update with LoRA to one of all weights.

Model, rollouts and precision are the same. Each measurement has a process of its own, because a process does not return all
of its memory. Memory is what model, gradients, optimizer and activations add to the process; on a GPU, what they
allocate there. Engines are not included.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import build_model, make_selection, update_keys
from benchmarks.process_pool import process_pool
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.preflight.context import Architecture
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.training.update import Learner

SHAPE = Architecture(12, 768, 12, 4, 64, 2048, 8192, True)  # 82 million parameters
ROLLOUTS, TOKENS, UPDATES = 4, 128, 3
Measurement = tuple[list[float], float]  # seconds of each update after the first, peak memory in GB


def lora_lines(shape: Architecture = SHAPE) -> Iterator[dict[str, Any]]:
    """Yield the lines `trainer_update_lora` (median seconds) and `trainer_memory_lora` (GB)."""
    measurements: dict[bool, list[Measurement]] = {False: [], True: []}
    for lora in (False, True, True, False):  # alternating, so that a change of the machine's speed affects both
        with process_pool(1) as process:
            measurements[lora].append(process.submit(measure, shape, lora).result())
    seconds = {lora: [value for times, _ in runs for value in times] for lora, runs in measurements.items()}
    medians = {lora: statistics.median(values) for lora, values in seconds.items()}
    memory = {lora: max(peak for _, peak in runs) for lora, runs in measurements.items()}
    for name, unit, values, n in (
        ("trainer_update_lora", "s", medians, len(seconds[True])),
        ("trainer_memory_lora", "GB", memory, len(measurements[True])),
    ):
        against = f"all weights, {values[False]:.3g} {unit}"
        yield {
            "name": name, "value": values[True], "unit": unit, "against": against,
            "ratio": values[False] / values[True], "n": n,
        }  # fmt: skip


def measure(shape: Architecture, lora: bool) -> Measurement:
    """Return seconds and peak memory of policy updates of a random model. lora: train adapters only."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attach_lora(build_model(replace(shape, layers=1), device, TOKENS), Lora(), seed=0)  # imports all libraries
    before = _status_gb("VmRSS")
    model = build_model(shape, device, TOKENS)
    rl = update_keys(ROLLOUTS * TOKENS, "auto").model_copy(update={"lora": Lora() if lora else None})
    if rl.lora is not None:
        attach_lora(model.to(torch.bfloat16 if device == "cuda" else torch.float32), rl.lora, seed=0)
    learner = Learner(model)
    learner.begin_stage(rl, reset=True, reference=None)
    selection = make_selection(ROLLOUTS, TOKENS, shape.vocabulary)
    seconds = []
    for _ in range(1 + UPDATES):
        start = time.perf_counter()
        learner.update(selection, rl, lr_scale=1.0, seed=0)  # waits for the GPU: it returns the gradient norm
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else _status_gb("VmHWM") - before
    return seconds[1:], peak


def _status_gb(field: str) -> float:
    """Return a field of /proc/self/status, which is in units of 1,024 bytes, in 10^9 bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e9
