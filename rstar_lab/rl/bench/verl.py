"""`rstar-lab bench verl`: what RoC before the update saves in the real verl, and whether it trains as the local trainer does."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar_lab.runs.reader import RunReader

STEPS = 2


def bench(against: str | None = None) -> Iterator[dict[str, Any]]:
    """One verl run on the CPU and one of the local trainer, both with a scripted engine and a real sandbox."""
    from rstar_lab.rl.verl.parity import compare, prepare, train_locally, train_with_verl

    with tempfile.TemporaryDirectory(prefix="bench-verl-") as name:
        folder = Path(name)
        recipe = prepare(folder, steps=STEPS)
        theirs = train_with_verl(recipe, folder / "verl")
        result = compare(train_locally(recipe, folder / "local"), theirs)
        steps = list(RunReader(theirs).metrics())
    without = sum(step["sequence_tokens_informative"] for step in steps)
    with_roc = sum(step["sequence_tokens_kept"] for step in steps)
    yield {
        "name": "update_compute_saved", "value": with_roc, "unit": "tokens through the update",
        "against": f"{without} tokens without RoC, all 2G of every group with a signal", "ratio": without / with_roc, "n": len(steps),
    }  # fmt: skip
    seconds = [step["roc_s"] for step in steps]
    yield {
        "name": "roc_time", "value": sum(seconds) / len(seconds), "unit": "s a step, added by RoC",
        "against": "the step", "ratio": sum(s["step_s"] for s in steps) / max(sum(seconds), 1e-9), "n": len(steps),
    }  # fmt: skip
    yield {
        "name": "parity", "value": 0 if result.differences else 1, "unit": "1 is yes",
        "against": "; ".join(result.differences[:3]) or "the local trainer", "ratio": 0.0 if result.differences else 1.0,
        "n": result.rollouts,
    }  # fmt: skip
