"""A model of one vLLM engine for the simulator: its rates, its batch and its KV cache."""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass


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


class SimulatedEngine:
    """State of one simulated engine. Requests are rollout indices; `steps` counts engine steps since the start."""

    def __init__(self, spec: EngineSpec, context: list[int], left: list[int]):
        rates = spec.rates
        self.step_s, self.weights_s, self.token_s = rates.step_s, rates.weights_s, rates.token_s
        self.context_s, self.request_s = rates.context_s, rates.request_s
        self.max_running, self.max_batched = spec.max_running, spec.max_batched_tokens
        self.capacity = spec.kv_tokens
        self.waste = spec.block_tokens / 2
        self.context, self.left = context, left  # by rollout: tokens in the context, and still to generate in this turn
        self.waiting: deque[int] = deque()
        self.running: dict[int, int] = {}  # rollout -> step at which its turn ends, in order of admission
        self.offset: dict[int, int] = {}  # rollout -> context tokens minus steps
        self.ends: list[tuple[int, int]] = []  # heap of (step, rollout); outdated entries differ from `running`
        self.cache: OrderedDict[int, int] = OrderedDict()  # rollout -> cached tokens, oldest first
        self.cached = 0
        self.tokens = 0  # context tokens of all running requests
        self.steps = 0
        self.since = 0.0  # start time of the planned steps
        self.planned = 0  # number of planned steps
        self.ends_at = math.inf
        self.version = 0  # version of the engine's plan; the simulator ignores events of earlier versions
        self.busy_s = 0.0
        self.preemptions = self.computed = self.hit = 0
        self.preempted: set[int] = set()  # waiting rollouts that were admitted before
        # Rollout -> time of the first admission of its turn; None: not recorded.
        self.began: dict[int, float] | None = None

    def elapsed(self, k: int) -> float:
        """Return the duration of the next k decode steps in seconds."""
        n = len(self.running)
        return k * (
            self.step_s + max(self.weights_s, self.token_s * n) + self.context_s * (self.tokens + 0.5 * n * (k - 1))
        )

    def arrive(self, rollout: int, now: float) -> bool:
        """Queue a request. Returns whether the time of the engine's next event changed."""
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
        # The first step that ends at `now` or later, from the inverse of `elapsed`: slope * k + curve * k^2 = passed.
        passed = now - self.since
        k = passed / slope if curve == 0 else 2 * passed / (slope + math.sqrt(slope * slope + 4 * curve * passed))
        k = max(math.ceil(k - 1e-9), 1)
        if k >= self.planned:
            return False
        self.planned = k
        self.ends_at = self.since + self.elapsed(k)
        return True

    def used(self) -> float:
        """Return the tokens of the KV cache that running requests occupy."""
        return self.tokens + self.waste * len(self.running)

    def wake(self, now: float) -> list[int]:
        """Finish the planned steps, admit or preempt requests, and plan the next steps. Returns rollouts whose turn ended."""
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
        prompt_tokens = admitted = readmitted = 0
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
                    readmitted += 1
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
            evicted = min(size, math.ceil(excess))
            excess -= evicted
            self.cached -= evicted
            if evicted == size:
                del self.cache[oldest]
            else:
                self.cache[oldest] = size - evicted
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
                + self.request_s * (admitted - readmitted)
            )
            return ended
        ends = self.ends
        while running.get(ends[0][1]) != ends[0][0]:
            heapq.heappop(ends)
        self.planned = max(min(ends[0][0] - self.steps, room), 1)
        self.ends_at = now + self.elapsed(self.planned)
        return ended

    def _room(self) -> int:
        """Return the number of decode steps for which the KV cache has space."""
        n = len(self.running)
        return int((self.capacity - self.used()) // n) if n else 0

    def _release(self, rollout: int) -> None:
        size = self.offset.pop(rollout) + self.steps
        self.context[rollout] = size
        self.tokens -= size
        self.cache[rollout] = size
        self.cached += size
