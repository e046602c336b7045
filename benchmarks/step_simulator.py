"""Simulation of training steps: generation, tools, update and weight sync, in the modes sync, one_step_off and async.

The trainer's own `GroupStream` decides when groups start and which groups an update uses. It runs here on an event loop
whose clock jumps from event to event. An engine is a fluid model: all sequences of its batch advance at the rate 1 /
decode_s(batch). Rollouts of a step have lognormal lengths, cut at the limit, in turns of equal length with a tool call
after each but the last.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.virtual_time import run_in_virtual_time
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe.rl import Mode
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.training.group_stream import GroupStream

MOST_ROLLOUTS = 512  # maximum rollouts of a simulated step: larger steps are scaled down, together with the engines
STEPS, WARM_UP = 10, 3


@dataclass(frozen=True)
class Workload:
    """Rollouts of a step. sigma: standard deviation of the log length; half of the variance is between problems. calls:
    tool calls of a rollout; tool_s: mean seconds of a call (exponential)."""

    groups: int
    group_size: int
    mean_tokens: float
    max_tokens: int
    calls: float
    tool_s: float
    sigma: float = 0.8


@dataclass(frozen=True)
class Costs:
    """The durations and sizes of a machine that a step depends on.

    engines: replicas that generate. decode_s: seconds for one more token of every sequence, by the sequences in the batch of a
    replica. max_batch: sequences of a replica. update_s: seconds of an update, including the old log-probs. weights_s:
    seconds of a weight sync, during which generation pauses.
    """

    engines: int
    decode_s: Callable[[float], float]
    max_batch: int
    update_s: float
    weights_s: float


@dataclass(frozen=True)
class SimulatedRun:
    """Means over the steps after the warm-up. idle_generator, idle_trainer: shares of the time. generate_s: time in which the
    trainer waits for rollouts, per step."""

    step_s: float
    generate_s: float
    idle_generator: float
    idle_trainer: float
    staleness_mean: float
    staleness_max: int


def simulate(
    workload: Workload, costs: Costs, mode: Mode, *, max_staleness: int = 1, colocated: bool = False, seed: int = 0
) -> SimulatedRun:
    """Simulate steps of a mode. With `sync` the update follows the generation, on the same or on other GPUs.

    colocated: the engines share the GPUs of the trainer, so generation pauses during the update.
    """
    rollouts = workload.groups * workload.group_size
    scale = max(1.0, min(rollouts / MOST_ROLLOUTS, costs.engines))
    engines = max(1, round(costs.engines / scale))
    groups = max(1, round(workload.groups * engines / costs.engines))
    small = replace(workload, groups=groups)
    return run_in_virtual_time(
        _Simulation(small, replace(costs, engines=engines), mode, max_staleness, colocated, seed).run(STEPS)
    )


class _Replica:
    """An engine as a fluid model: `served` counts the tokens that each sequence of its batch has received since the
    start."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.loop = asyncio.get_running_loop()
        self.ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self.waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self.served = self.since = self.busy_s = 0.0
        self.count = 0
        self.paused = False
        self.timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return len(self.ends) + len(self.waiting)

    async def decode(self, tokens: float) -> None:
        """Generate a turn."""
        future: asyncio.Future[None] = self.loop.create_future()
        self.waiting.append((tokens, future))
        if len(self.ends) < self.costs.max_batch:  # a full batch keeps its rate and its next end
            self._advance()
            self._plan()
        await future

    def pause(self, paused: bool) -> None:
        self._advance()
        self.paused = paused
        self._plan()

    def _advance(self) -> None:
        now = self.loop.time()
        if self.ends and not self.paused:
            self.served += (now - self.since) / self.costs.decode_s(len(self.ends))
            self.busy_s += now - self.since
        self.since = now

    def _plan(self) -> None:
        while self.waiting and len(self.ends) < self.costs.max_batch:
            tokens, future = self.waiting.popleft()
            self.count += 1
            heapq.heappush(self.ends, (self.served + tokens, self.count, future))
        if self.timer:
            self.timer.cancel()
            self.timer = None
        if self.ends and not self.paused:
            left = max(0.0, self.ends[0][0] - self.served) * self.costs.decode_s(len(self.ends))
            self.timer = self.loop.call_later(left, self._end)

    def _end(self) -> None:
        self._advance()
        self.served = max(self.served, self.ends[0][0])  # rounding
        while self.ends and self.ends[0][0] <= self.served + 1e-6:
            heapq.heappop(self.ends)[2].set_result(None)
        self._plan()


class _Simulation:
    def __init__(self, workload: Workload, costs: Costs, mode: Mode, max_staleness: int, colocated: bool, seed: int):
        self.workload, self.costs, self.mode, self.max_staleness = workload, costs, mode, max_staleness
        self.colocated = colocated
        self.rng = np.random.default_rng(seed)
        self.groups = 0
        self.versions = [0]

    async def run(self, steps: int) -> SimulatedRun:
        loop = asyncio.get_running_loop()
        self.replicas = [_Replica(self.costs) for _ in range(self.costs.engines)]
        size = self.workload.groups
        stream = GroupStream(
            self.next_group,
            self.run_group,
            batch_groups=size,
            max_staleness=0 if self.mode == "sync" else self.max_staleness,
            when_stale="wait",
            buffer_groups=size * (self.max_staleness + 1),
            capacity=self.costs.engines * self.costs.max_batch,
            last_group=size * steps,
            whole_batches=self.mode == "one_step_off",
            version=0,
            staleness=lambda version: sum(newer > version for newer in self.versions),
        )
        stream.fill()
        waited = 0.0
        staleness: list[int] = []
        for step in range(1, steps + 1):
            if step == WARM_UP + 1:
                started, waited, staleness = loop.time(), 0.0, []
                busy = sum(replica.busy_s for replica in self.replicas)
            requested = loop.time()
            batch = await stream.take()
            waited += loop.time() - requested
            staleness += batch.staleness
            if self.mode == "one_step_off":
                await self.sync_weights()
                stream.loaded(self.versions[-1])
            self.pause(self.colocated)
            await asyncio.sleep(self.costs.update_s)
            self.versions.append(step)
            if self.mode != "one_step_off":
                await self.sync_weights()
                stream.loaded(step)
        elapsed = loop.time() - started
        busy = sum(replica.busy_s for replica in self.replicas) - busy
        await stream.aclose()
        return SimulatedRun(
            step_s=elapsed / (steps - WARM_UP),
            generate_s=waited / (steps - WARM_UP),
            idle_generator=1 - busy / (elapsed * len(self.replicas)),
            idle_trainer=waited / elapsed,
            staleness_mean=float(np.mean(staleness)),
            staleness_max=max(staleness),
        )

    async def sync_weights(self) -> None:
        self.pause(True)
        await asyncio.sleep(self.costs.weights_s)
        self.pause(False)

    def pause(self, paused: bool) -> None:
        for replica in self.replicas:
            replica.pause(paused)

    def next_group(self) -> list[RolloutTask]:
        self.groups += 1
        name = f"g{self.groups}"
        problem = Problem(problem_id=name, question="q", answer="a")
        return [RolloutTask(problem, name, name, i, seed=0) for i in range(self.workload.group_size)]

    async def run_group(self, tasks: list[RolloutTask]) -> list[Any]:
        work, sigma = self.workload, self.workload.sigma * math.sqrt(0.5)
        mean = math.log(work.mean_tokens) - sigma**2 + sigma * self.rng.standard_normal()
        lengths = np.exp(mean + sigma * self.rng.standard_normal(len(tasks))).clip(1, work.max_tokens)
        calls = self.rng.poisson(work.calls, len(tasks))
        await asyncio.gather(
            *(self.run_rollout(float(tokens), int(count)) for tokens, count in zip(lengths, calls, strict=True))
        )
        return []

    async def run_rollout(self, tokens: float, calls: int) -> None:
        replica = min(self.replicas, key=lambda replica: replica.load)
        for turn in range(calls + 1):
            await replica.decode(tokens / (calls + 1))
            if turn < calls:
                await asyncio.sleep(float(self.rng.exponential(self.workload.tool_s)))
