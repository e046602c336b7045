"""Comparisons without a result: only CPU time decides, a busy machine changes nothing, and undecided is not wrong."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers.rollouts import roll_out

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import summarise_usable
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import RewardInputs, make_reward
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.step import rollout_metrics
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.verify import Undecided, pool, same_answer

PAIRS = [(rf"\frac{{x+{n}}}{{7}}", f"x/7+{n}/7" if n % 4 else "x/6") for n in range(48)]
EXPENSIVE = r"\int_0^1 x^{x^{x}} dx"


def spin(stop) -> None:
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.slow
def test_32_threads_on_a_busy_machine_decide_as_one_on_a_quiet_machine():
    alone = [same_answer(*pair) for pair in PAIRS]
    assert alone == [bool(n % 4) for n in range(48)]
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    busy = [context.Process(target=spin, args=(stop,), daemon=True) for _ in range(4 * (os.cpu_count() or 1))]
    for process in busy:
        process.start()
    try:
        with ThreadPoolExecutor(32) as threads:
            assert list(threads.map(lambda pair: same_answer(*pair), PAIRS)) == alone
    finally:
        stop.set()
        for process in busy:
            process.join()


def test_a_comparison_without_a_worker_is_named_and_undecided_and_not_different(monkeypatch, caplog):
    monkeypatch.setattr(pool, "NAMED_S", 0.2)
    workers = pool.WorkerPool()
    try:
        workers.warm_up()
        assert workers.compare("2x", "x+x")
        assert workers._process is not None
        server = psutil.Process(workers._process.pid)
        processes = [server, *server.children()]
        for process in processes:
            process.suspend()
        with pytest.raises(Undecided, match="no CPU time"):
            workers.compare("2x", "x+x", 0.5)
        assert "no reply for 0 s; in 0 s it is ended" in caplog.text
        threading.Timer(0.5, lambda: [process.resume() for process in processes]).start()
        assert workers.compare("2x", "x+x", 60)  # it waits for the worker
    finally:
        workers.close()


def test_a_stopped_worker_has_no_cpu_time_and_is_undecided():
    workers = pool.WorkerPool()
    try:
        workers.warm_up()
        thread = threading.Thread(target=lambda: time.sleep(0))
        thread.start()
        with pytest.raises(Undecided):
            workers.compare(EXPENSIVE, "5", 0.05)  # 0.05 s of wall time are less than its CPU time
    finally:
        workers.close()


async def test_an_undecided_answer_makes_the_rollout_unusable_and_is_counted():
    def undecided(text: str, answer: str) -> float:
        raise Undecided

    text = r"<answer>\boxed{42}</answer>"
    lost, right = [await roll_out(text, reward=reward) for reward in (undecided, make_reward("verify"))]
    assert (lost.stop_reason, lost.usable, right.reward) == (StopReason.UNDECIDED, False, 1.0)
    metrics = rollout_metrics([lost, right])
    assert metrics["undecided"] == 1 and metrics["correct"] == metrics["reward"] == 1.0
    assert "undecided" not in rollout_metrics([right])
    rows = step_rows([lost, right], {}, "all")["trajectories"]
    result = summarise_usable(rows)
    assert (result["pass1"][0], result["n"], result["undecided"]) == (1.0, 1, 1)
    with pytest.raises(UserError, match="undecided answer"):
        summarise_usable(rows[:1])


@pytest.mark.parametrize("trl", [False, True])
def test_a_reward_function_that_hangs_is_an_error_with_its_name(tmp_path, monkeypatch, trl):
    signature = "completions, **columns" if trl else "text, answer"
    (tmp_path / "slow_rewards.py").write_text(f"import time\ndef hang({signature}):\n    time.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = make_reward("slow_rewards:hang", timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"slow_rewards:hang did not return within 0.2 s; .* raise rl.reward_timeout_s"):
        reward.score("a", "b", RewardInputs(Problem(problem_id="p", question="q", answer="b")))
    assert time.monotonic() - started < 5
