"""Compare the scheduling simulator with real vLLM servers on this machine.

    python -m benchmarks.calibration --out calibration.json

starts two servers with a tiny random model and a KV cache so small that requests are preempted, measures probes on both at the same
time, fits `Rates`, runs the same scripted rollouts with every policy through the scheduler, and simulates them.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import httpx
import numpy as np
from scipy.optimize import nnls

from benchmarks.simulated_engine import EngineSpec, Rates
from benchmarks.simulator import ScriptedRollout, simulate
from benchmarks.workloads import Regime, make_policies, make_rollouts
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.engine import Completion, Engine, EngineError, FinishReason, Sampling
from rstar_lab.rl.scheduling.base import DispatchPolicy
from rstar_lab.rl.scheduling.scheduler import Scheduler
from rstar_lab.rl.scheduling.slots import ScheduledSlot, ScheduledSlots

VOCABULARY = 1024
BLOCK_TOKENS = 32
MAX_BATCHED_TOKENS = 2048

# Contexts and cache are large enough that a preemption costs several decode steps, as on a GPU. With seed 2 the predicted
# makespans of the policies differ: `adaptive` is first; with tool calls of one second `least-in-flight` is.
REGIME = Regime(
    engines=2,
    rollouts=64,
    group=16,
    kv_tokens=4096,
    mean_tokens=300,
    max_tokens=1000,
    prompt_tokens=32,
    max_turns=5,
    tool_s=0.3,
    answer_tokens=16,
)
SEED = 2


class Slot(Engine, Protocol):
    """The engine of one rollout: `ScheduledSlot`, or the slot of a verl job."""

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """Predicted and measured makespans of one policy in seconds, and the number of preemptions on all engines."""

    policy: str
    predicted_s: float
    measured_s: list[float]
    predicted_preemptions: int
    measured_preemptions: list[float]

    @property
    def measured(self) -> float:
        """Median of the measured makespans, in seconds."""
        return float(np.median(self.measured_s))


def recorded_measurements(path: str | Path = "") -> list[Measurement]:
    """Return the measurements of a calibration record. path: JSON file; default: the record in `data/`."""
    record = json.loads((Path(path) if path else benchmark_file("scheduler-calibration.json")).read_text())
    return [Measurement(**result) for result in record["results"]]


class VllmServer:
    """A vLLM server for scripted turns: every request generates exactly `max_tokens` tokens.

    The server is pinned to one core, so that it does not run faster while the other server is idle.
    """

    def __init__(self, model: Path, kv_tokens: int, max_model_tokens: int, log: Path, core: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_tokens)),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(kv_tokens // BLOCK_TOKENS)),
            *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--disable-uvicorn-access-log"),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)  # uvicorn closes idle connections after 5 s
        self.client = httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits)

    async def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Wait until the server answers. Raises EngineError if it ends or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if (await self.client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
        raise EngineError(f"the vLLM server did not start; its log ends:\n{self.log.read_text()[-2000:]}")

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Return a completion of exactly `sampling.max_tokens` tokens. Raises EngineError."""
        response = await self.client.post(
            "/v1/completions",
            json={
                "model": "tiny",
                "prompt": prompt_ids,
                "max_tokens": sampling.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        if response.status_code != 200:
            raise EngineError(f"{self.url} rejected a request: {response.text[:500]}")
        token_ids = response.json()["choices"][0]["token_ids"]
        return Completion(token_ids, [0.0] * len(token_ids), FinishReason.LENGTH)

    async def preemptions(self) -> float:
        """Return the number of preemptions since the server started."""
        text = (await self.client.get("/metrics")).text
        return float(re.findall(r"^vllm:num_preemptions_total\S* (\S+)", text, re.MULTILINE)[0])

    async def close(self) -> None:
        """End the server."""
        await self.client.aclose()
        self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, 20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()


def save_tiny_model(folder: Path) -> None:
    """Save a random float32 Qwen3, large enough that the batch size affects its speed, with a dummy tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)


@asynccontextmanager
async def servers(count: int, kv_tokens: int, max_model_tokens: int) -> AsyncIterator[list[VllmServer]]:
    """Start vLLM servers with a tiny model; end them after the block."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        await asyncio.to_thread(save_tiny_model, model)
        started: list[VllmServer] = []
        cores = sorted(os.sched_getaffinity(0))
        try:
            for i in range(count):
                log = Path(folder) / f"server{i}.log"
                started.append(VllmServer(model, kv_tokens, max_model_tokens, log, cores[i % len(cores)]))
            await asyncio.gather(*(server.wait_until_ready() for server in started))
            await asyncio.gather(*(_probe(server, 4, 16, 16, 0) for server in started))  # warm-up
            yield started
        finally:
            await asyncio.gather(*(server.close() for server in started))


def _tokens(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(1, VOCABULARY, count).tolist()


async def _probe(server: Engine, batch: int, prompt: int, generate: int, seed: int) -> float:
    """Return the seconds that a batch of equal requests takes."""
    rng = np.random.default_rng((id(server), seed))
    start = time.monotonic()
    await asyncio.gather(*(server.generate(_tokens(prompt, rng), Sampling(generate)) for _ in range(batch)))
    return time.monotonic() - start


async def fit_rates(engines: Sequence[Engine], kv_tokens: int, repeats: int = 2) -> Rates:
    """Return rates fitted to probes that run on all servers at the same time (non-negative least squares of the relative error)."""
    shapes = [(1, 32), (4, 32), (12, 32), (24, 32), (4, 600), (12, 200), (1, 1500)]
    rows, seconds = [], []
    for batch, prompt in shapes:
        generate = max(min(64, kv_tokens // batch - prompt - 1), 8)
        taken = []
        for repeat in range(repeats):
            by_engine = await asyncio.gather(*(_probe(engine, batch, prompt, generate, repeat) for engine in engines))
            taken.append(float(np.mean(by_engine)))
        attended = batch * (generate * prompt + generate * (generate - 1) / 2)
        rows.append([generate, batch * (prompt + generate - 1), attended, batch])
        seconds.append(min(taken))  # other load on the machine can only add time
    costs, measured = np.array(rows, float), np.array(seconds)
    step_s, token_s, context_s, request_s = nnls(costs / measured[:, None], np.ones(len(measured)))[0]
    return Rates(float(step_s), 0.0, float(token_s), float(context_s), float(request_s))


async def replay(
    rollouts: Sequence[ScriptedRollout], policy: DispatchPolicy, engines: Sequence[VllmServer], kv_tokens: int
) -> float:
    """Run scripted rollouts through the scheduler and return the makespan in seconds.

    Each call uses new random prompts, so that no prefix is cached.
    """
    scheduler = Scheduler(lambda: policy, max_tokens=kv_tokens, patience_s=0)
    for engine in engines:
        scheduler.add_server(engine.url, kv_tokens, max_running=1024)
    slots = ScheduledSlots(scheduler, {engine.url: engine for engine in engines})
    return await run_scripts(rollouts, lambda index, script: ScheduledSlot(slots, str(index), script.problem, 0))


async def run_scripts(rollouts: Sequence[ScriptedRollout], make_slot: Callable[[int, ScriptedRollout], Slot]) -> float:
    """Run scripted rollouts concurrently, each in its own slot, and return the makespan in seconds."""
    rng = np.random.default_rng()
    prompts = [_tokens(rollout.prompt, rng) for rollout in rollouts]

    async def run_rollout(index: int, script: ScriptedRollout) -> None:
        slot = make_slot(index, script)
        ids = prompts[index]
        for turn in script.turns:
            completion = await slot.generate(ids, Sampling(turn.generate))
            last = turn is script.turns[-1]
            slot.on_turn("", last)
            if not last:
                ids = ids + completion.token_ids + _tokens(turn.tool_tokens, rng)
                await asyncio.sleep(turn.tool_s)
        slot.leave()

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index, script in enumerate(rollouts):
            group.create_task(run_rollout(index, script))
    return time.monotonic() - start


async def calibrate(
    regime: Regime = REGIME,
    *,
    rounds: int = 3,
    seed: int = SEED,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Rates, list[Measurement]]:
    """Fit the rates, run every policy `rounds` times, and predict each makespan. Return rates and measurements.

    The policies alternate, so that other load on the machine affects all of them.
    """
    rollouts, history = make_rollouts(regime, seed)
    policies = make_policies(regime, history)
    async with servers(regime.engines, regime.kv_tokens, 2048) as engines:
        rates = await fit_rates(engines, regime.kv_tokens)
        progress(f"rates {rates}")
        measured: dict[str, list[float]] = {name: [] for name in policies}
        preempted: dict[str, list[float]] = {name: [] for name in policies}
        for _ in range(rounds):
            for name, policy in policies.items():
                before = sum([await engine.preemptions() for engine in engines])
                measured[name].append(await replay(rollouts, policy(), engines, regime.kv_tokens))
                preempted[name].append(sum([await engine.preemptions() for engine in engines]) - before)
                progress(f"{name}: {measured[name][-1]:.1f} s, {preempted[name][-1]:.0f} preemptions")
    spec = EngineSpec(
        rates, regime.kv_tokens, max_running=128, max_batched_tokens=MAX_BATCHED_TOKENS, block_tokens=BLOCK_TOKENS
    )
    results = []
    for name, policy in policies.items():
        predicted = simulate(rollouts, policy(), [spec] * regime.engines)
        results.append(Measurement(name, predicted.makespan_s, measured[name], predicted.preemptions, preempted[name]))
    return rates, results


def disagreements(results: Sequence[Measurement], margin: float = 0.05) -> list[tuple[str, str]]:
    """Return the pairs (first, second) of policies where the simulator predicts that first is faster, but second was measured faster.

    margin: relative difference of the predictions below which a pair counts as equal. Repeated runs of one policy differ by
    more than the default.
    """
    return [
        (a.policy, b.policy)
        for a in results
        for b in results
        if a.predicted_s * (1 + margin) < b.predicted_s and a.measured > b.measured
    ]


def main() -> None:
    """Run the calibration and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("calibration.json"))
    parser.add_argument("--rounds", type=int, default=3, help="runs of every policy")
    parser.add_argument("--tool-s", type=float, default=REGIME.tool_s, help="mean time of a tool call, in seconds")
    options = parser.parse_args()
    regime = REGIME.model_copy(update={"tool_s": options.tool_s})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup, which ends the servers
    rates, results = asyncio.run(calibrate(regime, rounds=options.rounds, progress=print))
    record = {
        "regime": regime.model_dump(),
        "seed": SEED,
        "rates": asdict(rates),
        "results": [asdict(result) for result in results],
        "disagreements": disagreements(results),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for result in results:
        print(f"{result.policy:16} predicted {result.predicted_s:6.1f} s   measured {result.measured:6.1f} s")


if __name__ == "__main__":
    main()
