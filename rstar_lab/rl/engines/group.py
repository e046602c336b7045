"""The engines of a run, as its recipe says: how many, on what, with which options; started together, ended together."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import Sampling
from rstar_lab.rl.engines.hf import HfEngine
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.engines.server_metrics import ServerMetrics
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.rollout.driver import Dispatcher, EngineSlot
from rstar_lab.rl.rollout.lockstep import Lockstep
from rstar_lab.rl.scheduling.base import EngineState
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AnyEngine = VllmEngine | HfEngine | ServerEngine

# Two spinning OpenMP threads on a busy core cost a factor of thirty: one thread an engine, and it sleeps when idle.
# vLLM compiles a line of its sampler, with g++ and for seconds, to win nothing here.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


class EngineGroup:
    """Engines with the same weights."""

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        work_dir: Path,
        max_batch: int,
        holds: Path | None = None,
        parity_limit: float = 1e-3,
        scheduler: str = "adaptive",
        max_tokens: int = 32_768,
    ):
        """holds: the model folder whose weights the engines started with. parity_limit: see `assert_parity`.

        scheduler: a name of `scheduler.POLICIES`; max_tokens: of the longest prompt and response together.
        """
        self.engines, self.work_dir, self.max_batch, self.holds = engines, work_dir, max_batch, holds
        self.parity_limit, self.scheduler, self.max_tokens = parity_limit, scheduler, max_tokens
        self.predictors: dict[int, LengthPredictor] = {}  # by the longest response: what earlier steps said

    @property
    def context(self) -> int | None:
        """Tokens of prompt and response together, where servers say so themselves."""
        said = [engine.context for engine in self.engines if isinstance(engine, ServerEngine)]
        return min(said, default=None)

    async def load(self, model: "PreTrainedModel", version: int) -> None:
        """Push the weights of `model` to every engine; `version` names them."""
        path = self.work_dir / "weights.safetensors"
        tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # two names, two tensors
        save_file(tensors, path)
        self.holds = None
        await asyncio.gather(*(engine.load_weights(path, version) for engine in self.engines))
        for engine in self.engines:
            if isinstance(engine, ServerEngine):  # not of our making: look whether it did as it was told
                await assert_parity(engine, model, self.parity_limit)

    async def load_folder(self, folder: Path) -> None:
        """Have every engine serve the model in `folder`."""
        if self.holds != folder:
            await self.load(load_model(folder, torch.float32), 0)
            self.holds = folder

    def slots(
        self, tasks: Sequence[RolloutTask], mode: str, max_response_tokens: int | None = None
    ) -> Callable[[int, RolloutTask], EngineSlot]:
        """A function that gives each rollout its slot, for `run_rollouts`."""
        if mode == "lockstep":
            lockstep = Lockstep(self.engines, [task.group_id for task in tasks])
            return lambda index, task: lockstep.slot(index)
        states = [EngineState(engine.name, engine.kv_tokens, self.max_batch) for engine in self.engines]
        longest = max_response_tokens or self.max_tokens
        predictor = self.predictors.setdefault(longest, LengthPredictor(longest))
        predictor.new_step()
        policy = make_policy(self.scheduler, max_context=self.max_tokens, predictor=predictor)
        dispatcher = Dispatcher(self.engines, policy, states)
        for engine, state in zip(self.engines, states, strict=True):
            if isinstance(engine, ServerEngine):
                engine.on_back = partial(_revive, state, dispatcher)
                engine.on_metrics = partial(_tell, state)

        def slot(index: int, task: RolloutTask) -> EngineSlot:
            generated = task.partial.model_tokens if task.partial else 0
            return dispatcher.slot(index, task.problem.problem_id, generated)

        return slot


def _revive(state: EngineState, dispatcher: Dispatcher) -> None:
    state.alive = True
    dispatcher.schedule_dispatch()


def _tell(state: EngineState, metrics: ServerMetrics) -> None:
    state.waiting = metrics.waiting


async def assert_parity(engine: ServerEngine, model: "PreTrainedModel", limit: float) -> None:
    """Does the engine give the model's log-probs? Raises UserError where their mean difference is past `limit`."""
    prompt = list(range(min(16, model.config.vocab_size)))
    completion = await engine.generate(prompt, Sampling(16, seed=0))
    ids_BT = torch.tensor([prompt + completion.token_ids], device=model.device)
    flash = model.config._attn_implementation == "flash_attention_2"  # which does not take float32
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=flash):
        log_probs_TV = model(ids_BT).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own_T = log_probs_TV.gather(1, ids_BT[0, len(prompt) :, None])[:, 0].cpu()
    gap = float((own_T - torch.tensor(completion.log_probs)).abs().mean())
    if not gap <= limit:
        raise UserError(
            f"{engine.url} took the weights, but its log-probs differ from the trainer's by {gap:.3g} on the mean "
            f"(limit {limit:g}; engine.mismatch_limit changes it): another model, another dtype, or tied embeddings on a CPU"
        )


def engine_count(section: EngineSection) -> int:
    """One a GPU; on a CPU one a core, four at the most: each is a process of 1.7 GB."""
    if section.count:
        return section.count
    return torch.cuda.device_count() or min(4, len(os.sched_getaffinity(0)))


def is_tied(model_dir: Path) -> bool:
    return bool(json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings"))


def engine_options(section: EngineSection, model_dir: Path, max_tokens: int, seed: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. max_tokens: the longest prompt and response together."""
    options: dict[str, Any] = {
        "dtype": section.dtype,
        "max_model_len": max_tokens,
        "max_num_seqs": section.max_batch,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
    }
    if torch.cuda.is_available():
        return options | {"gpu_memory_utilization": section.memory_share}
    # On a CPU vLLM cannot take back a random draw of a request with a seed, which it does for a prompt that is only partly
    # computed in a step: prompts are computed whole.
    options |= {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_tokens, 8192),
        "block_size": 32,  # the rest of a block is computed anew at every turn; vLLM takes 128 here
        "kv_cache_memory_bytes": int((section.kv_cache_gb or 1.0) * 2**30),
    }
    if is_tied(model_dir):
        # vLLM on a CPU keeps the old head when tied weights are loaded anew: the head gets weights of its own, which only
        # `EngineGroup.load` brings.
        options |= {"hf_overrides": {"tie_word_embeddings": False}, "load_format": "dummy"}
    return options


def spawn_engines(section: EngineSection, work_dir: Path) -> list[AnyEngine]:
    """Start the processes before there is a model to serve: they import vLLM meanwhile."""
    work_dir.mkdir(parents=True, exist_ok=True)
    if section.kind == "transformers":
        return [HfEngine(max_batch=section.max_batch)]
    if section.kind == "server":
        return [
            ServerEngine(url, stall_s=section.stall_s, deadline_s=section.deadline_s, connections=section.max_batch)
            for url in section.urls
        ]
    gpu = torch.cuda.is_available()
    engines = [
        VllmEngine(
            name=f"vllm-{number}",
            env={"CUDA_VISIBLE_DEVICES": str(number)} if gpu else CPU_ENVIRONMENT,
            log=work_dir / f"vllm-{number}.log",
            stall_s=section.stall_s,
        )
        for number in range(engine_count(section))
    ]
    if gpu:
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
    """Engines that serve the model in `model_dir` until the block ends, whatever ends it. Raises UserError.

    spawned: what `spawn_engines` has started already.
    """
    engines = spawned or spawn_engines(section, work_dir)
    own = section.kind != "server"
    options = engine_options(section, model_dir, max_tokens, seed) if own else {}
    try:
        await asyncio.gather(*(engine.start(model_dir, options) for engine in engines))
        servers = [engine for engine in engines if isinstance(engine, ServerEngine)]
        for server in servers:
            server.group = servers
        as_asked = [await server.serves(model_dir) for server in servers]
        holds = model_dir if "load_format" not in options and all(as_asked) else None
        limit = section.resolved_mismatch_limit
        yield EngineGroup(engines, work_dir, section.max_batch, holds, limit, section.scheduler, max_tokens)
    finally:
        for engine in engines:
            await engine.aclose()
        (work_dir / "weights.safetensors").unlink(missing_ok=True)
