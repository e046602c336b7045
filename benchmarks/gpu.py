"""`rstar-lab bench gpu` and `make check-gpu`: check one GPU in about 10 minutes, with or without vLLM.

Parts:

- `parity`: log-probs and gradients of a small model, fp32 on the CPU against the trainer's bf16 on the GPU;
- `update`: MFU and peak memory of the policy update at the shapes of 0.5B, 1.7B and 4B models with 8K-token rollouts, random
  weights; the memory is compared with the estimate of preflight;
- `sft`: tokens per second of supervised fine-tuning at 0.5B;
- `sync`: seconds of a weight sync at 0.5B (into a vLLM engine; without vLLM, through the weights file alone);
- `demo`: the tiny demo on the GPU.

A part that fails or cannot run gives a line with the value None and the reason under `against`; the other parts still run.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.engines.weights import WeightsFile, choose_transport, read_weights, tensors_to_send
from rstar_lab.rl.models.model import save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.preflight.context import Architecture
from rstar_lab.rl.preflight.estimate import memory
from rstar_lab.rl.recipe import EngineSection, RlSection, SftConfig
from rstar_lab.rl.training.sft import sft
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import StopReason, Trajectory

SHAPES = {
    "0.5B": Architecture(24, 896, 14, 2, 64, 4864, 151_936, True),
    "1.7B": Architecture(28, 2048, 16, 8, 128, 6144, 151_936, True),
    "4B": Architecture(36, 2560, 32, 8, 128, 9728, 151_936, True),
}
# Dense bf16 peak in flop/s, from the data sheets; keys are parts of the device's name.
PEAK_FLOPS = {
    "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12,
    "MI300X": 1307e12, "MI325X": 1307e12,
}  # fmt: skip
MFU_BOUNDS = {
    "0.5B": 36,
    "1.7B": 50,
    "4B": 57,
}  # % on an H100 if every kernel runs at its peak rate (docs/benchmarks.md)
PARTS = ("parity", "update", "sft", "sync", "demo")
TOKENS, ROLLOUTS, UPDATES = 8192, 4, 3
Line = dict[str, Any]


def bench(
    *,
    device: str = "cuda",
    shapes: dict[str, Architecture] = SHAPES,
    tokens: int = TOKENS,
    parts: Sequence[str] = PARTS,
) -> Iterator[Line]:
    """Yield one line per measurement. device: `cpu` only for tests. Raises UserError if there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench gpu: no GPU: torch finds no CUDA or ROCm device; run this command on the machine with the GPU"
        )
    smallest = next(iter(shapes.values()))
    tasks: dict[str, list[Callable[[], Iterator[Line]]]] = {
        "parity": [partial(check_parity, replace(smallest, layers=min(4, smallest.layers)), device, min(tokens, 256))],
        "update": [partial(measure_update, name, shape, device, tokens) for name, shape in shapes.items()],
        "sft": [partial(measure_sft, smallest, device, tokens)],
        "sync": [partial(measure_sync, smallest, device)],
        "demo": [partial(run_demo, device)],
    }
    for part in parts:
        for task in tasks[part]:
            try:
                yield from task()
            except Exception as error:  # a failed part must not stop the others
                text = str(error).strip().splitlines() or [type(error).__name__]
                yield line(part, None, "", f"failed: {text[0][:200]}")
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def line(
    name: str, value: float | None, unit: str, against: str | None = None, ratio: float | None = None, n: int = 1
) -> Line:
    """Return one line of the table. The keys are those of all benches."""
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "n": n}


def build_model(shape: Architecture, device: str, positions: int) -> Any:
    """Return a Qwen3 of this shape with random fp32 weights on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config)


def make_selection(count: int, tokens: int, vocabulary: int) -> Selection:
    """Return `count` random rollouts of `tokens` tokens each, with advantages 1 and -1."""
    generator = torch.Generator().manual_seed(0)
    prompt = max(tokens // 16, 1)
    rollouts = []
    for number in range(count):
        ids = torch.randint(0, vocabulary, (tokens,), generator=generator).tolist()
        response = ids[prompt:]
        trajectory = Trajectory(
            traj_id=f"t{number}",
            problem_id=f"p{number // 2}",
            group_id=f"g{number // 2}",
            sample=number % 2,
            question="",
            truth="",
            prompt_ids=ids[:prompt],
            response_ids=response,
            loss_mask=[True] * len(response),
            log_probs=[0.0] * len(response),
            turns=(),
            calls=(),
            stop_reason=StopReason.LENGTH,
            text="",
            answer=None,
            reward=float(number % 2),
            p_err=0.0,
            p_format=0.0,
            engine="",
            policy_version=0,
        )
        rollouts.append(trajectory)
    return Selection.of(rollouts, [1.0 if number % 2 else -1.0 for number in range(count)])


def update_keys(tokens: int, precision: str) -> RlSection:
    return RlSection(
        micro_batch_tokens=tokens,
        limits={"max_response_tokens": tokens},
        precision=precision,
        gradient_checkpointing=True,
        old_log_probs="trainer",
        mini_batches=1,
        lr=1e-6,
    )


def check_parity(shape: Architecture, device: str, tokens: int) -> Iterator[Line]:
    """Compare log-probs and gradients of the same weights and rollouts: fp32 on the CPU against bf16 on the device."""
    selection = make_selection(2, tokens, shape.vocabulary)
    log_probs, gradients = [], []
    weights = build_model(shape, "cpu", 2 * tokens).state_dict()
    for place, precision in (("cpu", "fp32"), (device, "bf16")):
        model = build_model(shape, place, 2 * tokens)
        model.load_state_dict(weights)
        learner = Learner(model)
        rl = update_keys(2 * tokens, precision)
        learner.begin_stage(rl, reset=True, reference=None)
        (micro,) = learner.micro_batches(selection.trajectories, rl)
        own, _ = learner.forward(model, micro, rl)
        own.sum().backward()
        log_probs.append(own.detach().float().cpu()[micro.mask_BT.cpu()])
        gradients.append([p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None])
    gap = float((log_probs[0] - log_probs[1]).abs().mean())
    yield line(
        "parity_log_probs", gap, "mean |difference|", "fp32 on the CPU (expected below 0.05)", n=len(log_probs[0])
    )
    cosine, norms = cosine_and_norms(*gradients)
    count = sum(map(len, gradients[0]))
    yield line("parity_gradients", cosine, "cosine", "fp32 on the CPU (expected above 0.99)", norms, count)


def cosine_and_norms(expected: list[torch.Tensor], found: list[torch.Tensor]) -> tuple[float, float]:
    """Return the cosine of two lists of vectors, and the ratio of their norms. In fp32, 10^8 summands would lose several digits."""

    def product(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
        return sum(float(a.double() @ b.double()) for a, b in zip(left, right, strict=True))

    square, found_square = product(expected, expected), product(found, found)
    return product(expected, found) / (square * found_square) ** 0.5, (found_square / square) ** 0.5


def peak_flops(device: str) -> tuple[float, str]:
    """Return the peak bf16 rate of the device in flop/s, and its source: the data sheet, or a measurement."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for part, peak in PEAK_FLOPS.items():
            if part in name:
                return peak, f"data sheet of {name}"
    size = 8192 if device == "cuda" else 512
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = min(_seconds(lambda: matrix @ matrix, device) for _ in range(5))
    return 2 * size**3 / best, f"measured with a {size} x {size} product"


def _seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_update(name: str, shape: Architecture, device: str, tokens: int) -> Iterator[Line]:
    """Measure MFU and peak memory of the update. MFU counts forward and backward (3 forward passes), not recomputation."""
    rl = update_keys(tokens, "bf16")
    recipe = parse_recipe(
        {"name": "bench", "model": "tiny", "rl": {"limits": {"max_response_tokens": tokens}}, "stages": []}
    )
    estimate = memory(shape, recipe, rl, load_profile("one_gpu")).training_peak
    if device == "cuda" and (total := torch.cuda.get_device_properties(0).total_memory / 1e9) < estimate:
        yield line(
            f"update_mfu_{name}", None, "", f"skipped: needs about {estimate:.0f} GB, the GPU has {total:.0f} GB"
        )
        return
    learner = Learner(build_model(shape, device, 2 * tokens))
    learner.begin_stage(rl, reset=True, reference=None)
    selection = make_selection(ROLLOUTS, tokens, shape.vocabulary)
    update = partial(learner.update, selection, rl, lr_scale=1.0, seed=0)
    update()  # allocates the moments, compiles kernels
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(_seconds(update, device) for _ in range(UPDATES))[UPDATES // 2]
    flops = 3 * shape.forward_flops(ROLLOUTS * tokens, tokens)
    peak, source = peak_flops(device)
    bound = f"; bound on an H100 {MFU_BOUNDS[name]}%" if name in MFU_BOUNDS else ""
    yield line(f"update_mfu_{name}", 100 * flops / seconds / peak, "% MFU", source + bound, n=UPDATES)
    yield line(f"update_tokens_{name}", ROLLOUTS * tokens / seconds, "tokens/s", n=UPDATES)
    if device == "cuda":
        used = torch.cuda.max_memory_allocated() / 1e9
        yield line(f"update_memory_{name}", used, "GB", f"estimate {estimate:.1f} GB", used / estimate)
    else:
        yield line(f"update_memory_{name}", None, "GB", f"no GPU; estimate {estimate:.3f} GB")


def measure_sft(shape: Architecture, device: str, tokens: int) -> Iterator[Line]:
    """Measure tokens per second of SFT, without the first step."""
    text = "so the next number is 7 and the sum is 12 "
    tokenizer = train_tokenizer([text], 300)
    pieces = [[(text * (tokens // (2 * len(tokenizer.encode(text))) or 1), True)]] * 16
    per_step = 4 * len(tokenizer.encode(pieces[0][0][0]))
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = SftConfig(
            epochs=1, batch_size=4, max_tokens=2 * tokens, micro_batch_tokens=tokens, gradient_checkpointing=True
        )
        sft(
            build_model(replace(shape, tied=False), device, 2 * tokens), tokenizer, pieces,
            config=config, out_dir=Path(folder), on_step=lambda _: times.append(time.perf_counter()),
        )  # fmt: skip
    yield line("sft_tokens", per_step * (len(times) - 1) / (times[-1] - times[0]), "tokens/s", n=len(times) - 1)


def measure_sync(shape: Architecture, device: str) -> Iterator[Line]:
    """Measure a weight sync into a vLLM engine; without vLLM, measure writing and reading the weights file."""
    model = build_model(shape, device, 1024)
    if device == "cuda" and importlib.util.find_spec("vllm"):
        yield from asyncio.run(_sync_into_vllm(model))
        return
    size = 2 * shape.parameters

    def send() -> None:
        file.write(*tensors_to_send(model.state_dict(), torch.bfloat16))
        for tensor in read_weights(file.path).values():
            tensor.sum()

    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        transport = choose_transport(size, servers=False)
        file = WeightsFile(transport, Path(folder))
        try:
            seconds = min(_seconds(send, device) for _ in range(3))
        finally:
            file.close()
    yield line("weight_sync", seconds, "s", f"write and read by {transport}; no engine: vLLM is not used here", n=3)


async def _sync_into_vllm(model: Any) -> list[Line]:
    text = "so the next number is 7"
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        await asyncio.to_thread(save_model, folder / "model", model, train_tokenizer([text], 300))
        section = EngineSection(count=1, gpu_memory_utilization=0.3, mismatch_limit=1.0)
        async with open_engines(section, folder / "model", folder / "work", 1024) as group:
            await group.load(model, 1)
            start = time.perf_counter()
            for version in range(2, 5):
                await group.load(model, version)
            seconds = (time.perf_counter() - start) / 3
            return [line("weight_sync", seconds, "s", f"{group.transport(model)}, log-prob check included", n=3)]


def run_demo(device: str) -> Iterator[Line]:
    """Measure the short demo in a separate process. Without vLLM it generates with transformers."""
    if device != "cuda":
        yield line("demo", None, "s", "skipped: no GPU")
        return
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        command = [
            sys.executable,
            "-m",
            "rstar_lab.cli",
            "demo",
            "--fast",
            "--runs-dir",
            f"{folder}/runs",
            "--out",
            f"{folder}/out",
        ]
        if not importlib.util.find_spec("vllm"):
            command += ["--set", "engine.kind=transformers"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        seconds = time.perf_counter() - start
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        yield line("demo", None, "s", f"failed: {lines[-1][:200]}")
    else:
        yield line("demo", seconds, "s", torch.cuda.get_device_name())


def main() -> int:
    """Print the lines as JSON or as a table; return 1 if there is no GPU or a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated; default: {','.join(PARTS)}")
    options = parser.parse_args()
    failed = False
    try:
        for result in bench(parts=[part for part in options.parts.split(",") if part in PARTS]):
            failed |= str(result["against"]).startswith("failed")
            value = "-" if result["value"] is None else f"{result['value']:.4g}"
            text = f"{result['name']:24} {value:>10} {result['unit']:20} {result['against'] or ''}"
            print(json.dumps(result) if options.json else text, flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
