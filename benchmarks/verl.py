"""`rstar-lab bench verl`: the compute that RoC saves under verl, and the parity of verl and the local trainer."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.runs.reader import RunReader

STEPS, PROBLEMS, GROUP_SIZE = 2, 4, 4


def bench() -> Iterator[dict[str, Any]]:
    """Compare a verl run with a run of the local trainer, both with a scripted engine and a real sandbox."""
    from benchmarks.verl_parity import compare, prepare, train_locally, train_with_verl

    with tempfile.TemporaryDirectory(prefix="bench-verl-") as name:
        folder = Path(name)
        recipe = prepare(folder, steps=STEPS, problems_per_step=PROBLEMS, group_size=GROUP_SIZE)
        with LocalRay(cpus=12, gpus=1, dashboard=False):
            theirs = train_with_verl(recipe, folder / "verl", "--set", "verl.trainer.n_gpus_per_node=1")
        result = compare(train_locally(recipe, folder / "local"), theirs)
        steps = list(RunReader(theirs).metrics())
    without = sum(step["sequence_tokens_informative"] for step in steps)
    with_roc = sum(step["sequence_tokens_kept"] for step in steps)
    yield {
        "name": "update_compute_saved", "value": with_roc, "unit": "tokens through the update",
        "against": f"{without} tokens without RoC, all 2G of every group with a signal", "ratio": without / with_roc, "n": len(steps),
    }  # fmt: skip
    seconds = [step["select_s"] for step in steps]
    yield {
        "name": "roc_time", "value": sum(seconds) / len(seconds), "unit": "s per step, added by RoC",
        "against": "the step", "ratio": sum(s["step_s"] for s in steps) / max(sum(seconds), 1e-9), "n": len(steps),
    }  # fmt: skip
    yield {
        "name": "parity", "value": 0 if result.differences else 1, "unit": "1 is equal, 1 rank",
        "against": "; ".join(result.differences[:3]) or "the local trainer", "ratio": 0.0 if result.differences else 1.0,
        "n": result.rollouts,
    }  # fmt: skip
