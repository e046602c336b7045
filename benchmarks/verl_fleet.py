"""The inference servers of a verl job without its trainer, for tests and `bench rollout --verl`."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray

from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.verl.engine import NAME, EngineServer, ScheduledEngine, start_scheduler

CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=NAME)))


@dataclass(frozen=True)
class Fleet:
    """Servers and their scheduler: the part of a `ScheduledClient` that `ScheduledEngine` uses. servers: name -> actor."""

    servers: Mapping[str, Any]
    scheduler: Any
    config: Any = field(default_factory=lambda: CONFIG)

    def slot(self, rollout: str, problem: str) -> ScheduledEngine:
        """Return the engine of a rollout; the scheduler chooses the server of each turn."""
        return ScheduledEngine(self, rollout, problem)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the scheduler; the servers stay."""
        ray.kill(self.scheduler)


class OneServer:
    """One server as an engine, without a scheduler."""

    def __init__(self, server: Any):
        self.server = server

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Generate exactly `sampling.max_tokens` tokens."""
        parameters: dict[str, Any] = {
            "max_tokens": sampling.max_tokens, "temperature": 1.0, "top_p": 1.0, "seed": sampling.seed, "stop_token_ids": [],
        }  # fmt: skip
        output = await self.server.generate.remote("probe", prompt_ids=prompt_ids, sampling_params=parameters)
        return Completion(list(output.token_ids), list(output.log_probs), FinishReason.LENGTH)


@contextmanager
def own_cluster(**variables: str) -> Iterator[None]:
    """Run a Ray cluster in this process's tree until the end of the block. variables: environment variables of its
    actors."""
    environment = {"env_vars": variables}
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, runtime_env=environment)
    try:
        yield
    finally:
        ray.shutdown()


def start_servers(factory: str, model: str, options: dict[str, Any], count: int) -> dict[str, Any]:
    """Start `count` servers and wait until they are ready; return name -> actor. factory, options: see
    `EngineServer`."""
    remote: Any = ray.remote(EngineServer)
    actor = remote.options(max_concurrency=1000, num_cpus=0)
    servers = {f"s{number}": actor.remote(factory, model, options | {"replica": number}) for number in range(count)}
    ray.get([server.start.remote() for server in servers.values()], timeout=600)
    return servers


def with_scheduler(
    servers: Mapping[str, Any], policy: str, *, max_tokens: int, max_response_tokens: int, max_running: int
) -> Fleet:
    """Return the servers with a new scheduler. The options are those of `SchedulerActor`."""
    options = {"max_tokens": max_tokens, "max_response_tokens": max_response_tokens, "max_running": max_running}
    return Fleet(servers, start_scheduler(servers, policy=policy, **options))
