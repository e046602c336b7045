"""Tests of sessions: interpreters that keep their state between the calls of a trajectory."""

import asyncio
from types import SimpleNamespace

import pytest
import pytest_asyncio

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox
from rstar_lab.sandbox.scheduler import SlotState
from rstar_lab.sandbox.sessions import Sessions

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=10, wall_slack_s=10), workers=2) as sandbox:
        yield sandbox


async def cells(sandbox, name: str, *codes: str, **fields):
    return [await sandbox.run(code, session=name, **fields) for code in codes]


@pytest.mark.slow
async def test_state_is_kept_and_values_are_echoed(sandbox):
    codes = ["import math\nx = [1]", "def grow():\n    x.append(len(x) + 1)", "grow()", "x", "_", "x;", "math.pi > 3"]
    results = await cells(sandbox, "state", *codes)
    assert [(r.outcome, r.value) for r in results] == [
        (Outcome.OK, value) for value in (None, None, None, "[1, 2]", "[1, 2]", "[1, 2]", "True")
    ]


async def test_earlier_cells_are_not_run_again(sandbox):
    results = await cells(sandbox, "replay", "open('count', 'a').write('x')", "1", "2", "open('count').read()")
    assert results[-1].value == "'x'"
    results = await cells(sandbox, "replay", "print('once')", "3")
    assert [result.stdout for result in results] == ["once\n", ""]


async def test_an_error_keeps_the_state_and_names_its_cell(sandbox):
    results = await cells(
        sandbox, "error", "x = 1", "def f():\n    return x / 0", "x = 5\nf()", "x", "x +", "x", "exit()", "x"
    )
    assert [r.outcome for r in results] == ["ok", "ok", "exception", "ok", "syntax_error", "ok", "ok", "ok"]
    assert [results[i].value for i in (3, 5, 7)] == ["5", "5", "5"]
    assert 'File "cell 3", line 2, in <module>\n    f()' in results[2].stderr
    assert 'File "cell 2", line 2, in f\n    return x / 0' in results[2].stderr


async def test_every_cell_has_its_own_input_and_output(sandbox):
    for text in ("first", "second, longer", ""):
        (result,) = await cells(
            sandbox, "input", "import sys\nprint(sys.stdin.read())\nsys.stderr.write('e')", stdin=text
        )
        assert (result.stdout, result.stderr) == (f"{text}\n", "e")


async def test_sessions_do_not_share_state(sandbox):
    await asyncio.gather(
        *(cells(sandbox, f"apart {i}", f"x = {i}\nopen('/tmp/f', 'w').write('{i}')") for i in range(6))
    )
    results = await asyncio.gather(*(cells(sandbox, f"apart {i}", "x", "open('/tmp/f').read()") for i in range(6)))
    assert [[r.value for r in pair] for pair in results] == [[str(i), f"'{i}'"] for i in range(6)]


async def test_cells_of_one_session_run_one_after_another(sandbox):
    calls = [
        Call("import time\nn = globals().get('n', 0)\ntime.sleep(0.02)\nn += 1\nn", session="order") for _ in range(10)
    ]
    results = await sandbox.run_many(calls)
    assert [result.value for result in results] == [str(i) for i in range(1, 11)]


@pytest.mark.slow
async def test_a_timeout_interrupts_the_cell_and_keeps_the_state(sandbox):
    first, slow, after = await cells(sandbox, "interrupt", "x = 41", "while True: pass", "x + 1", timeout_s=1)
    assert (slow.outcome, after.outcome, after.value) == (Outcome.TIMEOUT, Outcome.OK, "42")
    assert "KeyboardInterrupt" in slow.stderr
    assert first.outcome == Outcome.OK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", Outcome.TIMEOUT),
        ("import os\nos._exit(0)", Outcome.OK),
        ("import os\nos.kill(os.getpid(), 9)", Outcome.KILLED),
        ("x = []\nwhile True: x.append(bytearray(10**7))", Outcome.MEMORY),
        ("import time\nwhile True: print('x' * 9999); time.sleep(1e-4)", Outcome.OUTPUT_LIMIT),
    ],
)
async def test_a_dead_session_is_reported_and_restarted(sandbox, code, outcome):
    name = f"dies by {code}"
    _, dying, after, again = await cells(
        sandbox, name, "x = 1", code, "'x' in globals()", "1", timeout_s=1, memory_mb=256
    )
    assert dying.outcome == outcome
    assert "the session's interpreter has ended" in dying.stderr
    assert (after.outcome, after.value) == (Outcome.OK, "False")
    assert after.stderr.startswith("[session restarted, earlier state is gone")
    assert again.stderr == ""


async def test_a_forked_child_does_not_replace_the_session(sandbox):
    code = "import os\nchild = os.fork()\nif child == 0: x = 'child'\nelse:\n    os.waitpid(child, 0)\n    x = 'parent'"
    _, result, after = await cells(sandbox, "fork", code, "x", "1 + 1")
    assert (result.value, after.value) == ("'parent'", "2")


async def test_seed_makes_a_cell_reproducible(sandbox):
    code = "import random, numpy\n(random.random(), float(numpy.random.rand()))"
    one, two = [await cells(sandbox, name, code, seed=7) for name in ("seed 1", "seed 2")]
    three, four = [await cells(sandbox, name, code) for name in ("fresh 1", "fresh 2")]
    assert one[0].value == two[0].value
    assert len({one[0].value, three[0].value, four[0].value}) == 3


async def test_a_session_is_as_isolated_as_a_call(sandbox):
    code = "import os, socket\n(os.getuid(), os.listdir('/proc')[-1], os.path.exists('/etc/shadow'))"
    (result,) = await cells(sandbox, "isolated", code)
    if not sandbox.missing_layers:
        assert result.value == "(1000, '2', False)"
    (result,) = await cells(sandbox, "isolated", "socket.socket()")
    assert result.outcome == Outcome.EXCEPTION


async def test_a_closed_session_loses_its_state(sandbox):
    await cells(sandbox, "closed", "x = 1")
    await sandbox.close_session("closed")
    await sandbox.close_session("closed")
    (result,) = await cells(sandbox, "closed", "'x' in globals()")
    assert (result.value, result.stderr) == ("False", "")


@pytest.mark.slow
async def test_idle_sessions_are_dropped_with_a_note():
    async with LocalSandbox(Limits(session_idle_s=0.4, max_sessions=3), workers=1) as sandbox:
        await cells(sandbox, "idle", "x = 1")
        await asyncio.sleep(1.5)
        assert sandbox.gauges["sessions"] == 0
        (result,) = await cells(sandbox, "idle", "'x' in globals()")
        assert result.value == "False"
        assert "earlier state is gone: idle for 0.4 s" in result.stderr


@pytest.mark.slow
async def test_a_cancelled_call_frees_its_slot():
    async with LocalSandbox(workers=1) as sandbox:
        for session in (None, "given up"):
            call = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)", timeout_s=60, session=session))
            await asyncio.sleep(0.5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await sandbox.run("1 + 1", session=session)).value == "2"
        assert sandbox.gauges["queue_depth"] == sandbox._scheduler.count(SlotState.RUNNING) == 0


async def test_the_sweep_of_idle_sessions_leaves_those_in_use():
    sessions = Sessions(idle_s=0.0, max_sessions=9)
    busy, idle = sessions.open("busy"), sessions.open("idle")
    sessions.done(idle)
    sessions.drop_idle()
    assert sessions.find("busy") is busy and sessions.find("idle") is None, "a cell may run longer than session_idle_s"
    sessions.done(busy)
    sessions.drop_idle()
    assert len(sessions) == 0


async def test_sessions_are_dropped_beyond_their_limits_and_each_loss_is_reported_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rstar_lab.sandbox.sessions.time", SimpleNamespace(monotonic=lambda: now[0]))
    sessions = Sessions(idle_s=10.0, max_sessions=2)
    for name in ("a", "b", "a", "c"):
        session = sessions.open(name)
        session.connection = SimpleNamespace(close=lambda: None)
        now[0] += 8.0  # a cell that runs as long as this is in use, not idle
        sessions.done(session)
    assert [sessions.find(name) is not None for name in "abc"] == [True, False, True]
    assert [sessions.pop_loss("b"), sessions.pop_loss("b")] == ["too many sessions", None]
    now[0] += 5.0
    sessions.drop_idle()
    assert [sessions.find(name) is not None for name in "ac"] == [False, True]
