"""A discrete-event model of inference engines under a scheduling policy: what a step of rollouts would cost.

Engines follow vLLM V1: continuous batching in steps, first come first served; a request is admitted when its whole prompt fits
into the KV cache; when the cache overflows the youngest request is preempted and computed again later; freed blocks stay as
prefix cache until others need them, oldest first, tail before head. Between two events an engine's batch does not change, so
any number of decode steps is one closed form and costs one event.

Left out: attention inside a prefill, prompts shared by the rollouts of a problem, blocks (half of one is charged as waste a
request), speculative decoding, network.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar_lab.rl.scheduling.policies import EngineState, Policy, TurnRequest


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of one engine step: step_s + max(weights_s, token_s * tokens in the batch) + context_s * tokens attended to.

    request_s: added once for each request (HTTP, tokens in and out).
    """

    step_s: float
    weights_s: float
    token_s: float
    context_s: float
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: its rates, KV cache in tokens, and vLLM's limits of a batch."""

    rates: Rates
    kv_tokens: int
    max_running: int = 1024
    max_batched_tokens: int = 8192
    block_tokens: int = 16


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """A turn as it will go: tokens generated, then (unless it is the last) seconds of tools and tokens of their answer."""

    generate: int
    tool_s: float = 0.0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class ScriptedRollout:
    """A rollout as it will go; no policy sees it."""

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
    """One turn on one engine: sent by the policy, started (first admitted), ended; seconds from the start of the step."""

    rollout: int
    turn: int
    engine: int
    sent: float
    started: float
    ended: float


@dataclass(slots=True)
class Result:
    """What a simulated step cost.

    makespan_s; busy_s by engine; preemptions; computed and hit: prompt tokens computed (recomputed ones too) and found in the
    prefix cache; moved: turns that ran elsewhere than the turn before.
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
        """Share of engine time in which an engine had nothing to run."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


class _Engine:
    """State of one simulated engine. Requests are rollout indices; `steps` counts engine steps since the start."""

    def __init__(self, spec: EngineSpec, context: list[int], left: list[int]):
        rates = spec.rates
        self.step_s, self.weights_s, self.token_s = rates.step_s, rates.weights_s, rates.token_s
        self.context_s, self.request_s = rates.context_s, rates.request_s
        self.max_running, self.max_batched = spec.max_running, spec.max_batched_tokens
        self.capacity = spec.kv_tokens
        self.waste = spec.block_tokens / 2
        self.context, self.left = (
            context,
            left,
        )  # by rollout: tokens before generating on, tokens still to generate this turn
        self.waiting: deque[int] = deque()
        self.running: dict[int, int] = {}  # rollout -> step at which its turn ends, in order of admission
        self.offset: dict[int, int] = {}  # rollout -> context tokens minus steps
        self.ends: list[tuple[int, int]] = []  # heap of (step, rollout); stale where `running` says otherwise
        self.cache: OrderedDict[int, int] = OrderedDict()  # rollout -> cached tokens, oldest first
        self.cached = 0
        self.tokens = 0  # context tokens of all running requests
        self.steps = 0
        self.since = 0.0  # when the steps under way began
        self.planned = 0  # how many they are
        self.ends_at = math.inf
        self.version = 0
        self.busy_s = 0.0
        self.preemptions = self.computed = self.hit = 0
        self.preempted: set[int] = set()  # rollouts among the waiting ones that have been admitted before
        self.began: dict[int, float] | None = None

    def elapsed(self, k: int) -> float:
        """Seconds of the next k decode steps."""
        n = len(self.running)
        return k * (
            self.step_s + max(self.weights_s, self.token_s * n) + self.context_s * (self.tokens + 0.5 * n * (k - 1))
        )

    def arrive(self, rollout: int, now: float) -> bool:
        """Queue a request; true if the engine's next event moved."""
        self.waiting.append(rollout)
        if not self.running:
            if self.ends_at <= now:
                return False
            self.ends_at = now
            return True
        if self.planned <= 1 or len(self.waiting) > 1 or self.used() + self.context[rollout] > self.capacity:
            return False
        n = len(self.running)
        curve = 0.5 * self.context_s * n
        slope = self.step_s + max(self.weights_s, self.token_s * n) + self.context_s * self.tokens - curve
        gone = now - self.since
        k = gone / slope if curve == 0 else 2 * gone / (slope + math.sqrt(slope * slope + 4 * curve * gone))
        k = max(math.ceil(k - 1e-9), 1)
        if k >= self.planned:
            return False
        self.planned = k
        self.ends_at = self.since + self.elapsed(k)
        return True

    def used(self) -> float:
        return self.tokens + self.waste * len(self.running)

    def wake(self, now: float) -> list[int]:
        """Finish the planned steps, admit and preempt, plan the next; the rollouts whose turn ended."""
        running, context = self.running, self.context
        ended: list[int] = []
        if running:
            self.busy_s += now - self.since
            self.steps += self.planned
            self.tokens += self.planned * len(running)
            ends, steps = self.ends, self.steps
            while ends and ends[0][0] <= steps:
                step, rollout = heapq.heappop(ends)
                if running.get(rollout) == step:
                    del running[rollout]
                    self._release(rollout)
                    ended.append(rollout)
        prompt_tokens = admitted = again = 0
        room = self._room()
        if running and room < 1:
            while len(running) > 1 and room < 1:
                rollout, step = running.popitem()
                self.left[rollout] = step - self.steps
                self._release(rollout)
                self.waiting.appendleft(rollout)
                self.preempted.add(rollout)
                self.preemptions += 1
                room = self._room()
        else:
            waiting = self.waiting
            while waiting and len(running) < self.max_running:
                rollout = waiting[0]
                size = context[rollout]
                if self.tokens + size + (self.waste + 1) * (len(running) + 1) > self.capacity and running:
                    break
                fresh = size - self.cache.get(rollout, 0)
                if admitted and prompt_tokens + fresh + len(running) > self.max_batched:
                    break
                waiting.popleft()
                hit = self.cache.pop(rollout, 0)
                self.cached -= hit
                self.hit += hit
                self.computed += fresh
                prompt_tokens += fresh
                admitted += 1
                if rollout in self.preempted:
                    self.preempted.remove(rollout)
                    again += 1
                self.tokens += size
                self.offset[rollout] = size - self.steps
                running[rollout] = step = self.steps + self.left[rollout]
                heapq.heappush(self.ends, (step, rollout))
                if self.began is not None:
                    self.began.setdefault(rollout, now)
            room = self._room()
        excess = self.used() + self.cached - self.capacity
        while excess > 0 and self.cache:
            oldest, size = next(iter(self.cache.items()))
            gone = min(size, math.ceil(excess))
            excess -= gone
            self.cached -= gone
            if gone == size:
                del self.cache[oldest]
            else:
                self.cache[oldest] = size - gone
        self.since = now
        if not running:
            self.ends_at = math.inf
            return ended
        if admitted:
            n = len(running)
            self.planned = 1
            tokens = n - admitted + max(prompt_tokens, admitted)
            self.ends_at = now + (
                self.step_s
                + max(self.weights_s, self.token_s * tokens)
                + self.context_s * self.tokens
                + self.request_s * (admitted - again)
            )
            return ended
        ends = self.ends
        while running.get(ends[0][1]) != ends[0][0]:
            heapq.heappop(ends)
        self.planned = max(min(ends[0][0] - self.steps, room), 1)
        self.ends_at = now + self.elapsed(self.planned)
        return ended

    def _room(self) -> int:
        """Decode steps the KV cache still holds."""
        n = len(self.running)
        return int((self.capacity - self.used()) // n) if n else 0

    def _release(self, rollout: int) -> None:
        size = self.offset.pop(rollout) + self.steps
        self.context[rollout] = size
        self.tokens -= size
        self.cache[rollout] = size
        self.cached += size


def simulate(
    rollouts: Sequence[ScriptedRollout], policy: Policy, engines: Sequence[EngineSpec], *, spans: bool = False
) -> Result:
    """Run one step of `rollouts` under `policy`. Raises ValueError where a rollout outgrows the smallest KV cache."""
    largest = max(r.prompt + sum(t.generate + t.answer for t in r.turns) for r in rollouts)
    smallest = min(spec.kv_tokens - spec.block_tokens for spec in engines)
    if largest > smallest:
        raise ValueError(f"kv_tokens: a rollout of {largest} tokens does not fit into {smallest}; give engines more")
    count = len(rollouts)
    context = [r.prompt for r in rollouts]
    left = [0] * count
    turn_of = [0] * count
    generated = [0] * count
    home = [-1] * count
    requests: list[TurnRequest | None] = [None] * count
    sims = [_Engine(spec, context, left) for spec in engines]
    states = [EngineState(f"engine-{i}", spec.kv_tokens, spec.max_running) for i, spec in enumerate(engines)]
    result = Result()
    sent = [0.0] * count
    if spans:
        for sim in sims:
            sim.began = {}
    events: list[tuple[float, int, int, int]] = []  # time, serial, engine or -1, version or rollout
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
            state = states[engine]
            state.waiting = len(sim.waiting)

    for index in range(count):
        ready(index)
    dispatch(0.0)
    open_rollouts = count
    now = 0.0
    while open_rollouts:
        if not events:
            raise RuntimeError(f"{type(policy).__name__} left {open_rollouts} rollouts waiting while nothing ran")
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
        state = states[engine]
        state.kv_used, state.running, state.waiting = sim.tokens, len(sim.running), len(sim.waiting)
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
                context[index] += step.answer
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
    """Seconds no policy can beat, all engines alike: the larger of

    - the longest rollout alone on an idle engine, its tools included;
    - all work over all engines at their best batch: every token computed once, every decode step shared by as many rollouts
      as the KV cache, `max_running` and the number of rollouts allow.
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
            context += k + turn.answer
            fresh = float(turn.answer + 1)
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
