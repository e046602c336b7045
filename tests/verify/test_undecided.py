"""Rewards without a result are not wrong, and threads do not change what is equal."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from helpers.rollouts import roll_out

from rstar_lab.common.errors import UserError
from rstar_lab.rl.evaluation import summarise_usable
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import RewardInputs, make_reward
from rstar_lab.rl.rollout.records import step_rows
from rstar_lab.rl.step import rollout_metrics
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.verify import Undecided, compare, equality, same_answer
from rstar_lab.verify.numeric import NotComputed

PAIRS = [(rf"\frac{{x+{n}}}{{7}}", f"x/7+{n}/7" if n % 4 else "x/6") for n in range(24)]
SERIES = [(rf"\sum_{{k=1}}^\infty\frac{{{n}}}{{k^2}}", rf"\frac{{{n + n // 4}\pi^2}}{{6}}") for n in range(1, 7)]


def test_32_threads_decide_as_one():
    pairs = [*PAIRS, *SERIES] * 2
    alone = [same_answer(*pair) for pair in pairs]
    assert alone == 2 * ([bool(n % 4) for n in range(24)] + [True] * 3 + [False] * 3)
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(lambda pair: same_answer(*pair), pairs)) == alone


def test_a_process_that_is_forked_during_a_comparison_can_compare():
    busy = threading.Thread(target=lambda: [same_answer(*pair) for pair in SERIES * 5])
    busy.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if same_answer(*SERIES[0]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    busy.join()


@pytest.mark.parametrize("reward", ["verify", "own_rewards:equal"])
async def test_an_undecided_answer_makes_the_rollout_unusable_and_is_counted(tmp_path, monkeypatch, caplog, reward):
    """An unexpected error of a comparison decides nothing; answers that cannot be compared count as different."""
    (tmp_path / "own_rewards.py").write_text("import rstar_lab.verify as v\nequal = lambda *texts: v.verify(*texts)")
    monkeypatch.syspath_prepend(str(tmp_path))
    unexpected = type(f"Unexpected in {reward}", (Exception,), {})
    monkeypatch.setattr(equality, "equal", Mock(side_effect=[NotComputed, *[unexpected] * 3]))
    assert [compare("41", "42x"), compare("41", "42x")] == [False, None]
    with pytest.raises(Undecided, match="'41' was not compared with '42x'"):
        same_answer("41", "42x")
    texts = [rf"<answer>\boxed{{{answer}}}</answer>" for answer in ("x", "42")]
    lost, right = [await roll_out(text, reward=make_reward(reward)) for text in texts]
    assert sum("internal error of verify; the answer" in message for message in caplog.messages) == 1
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
