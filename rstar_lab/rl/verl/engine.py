"""verl's inference servers: adapters to and from `Engine`, and one scheduler actor per stage that replaces verl's router.

`start_scheduler` starts the actor; verl passes it to its agent-loop workers in a `ScheduledClient`. Each worker asks the actor for
the server of a turn (`admit`) and reports the end of the turn (`finish`), through `ScheduledEngine`."""

import asyncio
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.rl.engine import Completion, EngineError, FinishReason, Interruptible, Sampling
from rstar_lab.rl.engines.server import parse_metrics
from rstar_lab.rl.scheduling.scheduler import Scheduler, ServerReport, poll_metrics
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.verl.adapters import AdapterSync
from rstar_lab.rl.verl.watchdog import PENDING

NAME = "rstar"
ABORTED = ("aborted", "abort")  # verl's stop reasons of a request that a weight sync ended
SYNC_ATTEMPTS = 10  # attempts of a weight sync, two seconds apart, while Ray restarts a server that died
NEEDS_KV_TOKENS = ("kv", "adaptive")
UNLIMITED_KV_TOKENS = 10**9
# Calls that run in the actor: a rollout that waits until an engine has room for it is one.
MAX_CONCURRENCY = 1_000_000


class ScheduledEngine:
    """verl's inference servers as the engine slot of one rollout: token ids in, token ids and log-probs out.

    The scheduler chooses the server of each turn. If a server fails, the scheduler places the turn on another one.
    """

    def __init__(self, client: "ScheduledClient", traj_id: str, problem_id: str):
        self.client, self.traj_id, self.problem_id = client, traj_id, problem_id
        self.versions: list[int] = []
        self.new_tokens: int | None = None  # tokens of the last turn, until they are reported to the scheduler
        self.done = False
        self._reported: Any = None
        self._server = ""  # of the turn in flight

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion. Raises EngineError if the request is rejected or all servers fail.

        A request that a weight sync ends continues under the new weights; `Completion.versions` has the version of each part.
        """
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        token_ids, log_probs, parts = list[int](), list[float](), list[tuple[int, int]]()
        self._server = ""
        PENDING.begin(self.traj_id, "generation")
        try:
            while True:
                output = await self._send(prompt_ids + token_ids, parameters)
                version = output.extra_fields.get("global_steps") or 0
                if output.token_ids and output.log_probs is None:
                    raise EngineError("the server returned no log-probs: set rollout.calculate_log_probs")
                token_ids += output.token_ids
                log_probs += output.log_probs or []
                if output.token_ids:
                    parts.append((version, len(output.token_ids)))
                if output.stop_reason not in ABORTED or len(token_ids) >= sampling.max_tokens:
                    break
                # A weight sync interrupted the request. The new weights generate its other tokens.
                parameters["max_tokens"] = sampling.max_tokens - len(token_ids)
                if sampling.seed is not None and token_ids:
                    parameters["seed"] = derive_seed(sampling.seed, "continued", len(token_ids))
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            raise EngineError(str(error)) from error
        ended = bool(token_ids) and token_ids[-1] in sampling.stop_token_ids
        self.versions += [part[0] for part in parts] or [version]
        self.new_tokens = len(token_ids)
        return Completion(
            token_ids,
            log_probs,
            FinishReason.STOP if ended else FinishReason.LENGTH,
            engine=self.client.config.actor_rollout_ref.rollout.name,
            policy_version=version,
            versions=tuple(parts) if len({version for version, _ in parts}) > 1 else (),
        )

    async def _send(self, prompt_ids: list[int], parameters: dict[str, Any]) -> Any:
        """Send the request to the server that the scheduler chose for this turn; after its failure, to another one."""
        if self._reported is not None:
            await self._reported  # the end of the last turn must be reported first
        scheduler, failures = self.client.scheduler, 0
        while True:
            self._server = self._server or await scheduler.admit.remote(self.traj_id, self.problem_id, len(prompt_ids))
            try:
                return await self.client.servers[self._server].generate.remote(
                    request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=parameters
                )
            except ray.exceptions.RayError as error:
                failures += 1
                if not is_server_failure(error) or failures > len(self.client.servers):
                    raise
                await scheduler.server_failed.remote(self._server)
                self._server = ""

    def on_turn(self, text: str, last: bool) -> None:
        """Report the end of a turn to the scheduler, before its tools run."""
        PENDING.begin(self.traj_id, "reward" if last else "tools")
        if self.new_tokens is not None:
            self._reported = self.client.scheduler.finish.remote(self.traj_id, self.new_tokens, done=last)
            self.new_tokens, self.done = None, last

    def leave(self) -> None:
        """Report the end of the rollout to the scheduler, also after an error."""
        PENDING.end(self.traj_id)
        if not self.done:
            self.client.scheduler.abandon.remote(self.traj_id)


def is_server_failure(error: Exception) -> bool:
    """Return whether a request failed because its server did, rather than because the server rejected it."""
    cause = getattr(error, "cause", None)
    return (
        isinstance(error, ray.exceptions.RayActorError)
        or isinstance(cause, EngineError)
        or type(cause).__name__ == "EngineDeadError"  # of vLLM, which is not imported here
    )


class EngineServer:
    """A Ray actor that serves one engine to verl. `factory`: "module:function" (model folder, options) -> engine.

    Ray restarts the actor if its process dies. The restarted actor fails `report`, so that no turn is placed on it, until the
    next `load_weights` starts its engine.
    """

    def __init__(self, factory: str, model: str, options: dict[str, Any]):
        module, _, name = factory.partition(":")
        self.engine = getattr(importlib.import_module(module), name)(model, options)
        self.version = self.running = 0
        self.started = False
        self.admitting, self.drained = asyncio.Event(), asyncio.Event()
        self.admitting.set()
        self.drained.set()

    async def start(self) -> None:
        await self.engine.start()
        self.started = True

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        sampling = Sampling(
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            seed=sampling_params["seed"],
            stop_token_ids=tuple(sampling_params["stop_token_ids"]),
        )
        await self.admitting.wait()
        self.running += 1
        self.drained.clear()
        try:
            done = await self.engine.generate(list(prompt_ids), sampling)
        finally:
            self.running -= 1
            if not self.running:
                self.drained.set()
        return TokenOutput(
            token_ids=done.token_ids,
            log_probs=done.log_probs,
            stop_reason="aborted" if done.finish_reason is FinishReason.ABORTED else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    async def report(self) -> ServerReport:
        """Return the size of the KV cache. Raises EngineError before `start`."""
        if not self.started:
            raise EngineError("the server was restarted and has no weights yet")
        return ServerReport(preemptions=0, kv_tokens=self.engine.kv_tokens)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with the tokens generated so far; requests that arrive afterwards wait for `resume_generation`.

        An engine that cannot be interrupted finishes its requests first.
        """
        self.admitting.clear()
        if isinstance(self.engine, Interruptible) and self.running:
            self.engine.interrupt()
        await self.drained.wait()

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self.admitting.set()

    async def load_weights(self, path: str, version: int) -> None:
        if not self.started:
            await self.engine.start()
        await self.engine.load_weights(path, version)
        self.version, self.started = version, True


class Replica(RolloutReplica):
    """One engine in its own Ray actor, next to the training worker."""

    async def launch_servers(self) -> None:
        """Start the engine and wait until it is ready."""
        settings = dict(self.config.engine_kwargs[NAME])
        options = dict(settings.get("options") or {})
        server: Any = (
            ray.remote(EngineServer)
            .options(name=f"{NAME}_server_{self.replica_rank}", max_concurrency=self.max_concurrency, max_restarts=-1)
            .remote(settings["factory"], self.model_config.path, options | {"replica": self.replica_rank})
        )
        await server.start.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"{NAME}-{self.replica_rank}"

    async def idle(self, *_: Any, **__: Any) -> None:
        """Do nothing: sleep and wake-up release GPU memory, which a CPU does not have."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests. A server that Ray restarts has none, and gets none before its next weights."""
        with suppress(ray.exceptions.RayActorError):
            await super().abort_all_requests(reject_request)

    async def resume_generation(self) -> None:
        with suppress(ray.exceptions.RayActorError):
            await super().resume_generation()


class ServerAdapter(BaseRollout):
    """Sends new weights from the training worker to the server as a safetensors file."""

    def __init__(self, *args: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.folder = LockedFolder("weights")
        self.adapters = AdapterSync()

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **_: Any,
    ) -> None:
        from safetensors.torch import save_file

        path = self.folder.path / "weights.safetensors"
        sent = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in weights}
        tensors = self.adapters.receive(sent, peft_config, base_sync_done)
        if tensors is None:
            return
        await asyncio.to_thread(save_file, tensors, str(path))
        server = ray.get_actor(f"{NAME}_server_{self.rank}")
        for left in reversed(range(SYNC_ATTEMPTS)):
            try:
                return await server.load_weights.remote(str(path), global_steps or 0)
            except ray.exceptions.RayActorError:  # its process died, and Ray restarts it
                if not left:
                    raise
                await asyncio.sleep(2.0)


class CpuVllm:
    """The local trainer's vLLM process as the engine of a `Replica`.

    options: section (of the recipe), max_tokens, seed, logs (folder), replica (number of the server; its log is vllm-<replica>.log).
    """

    def __init__(self, model: str, options: dict[str, Any]):
        from rstar_lab.rl.engines.group import CPU_ENVIRONMENT, engine_options
        from rstar_lab.rl.engines.vllm import VllmEngine
        from rstar_lab.rl.recipe import EngineSection

        self.model = Path(model)
        section = EngineSection(**options["section"])
        self.options = engine_options(section, self.model, options["max_tokens"], options["seed"])
        log = Path(options["logs"]) / f"vllm-{options['replica']}.log"
        self.engine = VllmEngine(env=CPU_ENVIRONMENT, log=log, stall_s=section.stall_s)
        self.generate, self.load_weights = self.engine.generate, self.engine.load_weights
        self.interrupt = self.engine.interrupt

    async def start(self) -> None:
        await self.engine.start(self.model, self.options)
        self.kv_tokens = self.engine.kv_tokens


class SchedulerActor(Scheduler):
    """The scheduler as a Ray actor. Starts to read the servers' metrics at the first step.

    servers: name -> actor of verl's inference server. The name of a vLLM server is its HTTP address; our `EngineServer` reports
    its metrics through its actor. max_running: maximum number of concurrent requests of a server.
    """

    def __init__(
        self, servers: Mapping[str, Any], *, policy: str, max_tokens: int, max_response_tokens: int, max_running: int
    ):
        super().__init__(policy, max_tokens=max_tokens, max_response_tokens=max_response_tokens)
        self.sources = {name: partial(read_report, name, server) for name, server in servers.items()}
        self.max_running = max_running
        self.started = asyncio.Lock()
        self.polling: asyncio.Task[None] | None = None

    async def begin_step(self, rollouts: int) -> None:  # type: ignore[override]
        """Start a step of `rollouts` rollouts. Raises UserError if the policy needs a metric that a server does not report."""
        async with self.started:
            if self.polling is None:
                reports = await asyncio.gather(*(source() for source in self.sources.values()))
                for name, report in zip(self.sources, reports, strict=True):
                    if not report.kv_tokens and self.policy in NEEDS_KV_TOKENS:
                        raise UserError(
                            f"engine.scheduler: {self.policy} needs the size of the KV cache, which server {name} does not "
                            "report; set engine.scheduler: least-in-flight"
                        )
                    self.add_server(name, report.kv_tokens or UNLIMITED_KV_TOKENS, self.max_running)
                self.polling = asyncio.create_task(poll_metrics(self, self.sources))
        super().begin_step(rollouts)

    async def admit(self, rollout: str, problem: str, tokens: int) -> str:  # type: ignore[override]
        """Wait until the next turn of a rollout may run; return the name of its server, or "" if the rollout was abandoned."""
        try:
            return await super().admit(rollout, problem, tokens)
        except asyncio.CancelledError:
            return ""


async def read_report(name: str, server: Any) -> ServerReport:
    """Read the metrics of a server, over HTTP if it is verl's vLLM server. Raises EngineError if it has none."""
    if hasattr(server, "report"):  # engine.EngineServer
        return await server.report.remote()
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        metrics = parse_metrics((await http.get(f"http://{name}/metrics")).raise_for_status().text)
    if metrics is None:
        raise EngineError(f"http://{name}/metrics has no vLLM metrics: rollout.disable_log_stats must be false")
    return metrics


class ScheduledClient(LLMServerClient):
    """The servers of a job and their scheduler, as passed to the agent-loop workers. `engine.ScheduledEngine` sends the requests."""

    def __init__(self, config: Any, *, scheduler: Any, servers: Mapping[str, Any], **kwargs: Any):
        super().__init__(config, **kwargs)
        self.scheduler, self.servers = scheduler, dict(servers)


def start_scheduler(servers: Mapping[str, Any], **options: Any) -> Any:
    """Start the actor. options: keyword arguments of `SchedulerActor`."""
    actor: Any = ray.remote(SchedulerActor)
    return actor.options(num_cpus=0, max_concurrency=MAX_CONCURRENCY).remote(dict(servers), **options)
