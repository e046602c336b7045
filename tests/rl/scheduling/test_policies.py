"""Tests of the dispatch policies, the length predictor and `bench scheduler` on a small grid."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.barrier import TurnBarrier
from benchmarks.scheduler import bench, read_grid
from benchmarks.workloads import Regime, make_policies
from rstar_lab.common.errors import UserError
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.scheduling.adaptive import Adaptive
from rstar_lab.rl.scheduling.base import DispatchPolicy, EngineState, TurnRequest
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import POLICIES as BUILT_IN
from rstar_lab.rl.scheduling.policies import KvCapacity, LeastInFlight
from rstar_lab.rl.scheduling.slots import ScheduledSlot

POLICIES = make_policies(Regime(max_tokens=4000))


def engines(count: int, kv_tokens: int = 50_000) -> list[EngineState]:
    return [EngineState(f"e{i}", kv_tokens) for i in range(count)]


def first_turns(count: int, group: int = 4, tokens: int = 100) -> list[TurnRequest]:
    return [TurnRequest(i, f"p{i // group}", 0, tokens, 0) for i in range(count)]


def submit(policy: DispatchPolicy, requests: list[TurnRequest], states: list[EngineState]) -> dict[int, int]:
    for request in requests:
        policy.ready(request)
    return {request.rollout: engine for request, engine in policy.dispatch(states)}


@pytest.mark.parametrize("name", POLICIES)
def test_each_turn_is_sent_once_to_a_live_engine_also_when_one_fails(name):
    rng = random.Random(0)
    policy, states = POLICIES[name](), engines(3, 12_000)
    turns_left = {i: rng.randint(1, 4) for i in range(40)}
    out: dict[int, tuple[TurnRequest, int]] = {}
    away: list[TurnRequest] = first_turns(40)
    sent: Counter[tuple[int, int]] = Counter()
    wanted: Counter[tuple[int, int]] = Counter()
    for request in away:
        policy.ready(request)
        wanted[request.rollout, 0] += 1
    away = []
    steps = 0
    while turns_left:
        steps += 1
        for request, engine in policy.dispatch(states):
            assert states[engine].alive
            assert request.rollout not in out
            sent[request.rollout, request.turn] += 1
            out[request.rollout] = request, engine
        if steps == 25:
            states[1].alive = False
            for rollout, (request, engine) in list(out.items()):
                if engine == 1:
                    del out[rollout]
                    policy.ready(request)
                    wanted[request.rollout, request.turn] += 1
            continue
        assert out or away, "the policy dispatches nothing although rollouts wait"
        if out and (not away or rng.random() < 0.6):
            request, _ = out.pop(rng.choice(sorted(out)))
            turns_left[request.rollout] -= 1
            done = turns_left[request.rollout] == 0
            policy.finished(request, 200, done)
            if done:
                del turns_left[request.rollout]
            else:
                tokens, generated = request.tokens + 250, request.generated + 200
                away.append(TurnRequest(request.rollout, request.problem, request.turn + 1, tokens, generated))
        else:
            request = away.pop(rng.randrange(len(away)))
            policy.ready(request)
            wanted[request.rollout, request.turn] += 1
    assert steps > 25
    assert sent == wanted


def test_turn_barrier_waits_only_for_rollouts_of_the_same_engine():
    policy, states = TurnBarrier(), engines(2)
    requests = first_turns(4)
    assert submit(policy, requests, states) == {0: 0, 1: 0, 2: 1, 3: 1}
    policy.finished(requests[0], 10, done=False)
    assert submit(policy, [TurnRequest(0, "p0", 1, 110, 10)], states) == {}
    policy.finished(requests[2], 10, done=False)
    policy.finished(requests[3], 10, done=True)
    assert submit(policy, [TurnRequest(2, "p0", 1, 110, 10)], states) == {2: 1}
    policy.finished(requests[1], 10, done=False)
    assert submit(policy, [TurnRequest(1, "p0", 1, 110, 10)], states) == {0: 0, 1: 0}


def test_least_in_flight_spreads_a_problem_and_counts_turns():
    policy, states = LeastInFlight(), engines(2)
    requests = first_turns(4)
    assert submit(policy, requests, states) == {0: 0, 1: 1, 2: 0, 3: 1}
    policy.finished(requests[1], 10, done=False)  # waits for its tool: not in flight
    assert submit(policy, [TurnRequest(9, "p9", 0, 100, 0)], states) == {9: 1}
    assert submit(policy, [TurnRequest(1, "p0", 1, 110, 10)], states) == {1: 1}


def test_kv_admits_rollouts_that_fit_at_the_maximum_length():
    policy, states = KvCapacity(max_tokens=4000), engines(2, 10_000)
    requests = first_turns(6)
    home = submit(policy, requests, states)
    assert home == {0: 0, 1: 1, 2: 0, 3: 1}
    policy.finished(requests[0], 10, done=False)
    assert policy.dispatch(states) == []  # a rollout that waits for its tool keeps its place
    policy.finished(requests[3], 10, done=True)
    assert policy.dispatch(states) == [(requests[4], 1)]


def adaptive(history=(), **constants) -> Adaptive:
    predictor = LengthPredictor(4000, mean_tokens=500)
    for problem, length in history:
        predictor.observe(problem, length)
    return type("Policy", (Adaptive,), constants)(predictor)


def test_kv_admits_rollouts_to_an_engine_that_restarted():
    policy, states = KvCapacity(50_000), engines(2)  # each cache holds one rollout
    states[1].alive = False
    assert submit(policy, first_turns(3), states) == {0: 0}
    states[1].alive = True
    assert policy.dispatch(states) == [(first_turns(3)[1], 1)]
    assert policy.dispatch(states) == []


def test_least_in_flight_counts_each_turn_once():
    policy, states = LeastInFlight(), engines(2)
    requests = first_turns(6)
    assert submit(policy, requests[:2], states) == {0: 0, 1: 1}
    states[0].alive = False  # during the turn of rollout 0, which is sent to the other engine
    assert submit(policy, requests[:1], states) == {0: 1}
    states[0].alive = True
    policy.finished(requests[1], 10, done=False)
    policy.finished(requests[1], 0, done=True)  # abandoned between two turns
    assert submit(policy, requests[2:], states) == {2: 0, 3: 0, 4: 1, 5: 0}


def test_adaptive_admits_by_expected_length():
    states = engines(1, 12_000)
    sent = submit(adaptive(), first_turns(200), states)
    assert 12_000 / 4100 < len(sent) < 12_000 / 100
    assert len(submit(adaptive(), first_turns(200), engines(1, 24_000))) > 1.5 * len(sent)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_adaptive_runs_as_many_rollouts_as_an_engine_may(limit):
    policy, requests = adaptive(), first_turns(40)
    states = [EngineState(f"e{i}", 10**9, max_running=limit) for i in range(2)]
    running = submit(policy, requests, states)
    assert Counter(running.values()) == {0: limit, 1: limit}
    for rollout in running:
        policy.finished(requests[rollout], 100, done=True)
        assert [engine for _, engine in policy.dispatch(states)] == [running[rollout]]


def test_adaptive_sends_the_longest_first_after_the_probes():
    history = [(f"p{i}", 200.0 * (i + 1)) for i in range(10)] * 30
    policy = adaptive(history, PROBES=0)
    sent = [r.problem for r in first_turns(40) if r.rollout in submit(policy, first_turns(40), engines(1, 9000))]
    assert sent
    assert set(sent) <= {"p9", "p8", "p7"}
    probing = adaptive(history, PROBES=1)
    assert len({f"p{i // 4}" for i in submit(probing, first_turns(40), engines(1, 9000))}) >= 4


def test_adaptive_learns_lengths_from_the_first_rollouts_of_a_problem():
    policy, states = adaptive(PROBES=1), engines(1, 100)  # the engine has room for one rollout
    length = {"p0": 50, "p1": 3500, "p2": 400}
    for request in first_turns(12):
        policy.ready(request)
    order = []
    while sent := policy.dispatch(states):
        ((request, _),) = sent
        order.append(request.problem)
        policy.finished(request, length[request.problem], done=True)
    assert sorted(order[:3]) == ["p0", "p1", "p2"]
    assert order[3:] == ["p1"] * 3 + ["p2"] * 3 + ["p0"] * 3


def test_adaptive_moves_a_turn_only_to_an_engine_with_far_less_work():
    policy, states = adaptive(MARGIN=0.5), engines(2, 10**9)
    requests = first_turns(40)
    home = submit(policy, requests, states)
    assert Counter(home.values()) == {0: 20, 1: 20}
    policy.finished(requests[0], 100, done=False)
    assert submit(policy, [TurnRequest(0, "p0", 1, 250, 100)], states) == {0: home[0]}
    for request in requests[1:]:
        if home[request.rollout] == 1 - home[0]:
            policy.finished(request, 400, done=True)
    policy.finished(TurnRequest(0, "p0", 1, 250, 100), 100, done=False)
    assert submit(policy, [TurnRequest(0, "p0", 2, 400, 200)], states) == {0: 1 - home[0]}


def test_an_abandoned_rollout_frees_its_place_and_is_not_observed():
    policy, states = adaptive(), engines(1, 6000)
    requests = first_turns(60)
    home = submit(policy, requests, states)
    before = policy.predictor.remaining("p0")
    policy.finished(requests[0], 0, done=True)
    assert policy.predictor.remaining("p0") == before
    assert len(home) < 60
    assert policy.dispatch(states)


def test_adaptive_fills_less_if_the_longest_rollout_sets_the_makespan():
    plenty = submit(adaptive(), first_turns(10_000), engines(1, 100_000))
    little = submit(adaptive(), first_turns(600), engines(1, 100_000))
    full = submit(adaptive(FILL=(0.9, 0.9)), first_turns(600), engines(1, 100_000))
    assert len(little) < len(full) == len(plenty)


def test_a_restarted_engine_is_used_again():
    policy, states = adaptive(), engines(2, 6000)
    states[1].alive = False
    home = submit(policy, first_turns(400), states)
    assert set(home.values()) == {0}
    states[1].alive = True
    assert {engine for _, engine in policy.dispatch(states)} == {1}


def test_predictor_keeps_lengths_of_earlier_steps_with_limited_weight():
    predictor = LengthPredictor(12_288, mean_tokens=1000)
    for step in range(40):
        for i in range(32):
            predictor.progress(f"{step}", 1500, i)
            predictor.observe("again", 3000, i)
            predictor.observe(f"{step}", 3000, i)
        predictor.new_step()
    known, new = predictor.remaining("again"), predictor.remaining("new")
    assert known == pytest.approx(3500, rel=0.25) and new == pytest.approx(3500, rel=0.35)
    for step in range(40, 56):
        for i in range(32):
            predictor.observe(f"{step}", 300, i)
        predictor.new_step()
    assert predictor.remaining("new") < new / 4, "recent lengths have more weight than old ones"
    assert predictor.remaining("again") > known / 2


@pytest.mark.parametrize("name", BUILT_IN)
def test_engine_groups_use_the_policy_of_the_recipe(name, tmp_path):
    section = EngineSection(scheduler=name)  # type: ignore[arg-type]
    group = EngineGroup([], tmp_path, 64, scheduler=section.scheduler, max_tokens=4000)
    slot = group.slots([], "async", 3000)(
        0, RolloutTask(Problem(problem_id="p", question="q", answer="1"), "t", "g", 0, 0)
    )
    assert isinstance(slot, ScheduledSlot)
    assert type(slot.slots.scheduler._policy) is type(POLICIES[name]())
    assert EngineSection().scheduler == "adaptive"


def test_remaining_tokens_agree_with_sampling():
    predictor = LengthPredictor(12_288, mean_tokens=3000)
    rng = np.random.default_rng(0)
    draws = np.exp(predictor.mean_log("p") + predictor.SIGMA_ROLLOUT * rng.standard_normal(400_000)).clip(max=12_288)
    for written in (0, 500, 2500, 6000):
        expected = draws[draws > written].mean() - written
        assert predictor.remaining("p", written) == pytest.approx(expected, rel=0.05)
    assert predictor.remaining("p", 12_288) == 1
    assert math.isfinite(predictor.remaining("p", 12_000))


def test_predictor_forgets_the_progress_of_ended_rollouts():
    rng, watched, told = random.Random(0), LengthPredictor(4000), LengthPredictor(4000)
    for rollout in range(30):
        problem, length = f"p{rng.randrange(4)}", rng.randint(1, 4000)
        for tokens in range(100, length, 700):
            watched.progress(problem, tokens, rollout)
            watched.remaining(problem, tokens)
        watched.observe(problem, length, rollout)
        told.observe(problem, length)
        for predictor in (watched, told):
            predictor.remaining(problem)  # the mean of all problems follows with the next prediction
        assert watched.remaining(problem) == pytest.approx(told.remaining(problem))


def test_predictor_moves_from_the_common_mean_to_the_problems_mean():
    predictor = LengthPredictor(12_288, mean_tokens=1000)
    for _ in range(3):
        predictor.observe("long", 6000)
    some = predictor.remaining("long")
    assert 2 * predictor.remaining("other") < some
    for _ in range(50):
        predictor.observe("long", 6000)
    assert predictor.remaining("long") > some
    assert np.exp(predictor.mean_log("long")) == pytest.approx(6000, rel=0.05)


SMALL_GRID = "engines: 6\nrollouts: 96\nkv_tokens: [60000, 300000]\nmean_tokens: [1000, 3000]\ntool_s: [0.3]\n"


@pytest.mark.slow
def test_bench_lines_on_a_small_grid(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(SMALL_GRID)
    lines = {line["name"]: line for line in bench(file)}
    json.dumps(list(lines.values()))
    assert all({"name", "value", "unit", "against", "ratio", "n"} <= set(line) for line in lines.values())
    assert lines["async_over_barrier"]["ratio"] >= 1.3
    assert lines["adaptive_over_least_in_flight"]["ratio"] >= 1.0
    assert lines["adaptive_over_best"]["ratio"] >= 0.97
    assert 0.3 < lines["adaptive_over_bound"]["ratio"] <= 1
    assert lines["kv_over_least_in_flight"]["ratio"] < 1  # the paper's rule is slower in the simulator


@pytest.mark.parametrize(
    ("text", "named"),
    [("engine: 4\n", "engine"), ("kv_tokens: lots\n", "kv_tokens"), ("- 1\n", "grid.yaml"), ("{", "grid.yaml")],
)
def test_an_invalid_grid_is_an_error_that_names_the_field(tmp_path, text, named):
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=named):
        read_grid(file)
