"""A discrete-event simulation of a step of rollouts on inference engines under a dispatch policy.

Engines follow vLLM V1: continuous batching in steps, first come first served. A request is admitted if its prompt fits into the
KV cache. If the cache overflows, the youngest request is preempted and recomputed later. Freed blocks stay in the prefix cache
until they are evicted, oldest first, last block first. The batch of an engine is constant between two events, so any number of
decode steps has a closed form and needs one event.

Not modelled: attention within a prefill, prompts shared by the rollouts of a problem, block boundaries (each request wastes half
a block), speculative decoding, network.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulated_engine import EngineSpec, SimulatedEngine
from rstar_lab.rl.scheduling.base import DispatchPolicy, EngineState, TurnRequest


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
    """Simulate one step of `rollouts` under `policy`. spans: record the time of each turn.

    Raises ValueError if a rollout does not fit into the smallest KV cache, and RuntimeError if the policy dispatches
    nothing although turns wait and no engine is busy.
    """
    largest = max(r.prompt + sum(t.generate + t.tool_tokens for t in r.turns) for r in rollouts)
    smallest = min(spec.kv_tokens - spec.block_tokens for spec in engines)
    if largest > smallest:
        raise ValueError(
            f"kv_tokens: a rollout of {largest} tokens does not fit into a KV cache of {smallest} tokens: increase kv_tokens"
        )
    count = len(rollouts)
    context = [r.prompt for r in rollouts]
    left = [0] * count
    turn_of = [0] * count
    generated = [0] * count
    home = [-1] * count
    requests: list[TurnRequest | None] = [None] * count
    sims = [SimulatedEngine(spec, context, left) for spec in engines]
    states = [EngineState(f"engine-{i}", spec.kv_tokens, spec.max_running) for i, spec in enumerate(engines)]
    result = SimulationResult()
    sent = [0.0] * count
    if spans:
        for sim in sims:
            sim.began = {}
    # (time, serial, engine, version of its plan), or (time, serial, -1, rollout whose tools have answered)
    events: list[tuple[float, int, int, int]] = []
    serial = 0

    def ready(index: int) -> None:
        script = rollouts[index]
        request = TurnRequest(index, script.problem, turn_of[index], context[index], generated[index])
        requests[index] = request
        policy.ready(request)

    def dispatch(now: float) -> None:
        nonlocal serial
        for request, engine in policy.dispatch(states):
            index = request.rollout
            sim = sims[engine]
            if home[index] != engine:
                result.moved += home[index] >= 0
                home[index] = engine
            left[index] = rollouts[index].turns[request.turn].generate
            sent[index] = now
            if sim.arrive(index, now):
                sim.version += 1
                serial += 1
                heapq.heappush(events, (sim.ends_at, serial, engine, sim.version))

    for index in range(count):
        ready(index)
    dispatch(0.0)
    open_rollouts = count
    now = 0.0
    while open_rollouts:
        if not events:
            raise RuntimeError(f"{type(policy).__name__} dispatched nothing although {open_rollouts} rollouts wait")
        now, _, engine, payload = heapq.heappop(events)
        if engine < 0:
            ready(payload)
            dispatch(now)
            continue
        sim = sims[engine]
        if payload != sim.version:
            continue
        ended = sim.wake(now)
        sim.version += 1
        if sim.ends_at < math.inf:
            serial += 1
            heapq.heappush(events, (sim.ends_at, serial, engine, sim.version))
        for index in ended:
            script = rollouts[index]
            turn = turn_of[index]
            step = script.turns[turn]
            generated[index] += step.generate
            if spans and sim.began is not None:
                result.spans.append(Span(index, turn, engine, sent[index], sim.began.pop(index), now))
            turn_of[index] = turn + 1
            done = turn + 1 == len(script.turns)
            request = requests[index]
            assert request is not None
            policy.finished(request, step.generate, done)
            if done:
                open_rollouts -= 1
            else:
                context[index] += step.tool_tokens
                serial += 1
                heapq.heappush(events, (now + step.tool_s, serial, -1, index))
        dispatch(now)
    result.makespan_s = now
    for sim in sims:
        result.busy_s.append(sim.busy_s)
        result.preemptions += sim.preemptions
        result.computed += sim.computed
        result.hit += sim.hit
    return result


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
