"""The recipe's dispatch policy (`engine.scheduler`) under verl: one scheduler actor per stage that replaces verl's router.

`start_scheduler` starts the actor; verl passes it to its agent-loop workers in a `ScheduledClient`. Each worker asks the actor for
the server of a turn (`admit`) and reports the end of the turn (`finish`), through `engine.ScheduledEngine`.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import ray
from verl.workers.rollout.llm_server import LLMServerClient

from rstar_lab.errors import UserError
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import parse_metrics
from rstar_lab.rl.scheduling.scheduler import Scheduler, ServerReport, poll_metrics

NEEDS_KV_TOKENS = ("kv", "adaptive")
UNLIMITED_KV_TOKENS = 10**9
MAX_CONCURRENCY = 1_000_000  # each rollout that waits for admission occupies one call of the actor


class SchedulerActor:
    """A `Scheduler` as a Ray actor. Starts to read the servers' metrics at the first step.

    servers: name -> actor of verl's inference server. The name of a vLLM server is its HTTP address; our `EngineServer` reports
    its metrics through its actor. max_running: maximum number of concurrent requests of a server.
    """

    def __init__(
        self, servers: Mapping[str, Any], *, policy: str, max_tokens: int, max_response_tokens: int, max_running: int
    ):
        self.sources = {name: partial(read_report, name, server) for name, server in servers.items()}
        self.scheduler = Scheduler(policy, max_tokens=max_tokens, max_response_tokens=max_response_tokens)
        self.max_running = max_running
        self.started = asyncio.Lock()
        self.polling: asyncio.Task[None] | None = None

    async def begin_step(self, rollouts: int) -> None:
        """Start a step of `rollouts` rollouts. Raises UserError if the policy needs a metric that a server does not report."""
        async with self.started:
            if self.polling is None:
                reports = await asyncio.gather(*(source() for source in self.sources.values()))
                for name, report in zip(self.sources, reports, strict=True):
                    self._add_server(name, report)
                self.polling = asyncio.create_task(poll_metrics(self.scheduler, self.sources))
        self.scheduler.begin_step(rollouts)

    def _add_server(self, name: str, report: ServerReport) -> None:
        if not report.kv_tokens and self.scheduler.policy in NEEDS_KV_TOKENS:
            raise UserError(
                f"engine.scheduler: {self.scheduler.policy} needs the size of the KV cache, which server {name} does not "
                "report; set engine.scheduler: least-in-flight"
            )
        self.scheduler.add_server(name, report.kv_tokens or UNLIMITED_KV_TOKENS, self.max_running)

    async def admit(self, rollout: str, problem: str, tokens: int) -> str:
        """Wait until the next turn of a rollout may run; return the name of its server, or "" if the rollout was abandoned."""
        try:
            return await self.scheduler.admit(rollout, problem, tokens)
        except asyncio.CancelledError:
            return ""

    async def finish(self, rollout: str, tokens: int, done: bool) -> None:
        self.scheduler.finish(rollout, tokens, done=done)

    async def abandon(self, rollout: str) -> None:
        self.scheduler.abandon(rollout)

    async def server_failed(self, name: str) -> None:
        self.scheduler.server_failed(name)

    async def placements(self) -> dict[str, int]:
        """Return the turns in flight by server."""
        return self.scheduler.placements()

    async def stats(self) -> dict[str, float]:
        """Return the counts of `Scheduler.stats`; decisions count from the start of the stage."""
        return self.scheduler.stats()


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
