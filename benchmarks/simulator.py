"""A discrete-event simulation of a step of rollouts on inference engines under a dispatch policy.

Engines follow vLLM V1: continuous batching in steps, first come first served. A request is admitted if its prompt fits into the
KV cache. If the cache overflows, the youngest request is preempted and recomputed later. Freed blocks stay in the prefix cache
until they are evicted, oldest first, last block first. The batch of an engine is constant between two events, so any number of
decode steps has a closed form and needs one event.

Not modelled: attention within a prefill, prompts shared by the rollouts of a problem, block boundaries (each request wastes half
a block), speculative decoding, network.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulated_engine import EngineSpec, SimulatedEngine
from benchmarks.virtual_time import run_in_virtual_time
from rstar_lab.rl.scheduling.base import DispatchPolicy
from rstar_lab.rl.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """A turn whose tokens and tool time are known in advance.

    generate: tokens that the model generates. tool_s: seconds of tool calls. tool_tokens: tokens of the tool responses.
    The last turn has no tool calls.
    """

    generate: int
    tool_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScriptedRollout:
    """A rollout whose turns are known in advance, but not to the dispatch policy. prompt: number of tokens."""

    rollout: int
    problem: str
    prompt: int
    turns: tuple[ScriptedTurn, ...]

    @property
    def generated(self) -> int:
        """Tokens generated in all turns."""
        return sum(turn.generate for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Span:
    """One turn on one engine.

    sent: dispatched by the policy. started: first admitted by the engine. All times in seconds from the start of the step.
    """

    rollout: int
    turn: int
    engine: int
    sent: float
    started: float
    ended: float


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulated step.

    makespan_s: duration of the step. busy_s: busy time of each engine. computed: prompt tokens computed, including those
    computed again after a preemption. hit: prompt tokens found in the prefix cache. moved: turns that ran on another engine
    than the previous turn of their rollout.
    """

    makespan_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    computed: int = 0
    hit: int = 0
    moved: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def idle_share(self) -> float:
        """Share of engine time without a running request."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


def simulate(
    rollouts: Sequence[ScriptedRollout], policy: DispatchPolicy, engines: Sequence[EngineSpec], *, spans: bool = False
) -> SimulationResult:
    """Simulate one step of `rollouts` under `policy`, with the scheduler of real runs. spans: record the time of each turn.

    Raises ValueError if a rollout does not fit into the smallest KV cache, and RuntimeError if the policy dispatches
    nothing although turns wait and no engine is busy.
    """
    largest = max(r.prompt + sum(t.generate + t.tool_tokens for t in r.turns) for r in rollouts)
    smallest = min(spec.kv_tokens - spec.block_tokens for spec in engines)
    if largest > smallest:
        raise ValueError(
            f"kv_tokens: a rollout of {largest} tokens does not fit into a KV cache of {smallest} tokens: increase kv_tokens"
        )
    return run_in_virtual_time(_Step(rollouts, policy, engines, largest, spans).run())


class _Step:
    """A step on the event loop of `virtual_time`. The rollouts call the scheduler as those of a run do."""

    def __init__(
        self,
        rollouts: Sequence[ScriptedRollout],
        policy: DispatchPolicy,
        engines: Sequence[EngineSpec],
        largest: int,
        spans: bool,
    ) -> None:
        self.rollouts, self.spans = rollouts, spans
        self.scheduler = Scheduler(lambda: policy, max_tokens=largest)
        self.context = [rollout.prompt for rollout in rollouts]
        self.left = [0] * len(rollouts)
        self.ended: dict[int, asyncio.Future[None]] = {}  # by rollout: the turn in flight
        self.engines = {f"engine-{i}": SimulatedEngine(spec, self.context, self.left) for i, spec in enumerate(engines)}
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.result = SimulationResult()
        for (name, engine), spec in zip(self.engines.items(), engines, strict=True):
            engine.began = {} if spans else None
            self.scheduler.add_server(name, spec.kv_tokens, spec.max_running)

    async def run(self) -> SimulationResult:
        self.loop = asyncio.get_running_loop()
        self.scheduler.begin_step(len(self.rollouts))
        await asyncio.gather(*(self.run_rollout(index, script) for index, script in enumerate(self.rollouts)))
        result = self.result
        result.makespan_s = self.loop.time()
        for engine in self.engines.values():
            result.busy_s.append(engine.busy_s)
            result.preemptions += engine.preemptions
            result.computed += engine.computed
            result.hit += engine.hit
        return result

    async def run_rollout(self, index: int, script: ScriptedRollout) -> None:
        home = ""
        for turn, step in enumerate(script.turns):
            name = await self.scheduler.admit(str(index), script.problem, self.context[index])
            self.result.moved += bool(home) and name != home
            home, engine, sent = name, self.engines[name], self.loop.time()
            self.left[index] = step.generate
            self.ended[index] = self.loop.create_future()
            if engine.arrive(index, sent):
                self.plan(name)
            await self.ended[index]
            if engine.began is not None:
                self.result.spans.append(
                    Span(index, turn, list(self.engines).index(name), sent, engine.began.pop(index), self.loop.time())
                )
            last = turn + 1 == len(script.turns)
            self.scheduler.finish(str(index), step.generate, done=last)
            if not last:
                self.context[index] += step.tool_tokens
                await asyncio.sleep(step.tool_s)

    def plan(self, name: str) -> None:
        """Wake an engine at its next event."""
        if name in self.timers:
            self.timers.pop(name).cancel()
        if (at := self.engines[name].ends_at) < math.inf:
            self.timers[name] = self.loop.call_at(at, self.wake, name)

    def wake(self, name: str) -> None:
        engine = self.engines[name]
        ended = engine.wake(engine.ends_at)
        self.plan(name)
        for index in ended:
            self.ended[index].set_result(None)


def lower_bound(rollouts: Sequence[ScriptedRollout], engines: Sequence[EngineSpec]) -> float:
    """Return a lower bound of the makespan in seconds for any policy. All engines must have the same specification.

    The bound is the larger of two times: the longest rollout alone on an idle engine, including its tools; and the total work
    divided by the number of engines, if each token is computed once and each decode step has the largest batch that the KV
    cache, `max_running` and the number of rollouts allow.
    """
    spec = engines[0]
    rates = spec.rates
    longest = total_tokens = attended = occupied = prompt_tokens = 0.0
    admissions = 0
    for rollout in rollouts:
        alone = 0.0
        context = float(rollout.prompt)
        fresh = context
        for turn in rollout.turns:
            k = turn.generate
            prompt_tokens += fresh
            admissions += 1
            read = k * context + 0.5 * k * (k - 1)
            attended += read
            occupied += read + k * spec.block_tokens / 2
            total_tokens += k
            alone += (
                k * rates.step_s
                + (k - 1) * max(rates.weights_s, rates.token_s)
                + max(rates.weights_s, rates.token_s * fresh)
                + rates.context_s * read
                + rates.request_s
                + turn.tool_s
            )
            context += k + turn.tool_tokens
            fresh = float(turn.tool_tokens + 1)
        longest = max(longest, alone - rollout.turns[-1].tool_s)
    batch = min(spec.max_running, len(rollouts) / len(engines))
    steps = max(total_tokens / batch, occupied / spec.kv_tokens)
    work = (
        steps * rates.step_s
        + max(steps * rates.weights_s, rates.token_s * (total_tokens + prompt_tokens))
        + rates.context_s * attended
        + rates.request_s * admissions
    )
    return max(longest, work / len(engines))
