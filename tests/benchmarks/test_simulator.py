"""Tests of the simulator against a formula, a step-by-step engine and the lower bound."""

from collections import deque

import numpy as np
import pytest

from benchmarks.barrier import Static
from benchmarks.simulated_engine import EngineSpec, Rates
from benchmarks.simulator import ScriptedRollout, ScriptedTurn, lower_bound, simulate
from benchmarks.workloads import Regime, make_policies, make_rollouts

RATES = Rates(step_s=0.01, weights_s=0.002, token_s=0.0005, context_s=1e-5, request_s=0.003)
SMALL = Regime(engines=3, rollouts=24, group=8, kv_tokens=6000, mean_tokens=300, max_tokens=1200, prompt_tokens=40)


def step_by_step(rollouts: list[ScriptedRollout], spec: EngineSpec) -> tuple[float, int]:
    """Simulate one engine step by step, like vLLM's scheduler. Returns the makespan and the number of preemptions."""
    rates, waste = spec.rates, spec.block_tokens / 2
    now, preemptions = 0.0, 0
    context = [r.prompt for r in rollouts]
    turn = [0] * len(rollouts)
    left = [r.turns[0].generate for r in rollouts]
    waiting, running = deque(range(len(rollouts))), []
    away: list[tuple[float, int]] = []
    cache: dict[int, int] = {}
    preempted: set[int] = set()

    def used() -> float:
        return sum(context[i] + waste for i in running)

    def trim() -> None:
        while cache and used() + sum(cache.values()) > spec.kv_tokens:
            oldest = next(iter(cache))
            cache[oldest] -= 1
            if cache[oldest] == 0:
                del cache[oldest]

    while waiting or running or away:
        if not waiting and not running:
            now = max(now, min(away)[0])
        for item in sorted(a for a in away if a[0] <= now + 1e-12):
            away.remove(item)
            waiting.append(item[1])
        fresh = admitted = requests = 0
        if running and used() + len(running) > spec.kv_tokens:
            while len(running) > 1 and used() + len(running) > spec.kv_tokens:
                victim = running.pop()
                cache[victim] = context[victim]
                waiting.appendleft(victim)
                preempted.add(victim)
                preemptions += 1
        else:
            while waiting and len(running) < spec.max_running:
                i = waiting[0]
                if running and used() + context[i] + waste + len(running) + 1 > spec.kv_tokens:
                    break
                computed = context[i] - cache.get(i, 0)
                if admitted and fresh + computed + len(running) > spec.max_batched_tokens:
                    break
                waiting.popleft()
                cache.pop(i, None)
                fresh += computed
                admitted += 1
                requests += i not in preempted
                preempted.discard(i)
                running.append(i)
        trim()
        tokens = len(running) - admitted + max(fresh, admitted)
        now += (
            rates.step_s
            + max(rates.weights_s, rates.token_s * tokens)
            + rates.context_s * sum(context[i] for i in running)
            + rates.request_s * requests
        )
        for i in list(running):
            context[i] += 1
            left[i] -= 1
            if left[i] == 0:
                running.remove(i)
                cache[i] = context[i]
                step = rollouts[i].turns[turn[i]]
                turn[i] += 1
                if turn[i] < len(rollouts[i].turns):
                    context[i] += step.tool_tokens
                    left[i] = rollouts[i].turns[turn[i]].generate
                    away.append((now + step.tool_s, i))
    return now, preemptions


def test_duration_of_a_single_rollout_equals_the_formula():
    turns = (ScriptedTurn(generate=3, tool_s=2.0, tool_tokens=5), ScriptedTurn(generate=2))
    (result,) = [simulate([ScriptedRollout(0, "p", 10, turns)], Static(), [EngineSpec(RATES, 1000)])]
    first = 0.003 + (0.01 + 0.005 + 10e-5) + 2 * 0.012 + (11 + 12) * 1e-5
    second = 0.003 + (0.01 + 0.0025 + 18e-5) + 0.012 + 19e-5  # 13 tokens cached, 5 of the answer computed
    assert result.makespan_s == pytest.approx(first + 2.0 + second)
    assert (result.computed, result.hit, result.preemptions) == (15, 13, 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_tokens", [2500, 20_000])
def test_batched_events_agree_with_single_steps(seed, kv_tokens):
    regime = SMALL.model_copy(update={"engines": 1, "rollouts": 40, "tool_s": (0.0, 0.4, 3.0)[seed % 3]})
    rollouts, _ = make_rollouts(regime, seed)
    spec = EngineSpec(RATES, kv_tokens, max_running=30, max_batched_tokens=300)
    seconds, preemptions = step_by_step(rollouts, spec)
    result = simulate(rollouts, Static(), [spec])
    assert result.makespan_s == pytest.approx(seconds, rel=0.03)
    assert result.preemptions == pytest.approx(preemptions, rel=0.3, abs=5)
    if kv_tokens == 2500:
        assert preemptions > 3  # the case must contain preemptions


@pytest.mark.parametrize("name", make_policies(SMALL))
@pytest.mark.parametrize("kv_tokens", [3000, 50_000])
def test_turns_run_once_in_order_and_no_policy_beats_the_bound(name, kv_tokens):
    regime = SMALL.model_copy(update={"kv_tokens": kv_tokens})
    rollouts, history = make_rollouts(regime, 1)
    engines = [EngineSpec(RATES, kv_tokens)] * regime.engines
    result = simulate(rollouts, make_policies(regime, history)[name](), engines, spans=True)
    spans: dict[int, list] = {}
    for span in result.spans:
        spans.setdefault(span.rollout, []).append(span)
    for script in rollouts:
        mine = spans[script.rollout]
        assert [span.turn for span in mine] == list(range(len(script.turns)))
        for before, after, turn in zip(mine, mine[1:], script.turns, strict=False):
            assert after.sent >= before.ended + turn.tool_s - 1e-9
        assert all(span.sent <= span.started <= span.ended for span in mine)
    assert result.makespan_s == max(span.ended for span in result.spans)
    assert result.makespan_s >= lower_bound(rollouts, engines)
    assert 0 <= result.idle_share < 1


def test_simulation_is_deterministic():
    rollouts, history = make_rollouts(SMALL, 2)
    engines = [EngineSpec(RATES, 6000)] * 3
    runs = [simulate(rollouts, make_policies(SMALL, history)["adaptive"](), engines, spans=True) for _ in range(2)]
    assert runs[0] == runs[1]


def test_generated_lengths_have_the_given_mean_and_spread():
    regime = Regime(engines=16, rollouts=256, mean_tokens=2000, max_tokens=10**9)
    rollouts, _ = make_rollouts(regime, 0)
    logs = np.log([r.generated for r in rollouts]).reshape(-1, regime.group)
    assert np.exp(logs).mean() == pytest.approx(2000, rel=0.1)
    assert logs.var() == pytest.approx(0.64, rel=0.15)
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(0.5, abs=0.1)


def test_a_rollout_larger_than_the_cache_is_an_error():
    with pytest.raises(ValueError, match="kv_tokens"):
        simulate([ScriptedRollout(0, "p", 100, (ScriptedTurn(2000),))], Static(), [EngineSpec(RATES, 1000)])
