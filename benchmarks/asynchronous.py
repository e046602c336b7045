"""`rstar-lab bench async`: trained tokens per second of the modes one_step_off and async compared with sync, on two cores.

All runs have the same tiny model, problems, limits, correction and number of steps. In sync, two engines generate and then two
training processes update, so each phase uses both cores. In the other modes one engine generates while one process updates. The
model is trained for half a minute to reason at very different lengths and to call a tool up to three times. The latency of the
tool is exponential with mean 0.3 s. The reward is a hash of the text, so that it differs within a group; the learning rate is
close to zero, so that all runs generate responses of the same lengths.
"""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rollout import look_up, make_model, question
from rstar_lab.common.progress import Reporter
from rstar_lab.rl import pipeline
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.tools.user import UserTool
from rstar_lab.runs.reader import RunReader

STEPS, WARM_UP, MAX_STALENESS = 14, 4, 2
TWO_PHASES, SIDE_BY_SIDE = {"engines": 2, "processes": 2}, {"engines": 1, "processes": 1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"type": "sync"},
    "one_step_off": {"type": "one_step_off"},
    "async": {"type": "async", "max_staleness": MAX_STALENESS},
}
MODES = {"sync": TWO_PHASES, "one_step_off": SIDE_BY_SIDE, "async": SIDE_BY_SIDE}


def reward(text: str, answer: str) -> float:
    """Return 0 or 1, by a hash of the text."""
    return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2)


@dataclass(frozen=True)
class Speed:
    """Measurements of a run after the warm-up. idle_generator, idle_trainer: share of the time without work."""

    tokens_s: float
    idle_generator: float
    idle_trainer: float
    staleness_max: int


def bench() -> Iterator[dict[str, Any]]:
    """Yield the speed of each mode compared with sync, and the idle shares and the largest staleness of the async run."""
    with tempfile.TemporaryDirectory(prefix="rstar-bench-") as name:
        folder = Path(name)
        model = make_model(folder, UserTool("bench:look_up", look_up, 60.0))
        problems = folder / "problems.jsonl"
        lines = [{"problem_id": f"p{i}", "question": question(i), "answer": "0"} for i in range(50)]
        problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
        speeds = {mode: asyncio.run(run(folder, model, problems, mode)) for mode in MODES}
    sync = speeds["sync"]
    for mode in ("async", "one_step_off"):
        tokens_s, peer = speeds[mode].tokens_s, f"sync, {sync.tokens_s:.0f} tokens/s"
        yield _line(f"{mode}_over_sync", tokens_s, "trained tokens/s", peer, tokens_s / sync.tokens_s)
    ours = speeds["async"]
    yield _line("idle_generator", ours.idle_generator, "share of time", f"sync, {sync.idle_generator:.3g}")
    yield _line("idle_trainer", ours.idle_trainer, "share of time", f"sync, {sync.idle_trainer:.3g}")
    yield _line("staleness_max", ours.staleness_max, "updates", f"the limit {MAX_STALENESS}")


def _line(name: str, value: float, unit: str, against: str, ratio: float | None = None) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "n": STEPS - WARM_UP}


async def run(folder: Path, model: Path, problems: Path, mode: str) -> Speed:
    """Train in a mode and measure it."""
    recipe = parse_recipe(
        {
            "name": mode,
            "model": str(model),
            "runs": str(folder / "runs"),
            "processes": MODES[mode]["processes"],
            "rl": {
                "schedule": SCHEDULES[mode],
                "correction": {"type": "tis"},
                "lr": 1e-9,
                "problems_per_step": 8,
                "group_size": 4,
                "method": {"roc": {"oversample": 2}},
                "limits": {"max_response_tokens": 600, "max_turns": 4},
                "micro_batch_tokens": 4096,
                "checkpoint_every": 1000,
                "tools": [f"{look_up.__module__}:look_up"],
                "reward": f"{__name__}:reward",
            },
            "stages": [{"name": "rl", "steps": STEPS, "problems": {"file": str(problems)}}],
            "engine": {"count": MODES[mode]["engines"], "dtype": "float32", "kv_cache_gb": 0.5},
        }
    )
    async with RunSession.open(resolve(recipe), Reporter(console=Console(quiet=True))) as session:
        await pipeline.train(session, model)
    lines = RunReader(folder / "runs" / f"{mode}-rl").metrics()[WARM_UP:]
    seconds = sum(line["step_s"] for line in lines)
    return Speed(
        tokens_s=sum(line["update_tokens"] for line in lines) / seconds,
        idle_generator=1 - sum(line["engine_busy_s"] for line in lines) / seconds,
        idle_trainer=sum(line["generate_s"] for line in lines) / seconds,
        staleness_max=max(line.get("staleness_max", 0) for line in lines),
    )
