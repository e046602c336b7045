"""Compare simulated speed-ups of asynchronous modes with published ones: `python -m benchmarks.published_async`.

The phases of the published synchronous step (on all GPUs) calibrate the simulation: the engine's rate is scaled so that a
simulated synchronous generation takes the published time, and the update takes its published time multiplied by all GPUs /
trainer's GPUs. The asynchronous step is then predicted, not fitted.
"""

from dataclasses import dataclass, replace

from benchmarks.published import H20, make_profile, make_rl
from benchmarks.step_simulator import Costs, Workload, simulate
from rstar_lab.rl.preflight.context import KNOWN
from rstar_lab.rl.preflight.estimate import decode_seconds, replica_batch
from rstar_lab.rl.recipe.rl import Mode

MEAN_RESPONSE_SHARE = 0.1  # assumed: the sources give limits, not lengths


@dataclass(frozen=True)
class PublishedPair:
    """A synchronous step and an asynchronous one. old: seconds of the old log-probs; old_in_async: whether the
    asynchronous run computes them too.

    trainer, generator: number of GPUs for each in the asynchronous run. calls: tool calls of a rollout.
    """

    name: str
    source: str
    groups: int
    limit: int
    generation: float
    old: float
    update: float
    sync_step: float
    trainer: int
    generator: int
    mode: Mode
    async_step: float
    old_in_async: bool = False
    calls: float = 0.0

    @property
    def published(self) -> float:
        return self.sync_step / self.async_step

    def predict(self) -> float:
        """Return the predicted speed-up."""
        gpus = self.trainer + self.generator
        rl = make_rl(self.groups, 16, self.limit, 4)
        profile = make_profile("h20", gpus // 8, H20, tensor_parallel=1)
        model = KNOWN["Qwen2.5-7B"]
        shape, batch = decode_seconds(model, rl, profile), int(replica_batch(model, None, rl, profile))
        work = Workload(self.groups, 16, MEAN_RESPONSE_SHARE * self.limit, self.limit, self.calls, 0.5)
        measured = simulate(work, Costs(gpus, shape, batch, 0.0, 0.0), "sync")
        factor = self.generation / measured.generate_s
        update = (self.update + (self.old if self.old_in_async else 0.0)) * gpus / self.trainer
        costs = Costs(self.generator, lambda b: factor * shape(b), batch, update, 0.0)
        return self.sync_step / simulate(work, costs, self.mode, max_staleness=1).step_s


_ASYNC, _ONE = "verl, docs/advance/fully_async.md", "verl, docs/advance/one_step_off.md"
_RETOOL = PublishedPair(
    name="ReTool 7B, 16 + 16 H20", source=_ASYNC, groups=64, limit=16_384, generation=228.03, old=35.19, update=111.84,
    sync_step=375.47, trainer=16, generator=16, mode="async", async_step=221.36, calls=3.0,
)  # fmt: skip
_MATHS = replace(_RETOOL, groups=512, limit=28_672, calls=0.0)
_DAPO = replace(_MATHS, source=_ONE, trainer=12, generator=4, mode="one_step_off", old_in_async=True)
PUBLISHED = (
    _RETOOL,
    replace(
        _MATHS, name="Maths 7B, 16 + 16 H20", generation=357.41, old=107.71, update=269.80, sync_step=790.10, async_step=294.77
    ),
    replace(
        _MATHS, name="Maths 7B, 32 + 32 H20", generation=150.72, old=70.26, update=133.41, sync_step=365.28,
        trainer=32, generator=32, async_step=189.26,
    ),
    replace(
        _MATHS, name="Maths 7B, 64 + 64 H20", generation=177.85, old=53.92, update=113.81, sync_step=356.30,
        trainer=64, generator=64, async_step=150.63,
    ),
    replace(
        _DAPO, name="DAPO 7B, FSDP2, 12 + 4 H20", limit=20_480, generation=247, old=88, update=286, sync_step=749, async_step=520
    ),
    replace(
        _DAPO, name="DAPO 7B, Megatron, 12 + 4 H20", limit=8192, generation=162, old=119, update=344, sync_step=699, async_step=566
    ),
)  # fmt: skip


def table() -> str:
    """Return a Markdown table of predicted and published speed-ups."""
    lines = [
        "| system, trainer + generator | mode | source | predicted | published | error |",
        "|---|---|---|---|---|---|",
    ]
    for pair in PUBLISHED:
        predicted, published = pair.predict(), pair.published
        cells = (
            pair.name,
            pair.mode,
            pair.source,
            f"{predicted:.2f}x",
            f"{published:.2f}x",
            f"{predicted / published - 1:+.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
