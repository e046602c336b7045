"""The inference engines of a run: starts them with the recipe's options, sends them weights, and ends them."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import EngineError, EngineSlot, Sampling
from rstar_lab.rl.engines.devices import CPU_THREADS, environment_for, visible_gpus
from rstar_lab.rl.engines.hf import HfEngine
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.engines.weights import Transport, WeightsFile, choose_transport, tensors_to_send
from rstar_lab.rl.models.lora import Adapter, full_state, split_state
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.models.model_folder import has_tied_embeddings
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.scheduler import BusyClock, Scheduler
from rstar_lab.rl.scheduling.slots import Lockstep, PlannedRollout, ScheduledSlots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger(__name__)
AnyEngine = VllmEngine | HfEngine | ServerEngine

# Compiling vLLM's sampler takes seconds and does not make it faster on a CPU.
CPU_ENVIRONMENT = CPU_THREADS | {"TORCHDYNAMO_DISABLE": "1"}


class EngineGroup:
    """Engines that serve the same weights."""

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        work_dir: Path,
        max_batch: int,
        parity_limit: float = 1e-3,
        scheduler: str = "adaptive",
        max_tokens: int = 32_768,
        dtype: str = "float32",
    ):
        """work_dir: folder for the weights file. max_batch: maximum number of running requests of an engine. parity_limit:
        see `assert_parity`. scheduler: name of a dispatch policy. max_tokens: prompt plus response of the longest rollout.
        dtype: dtype of the engines; weights are sent in it.
        """
        self.engines, self.work_dir, self.max_batch = engines, work_dir, max_batch
        self.loaded_folder: Path | None = None  # the model folder whose weights all engines have now
        self.parity_limit, self.scheduler, self.max_tokens = parity_limit, scheduler, max_tokens
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.predictors: dict[int, LengthPredictor] = {}  # one predictor per longest response; kept from step to step
        self.clock = BusyClock()  # counts the rollouts that a scheduler dispatches
        # Log-probs are compared on completions of this prompt. On a prompt that the model never sees, bfloat16 differs more.
        self.probe: Sequence[int] | None = None
        self._file: WeightsFile | None = None
        self._ipc_failed = False

    @property
    def context(self) -> int:
        """Largest number of prompt plus response tokens that all engines accept."""
        contexts = [engine.context for engine in self.engines if isinstance(engine, ServerEngine)]
        return min(contexts, default=self.max_tokens)

    async def load(self, model: "PreTrainedModel", version: int) -> None:
        """Send the weights of `model` to every engine and check the engines' log-probs. version: policy version of
        these weights.

        An engine that is lost meanwhile is left out if another one works. A lost server gets the weights when it answers
        again. If all servers are lost, waits up to `ServerEngine.PATIENCE_S` for one of them. Raises EngineError if an engine
        that works does not load the weights, UserError if its log-probs differ from the model's or if no engine is left.
        """
        self.loaded_folder = None
        losses: dict[str, EngineError] = {}
        transport = self.transport(model)
        if transport == "cuda-ipc":
            (engine,) = self.engines
            assert isinstance(engine, VllmEngine)
            try:
                await engine.load_tensors(partial(self._shared_tensors, model), version)
            except EngineError as error:
                LOG.warning("%s: CUDA IPC failed (%s); weights are sent through a file from now on", engine.name, error)
                self._ipc_failed = True
                transport = self.transport(model)
        if transport != "cuda-ipc":
            self._file = self._file or WeightsFile(transport, self.work_dir)
            tensors = tensors_to_send(full_state(model), self.dtype)
            await asyncio.to_thread(self._file.write, *tensors)  # in a thread, so that rollouts in flight continue
            path = self._file.path
            updates = [_report_loss(engine, engine.load_weights(path, version), losses) for engine in self.engines]
            await asyncio.gather(*updates)
        checked = [engine for engine in self.engines if isinstance(engine, VllmEngine | ServerEngine)]
        working = [engine for engine in checked if not engine.lost] or checked  # requests to lost servers wait for one
        limit, probe = self.parity_limit, self.probe
        checks = [_report_loss(engine, assert_parity(engine, model, limit, probe), losses) for engine in working]
        await asyncio.gather(*checks)
        if all(is_lost(engine) for engine in self.engines):
            reasons = "".join(f"\n{losses.get(engine.name, f'{engine.name} is lost')}" for engine in self.engines)
            raise UserError(
                f"no engine is left for the weights of policy version {version}; see the engines' logs, restart lost "
                f"servers, then run the same command again:{reasons}"
            )

    def transport(self, model: "PreTrainedModel") -> Transport:
        """Return how the weights of `model` reach the engines."""
        device = next(model.parameters()).device
        gpus = visible_gpus() if device.type == "cuda" else []
        return choose_transport(
            sum(parameter.numel() for parameter in model.parameters()) * self.dtype.itemsize,
            servers=any(isinstance(engine, ServerEngine) for engine in self.engines),
            trainer_gpu=gpus[device.index or 0] if gpus and not self._ipc_failed else None,
            engine_gpus=tuple(engine.gpu if isinstance(engine, VllmEngine) else None for engine in self.engines),
        )

    def _shared_tensors(self, model: "PreTrainedModel") -> tuple[dict[str, Any], dict[str, str], dict[str, Adapter]]:
        """Return tensors of the model on its own device, their aliases, and adapters that the engine merges."""
        base, adapters = split_state(model)
        # The engine casts after it has merged. Otherwise the base would be rounded before.
        return *tensors_to_send(base, None if adapters else self.dtype), adapters

    async def load_folder(self, folder: Path) -> None:
        """Make every engine serve the model in `folder`."""
        if self.loaded_folder != folder:
            await self.load(load_model(folder, torch.float32), 0)
            self.loaded_folder = folder

    async def aclose(self) -> None:
        """End the engines and remove the weights file."""
        for engine in self.engines:
            await engine.aclose()
        if self._file:
            self._file.close()

    def slots(
        self, rollouts: Sequence[PlannedRollout], mode: str, max_response_tokens: int | None = None
    ) -> Callable[[int, PlannedRollout], EngineSlot]:
        """Return a function that gives each rollout its engine slot, for `run_rollouts`.

        rollouts: all rollouts of the step. mode: lockstep (recipe key `rl.schedule.lockstep`) or async. max_response_tokens: of the
        longest rollout; None: `max_tokens`.
        """
        if mode == "lockstep":
            working = [engine for engine in self.engines if not is_lost(engine)] or self.engines
            return Lockstep(working, [rollout.group_id for rollout in rollouts]).slot
        longest = max_response_tokens or self.max_tokens
        predictor = self.predictors.setdefault(longest, LengthPredictor(longest))
        predictor.new_step()
        # No patience: the engines of this process restart or recover by themselves before they report an error.
        scheduler = Scheduler(
            self.scheduler, max_tokens=self.max_tokens, predictor=predictor, patience_s=0, clock=self.clock
        )
        for engine in self.engines:
            scheduler.add_server(engine.name, engine.kv_tokens, self.max_batch)
            if isinstance(engine, ServerEngine):
                engine.on_recovered = partial(scheduler.server_restarted, engine.name)
                engine.on_metrics = partial(scheduler.report, engine.name)
        return ScheduledSlots(scheduler, {engine.name: engine for engine in self.engines}).slot


def is_lost(engine: AnyEngine) -> bool:
    """Return whether an engine process cannot be restarted any more, or a server is marked as lost."""
    return isinstance(engine, VllmEngine | ServerEngine) and engine.lost


async def _report_loss(engine: AnyEngine, update: Awaitable[None], losses: dict[str, EngineError]) -> None:
    """Await `update`. If it raises EngineError because the engine is lost, log the error and add it to `losses`, unless `losses`
    has an earlier error of this engine."""
    try:
        await update
    except EngineError as error:
        if not is_lost(engine):
            raise
        if engine.name not in losses:
            LOG.warning("an engine was lost during a weight update: %s", error)
            losses[engine.name] = error


async def assert_parity(
    engine: VllmEngine | ServerEngine, model: "PreTrainedModel", limit: float, probe: Sequence[int] | None = None
) -> None:
    """Compare the engine's log-probs of two completions of at most 8 tokens with the model's.

    probe: token ids of the prompt. Default: the first 16 of the vocabulary. Raises UserError if the mean absolute difference is
    above `limit`.
    """
    prompt = list(probe or range(min(16, model.config.vocab_size)))
    completions = await asyncio.gather(*(engine.generate(prompt, Sampling(8, seed=seed)) for seed in range(2)))
    flash = model.config._attn_implementation == "flash_attention_2"  # does not support float32
    gaps = []
    for completion in completions:
        ids_BT = torch.tensor([prompt + completion.token_ids], device=model.device)
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=flash):
            log_probs_TV = model(ids_BT).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        trained_T = log_probs_TV.gather(1, ids_BT[0, len(prompt) :, None])[:, 0].cpu()
        gaps.append((trained_T - torch.tensor(completion.log_probs)).abs())
    gap = float(torch.cat(gaps).mean())
    if not gap <= limit:
        raise UserError(
            f"{engine.name} loaded the new weights, but the mean difference of its log-probs to the trainer's is {gap:.3g} "
            f"(limit {limit:g}): check that it serves the same model and dtype, without tied embeddings on a CPU; "
            "if it does, set engine.dtype=float32, as small models differ by more in bfloat16, or engine.mismatch_limit"
        )


def engine_count(section: EngineSection) -> int:
    """Return the number of engines. Default: one per visible GPU; on a CPU one per core, at most four (1.7 GB each).

    Raises UserError if `engine.count` is larger than the number of visible GPUs.
    """
    gpus = engine_gpus()
    if section.count and gpus and section.count > len(gpus):
        raise UserError(f"engine.count: {section.count} engines, but only {len(gpus)} GPUs are visible")
    return section.count or len(gpus) or min(4, len(os.sched_getaffinity(0)))


def engine_gpus() -> list[str]:
    """Return the GPUs for engines, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""
    return visible_gpus() if torch.cuda.is_available() else []


def engine_options(section: EngineSection, model_dir: Path, max_tokens: int, seed: int) -> dict[str, Any]:
    """Return keyword arguments of `vllm.LLM`. max_tokens: prompt plus response of the longest rollout."""
    options: dict[str, Any] = {
        "dtype": section.dtype,
        "max_model_len": max_tokens,
        "max_num_seqs": section.max_num_seqs,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
    }
    if torch.cuda.is_available():
        return options | {"gpu_memory_utilization": section.gpu_memory_utilization}
    # A seeded request draws a random number in each step of a chunked prefill, and vLLM cannot undo the draw on a CPU. Without
    # chunked prefill the tokens depend on the seed only.
    options |= {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, 8192),
        "block_size": 32,  # the last partial block is recomputed each turn; the default on a CPU is 128
        "kv_cache_memory_bytes": int((section.kv_cache_gb or 1.0) * 2**30),
    }
    if has_tied_embeddings(model_dir):
        # On a CPU, vLLM keeps the old head when tied weights are reloaded. Load the head as a separate tensor, which
        # `EngineGroup.load` sends.
        options |= {"hf_overrides": {"tie_word_embeddings": False}, "load_format": "dummy"}
    return options


def spawn_engines(section: EngineSection, work_dir: Path) -> list[AnyEngine]:
    """Create the engines of a recipe and start their processes, which import vLLM while the caller prepares the model."""
    work_dir.mkdir(parents=True, exist_ok=True)
    if section.kind == "transformers":
        return [HfEngine(max_batch=section.max_num_seqs)]
    if section.kind == "server":
        return [
            ServerEngine(url, stall_s=section.stall_s, deadline_s=section.deadline_s, connections=section.max_num_seqs)
            for url in section.urls
        ]
    gpus = engine_gpus()
    engines = [
        VllmEngine(
            name=f"vllm-{number}",
            env=environment_for([gpus[number]]) if gpus else CPU_ENVIRONMENT,
            log=work_dir / f"vllm-{number}.log",
            stall_s=section.stall_s,
            gpu=gpus[number] if gpus else None,
        )
        for number in range(engine_count(section))
    ]
    if gpus:
        for engine in engines:
            engine.spawn()
    else:
        engines[0].spawn(engines[1:])
    return list(engines)


@asynccontextmanager
async def open_engines(
    section: EngineSection,
    model_dir: Path,
    work_dir: Path,
    max_tokens: int,
    seed: int = 0,
    spawned: Sequence[AnyEngine] | None = None,
) -> AsyncIterator[EngineGroup]:
    """Yield engines that serve the model in `model_dir`, and close them afterwards. Raises UserError if one cannot start.

    max_tokens: prompt plus response of the longest rollout. spawned: engines that `spawn_engines` returned; default:
    new engines.
    """
    engines = spawned or spawn_engines(section, work_dir)
    options = {} if section.kind == "server" else engine_options(section, model_dir, max_tokens, seed)
    limit = section.mismatch_limit_of()
    group = EngineGroup(engines, work_dir, section.max_num_seqs, limit, section.scheduler, max_tokens, section.dtype)
    try:
        await asyncio.gather(*(engine.start(model_dir, options) for engine in engines))
        servers = [engine for engine in engines if isinstance(engine, ServerEngine)]
        for server in servers:
            server.group = servers
        serving = [await server.serves(model_dir) for server in servers]
        if "load_format" not in options and all(serving):
            group.loaded_folder = model_dir
        yield group
    finally:
        await group.aclose()
