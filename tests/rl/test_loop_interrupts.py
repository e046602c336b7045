"""Ctrl-C ends a blocking call of the training loop: nothing is half done, the loop can go on, and no process is left."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rstar_lab.common.blocking import LoopThread
from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.scheduling.slots import Lockstep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def loop():
    # A shell that starts pytest in the background ignores SIGINT.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = LoopThread("test")
    yield thread
    thread.stop()
    signal.signal(signal.SIGINT, previous)


def interrupt_in(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupted_call_has_ended_when_the_cell_returns(loop):
    ended = []

    async def work():
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.3)
            ended.append("cleaned up")

    interrupt_in(0.3)
    with pytest.raises(KeyboardInterrupt):
        loop.call(work())
    assert ended == ["cleaned up"]
    assert loop.call(asyncio.sleep(0, "next")) == "next"


def test_an_update_is_completed_before_the_interrupt_is_raised(loop):
    done = []

    async def update():
        await asyncio.to_thread(time.sleep, 0.6)
        done.append("stored")

    interrupt_in(0.2)
    with pytest.raises(KeyboardInterrupt):
        loop.call(update(), completes=True)
    assert done == ["stored"]


@pytest.mark.parametrize("at_once", [False, True])
async def test_cancelled_rollouts_in_lockstep_leave_the_engine(at_once):
    class Engine:
        async def generate(self, prompt_ids, sampling):
            raise AssertionError("lockstep submits requests")

        def submit(self, requests):
            self.requests = [asyncio.get_running_loop().create_future() for _ in requests]
            if at_once:  # before the rollout knows that its request was submitted
                asyncio.get_running_loop().call_soon(turns[0].cancel)
            return self.requests

    engine = Engine()
    lockstep = Lockstep([engine], ["a", "a"])
    turns = [asyncio.create_task(lockstep.slot(i).generate([1], Sampling(4))) for i in range(2)]
    await asyncio.sleep(0.05)
    turns[0].cancel()
    await asyncio.sleep(0.05)
    assert [request.cancelled() for request in engine.requests] == [True, False]
    engine.requests[1].set_result(Completion([1], [0.0], FinishReason.STOP))
    assert (await turns[1]).token_ids == [1]


SCRIPT = """
from pathlib import Path
from helpers.tiny_models import make_model
from rstar_lab.rl import TrainingLoop
from rstar_lab.rl.resolved import read_stage_problems

make_model(Path("model"))
with TrainingLoop("tiny_fast", "model", overrides={"engine.kind": "KIND", "processes": 1}) as loop:
    problems = read_stage_problems(loop.recipe, loop.recipe.stages[0])
    try:
        print("sampling", flush=True)
        loop.sample(problems[:300], n=16)
    except KeyboardInterrupt:
        rollouts = loop.sample(problems[:2], n=4)
        print("updated", loop.update(rollouts, [1.0, -1.0] * 4)["rollouts"], flush=True)
    loop.sample(problems[:300], n=16)
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_ctrl_c_in_a_script_leaves_no_process_and_the_loop_goes_on(kind, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", SCRIPT.replace("KIND", kind)], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    for line in ("sampling\n", "updated 8\n"):
        while (printed := process.stdout.readline()) != line:
            assert printed, f"ended before {line!r}"
        time.sleep(5)
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal and a notebook's kernel do: to all processes
    process.communicate(timeout=120)
    assert process.returncode != 0 and started
    _, alive = psutil.wait_procs(started, timeout=20)
    assert [each.cmdline() for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
