"""Compare the step-time estimate with published steps of other systems: `python -m benchmarks.published`.

The settings come from the sources. For a value that a source does not give, the estimate uses the default of `Measured`; the mean response
length is 45% of the limit. `assumed` lists these assumptions.
"""

from dataclasses import dataclass

from rstar_lab.hardware.profiles import EngineSettings, Hardware, Measured, Parallelism, Profile
from rstar_lab.rl.preflight.context import KNOWN
from rstar_lab.rl.preflight.estimate import StepTime, step_time
from rstar_lab.rl.recipe import RlSection

H20 = {"gpu": "H20", "hbm_gb": 96, "hbm_tb_per_s": 4.0, "bf16_tflops": 148}
MI300X = {"gpu": "MI300X", "hbm_gb": 192, "hbm_tb_per_s": 5.3, "bf16_tflops": 1307}


@dataclass(frozen=True)
class PublishedStep:
    """A synchronous step with its published seconds. `other`: seconds of the step that belong to no phase of the estimate."""

    name: str
    source: str
    model: str
    profile: Profile
    rl: RlSection
    rollout: float
    train: float
    sync: float | None
    step: float
    assumed: str

    def predict(self) -> StepTime:
        """Estimate the same step."""
        return step_time(KNOWN[self.model], self.rl, self.profile)


def make_profile(name: str, nodes: int, gpu: dict[str, object], **engine: object) -> Profile:
    hardware = Hardware(nodes=nodes, gpus_per_node=8, cpus_per_node=96, memory_gb_per_node=1000, disk_gb=1, **gpu)  # type: ignore[arg-type]
    return Profile(
        name=name, description=name, backend="ray", trainer="verl", hardware=hardware,
        engine=EngineSettings(**engine),  # type: ignore[arg-type]
        parallelism=Parallelism(tokens_per_gpu=16_384), measured=Measured(),
    )  # fmt: skip


def make_rl(problems: int, group: int, limit: int, mini_batches: int = 1) -> RlSection:
    return RlSection(
        problems_per_step=problems,
        group_size=group,
        method={"roc": {"rule": "none", "oversample": 1}},
        limits={"max_response_tokens": limit},
        mini_batches=mini_batches,
        checkpoint_every=10_000_000,
    )


PUBLISHED = (
    PublishedStep(
        "Qwen3-30B-A3B on 8 MI300X", "miles, March 2026", "Qwen3-30B-A3B",
        make_profile("miles", 1, MI300X, tensor_parallel=1), make_rl(32, 8, 8192),
        rollout=152.8, train=95.3, sync=33.9, step=388.5, assumed="FSDP instead of Megatron; the phases leave out 107 s of the step",
    ),
    PublishedStep(
        "ReTool, Qwen2.5-7B on 32 H20", "verl, docs/advance/fully_async.md, colocate", "Qwen2.5-7B",
        make_profile("retool", 4, H20, tensor_parallel=1), make_rl(64, 16, 16_384, 4),
        rollout=228.0, train=147.0, sync=None, step=375.5, assumed="16 rollouts per problem and a limit of 16,384 tokens",
    ),
    PublishedStep(
        "Qwen3-30B-A3B on 128 H20", "verl, docs/advance/fully_async.md, colocate", "Qwen3-30B-A3B",
        make_profile("verl-30b", 16, H20, tensor_parallel=1), make_rl(512, 16, 8192, 4),
        rollout=348.1, train=115.0, sync=15.8, step=497.9, assumed="FSDP instead of Megatron; reference model (21 s) left out",
    ),
)  # fmt: skip


def table() -> str:
    """Return a Markdown table of predicted against published seconds."""
    lines = [
        "| step | source | rollout | training | weight sync | whole step | assumptions |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in PUBLISHED:
        step = case.predict()
        pairs = [
            (step.generation + step.tail, case.rollout), (step.old_log_probs + step.update, case.train),
            (step.weights, case.sync), (step.total, case.step),
        ]  # fmt: skip
        cells = [f"{ours:.0f} / {'?' if theirs is None else f'{theirs:.0f}'}" for ours, theirs in pairs]
        lines.append(f"| {case.name} | {case.source} | {' | '.join(cells)} | {case.assumed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
