"""Tests of LocalSandbox: results, limits and scheduling of calls."""

import asyncio

import pytest
import pytest_asyncio
from helpers.cases import read_cases

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox
from rstar_lab.sandbox.scheduler import EXTRA_SHORT_CALLS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=10, memory_mb=512), workers=2) as sandbox:
        yield sandbox


async def test_value_of_the_last_expression_is_returned(sandbox):
    result = await sandbox.run("x = 6\nprint('hello')\nx * 7")
    assert (result.outcome, result.stdout, result.stderr, result.value) == (Outcome.OK, "hello\n", "", "42")


async def test_no_value_without_a_last_expression(sandbox):
    for code in ("x = 1", "None", "", "# nothing"):
        result = await sandbox.run(code)
        assert (result.outcome, result.value) == (Outcome.OK, None)


async def test_traceback_keeps_the_line_numbers_of_the_code(sandbox):
    result = await sandbox.run("from __future__ import annotations\n\ndef f():\n    1 / 0\n\nf()")
    assert result.outcome == Outcome.EXCEPTION
    assert "line 6, in <module>\n    f()" in result.stderr
    assert "line 4, in f\n    1 / 0" in result.stderr
    assert result.stderr.count("  File ") == 2
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("code", ["x = (", "return 1", "a\x00b", "'\ud800'", "(" * 10_000, "\tx\n  y"])
async def test_code_that_does_not_compile_is_a_syntax_error(sandbox, code):
    assert (await sandbox.run(code)).outcome == Outcome.SYNTAX_ERROR


async def test_run_many_keeps_the_order(sandbox):
    results = await sandbox.run_many([Call(f"print({i})") for i in range(40)])
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(40)]


HONEST = read_cases(__file__)["ordinary programs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
async def test_ordinary_programs_work(sandbox, name):
    code, expected = HONEST[name]
    result = await sandbox.run(code, "10 20\n")
    assert result.outcome == Outcome.OK, result.stderr
    assert (result.value or result.stdout) == expected, result
    assert result.stderr == ""


OVERWRITES = {  # programs that raise, and end the process with status 0 when the exception is handled
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
    "exit handler of a thread": "import threading, os\nthreading._register_atexit(os._exit, 0)\n1 / 0",
    "standard error": "import sys, os\nclass E:\n def write(self, text): os._exit(0)\nsys.stderr = E()\n1 / 0",
    "text of the exception": "import os\nclass E(Exception):\n def __str__(self): os._exit(0)\nraise E",
    "text of the exit status": "import os\nclass E:\n def __str__(self): os._exit(0)\nraise SystemExit(E())",
    "a slow thread": "import threading, os, time\ndef end():\n time.sleep(.2)\n os._exit(0)\n"
    "threading.Thread(target=end).start()\n1 / 0",
}


@pytest.mark.parametrize("session", [None, "overwrites"])
@pytest.mark.parametrize("name", OVERWRITES)
async def test_a_handler_of_the_program_does_not_turn_an_exception_into_ok(sandbox, name, session):
    result = await sandbox.run(OVERWRITES[name], session=session)
    assert result.outcome == Outcome.EXCEPTION
    if session:
        await sandbox.close_session(session)


async def test_calls_have_different_random_numbers(sandbox):
    code = "import random, numpy\nrandom.random(), numpy.random.rand(), numpy.random.default_rng().random()"
    values = {(await sandbox.run(code)).value for _ in range(8)}
    assert len(values) == 8


async def test_seed_makes_a_call_reproducible(sandbox):
    code = "import random, numpy, sympy\nnames = list({'a', 'b', 'c', 'd', 'e'}), hash('x')\n"
    code += "random.random(), numpy.random.rand(), sympy.randprime(10**9, 10**12), names"
    values = {seed: {(await sandbox.run(code, seed=seed)).value for _ in range(4)} for seed in (0, 1, -5, 2**62)}
    assert all(len(same) == 1 for same in values.values())
    assert len(set.union(*values.values())) == 4
    with pytest.raises(ValueError, match="seed"):
        await sandbox.run(code, seed=2**63)


async def test_stdout_and_stderr_are_separate_and_truncated_with_a_note():
    async with LocalSandbox(Limits(output_bytes=1000), workers=1) as sandbox:
        result = await sandbox.run("import sys\nprint('o' * 5000)\nsys.stderr.write('short')")
        assert result.outcome == Outcome.OUTPUT_LIMIT
        assert result.stdout == "o" * 1000 + "\n[output cut after 1000 bytes]\n"
        assert result.stderr == "short"
        assert (await sandbox.run("print('o' * 999)")).outcome == Outcome.OK


async def test_a_large_value_is_truncated_with_a_note(sandbox):
    result = await sandbox.run("'v' * 10**6")
    assert result.outcome == Outcome.OK
    assert result.value.endswith("[value cut at 65536 bytes]")
    assert len(result.value) < 66_000


async def test_exit_codes_determine_the_outcome(sandbox):
    for code, outcome, stderr in (
        ("exit()", Outcome.OK, ""),
        ("import sys; sys.exit(0)", Outcome.OK, ""),
        ("import sys; sys.exit(3)", Outcome.EXCEPTION, ""),
        ("raise SystemExit('reason')", Outcome.EXCEPTION, "reason\n"),
        ("import os; os._exit(0)", Outcome.OK, ""),
        ("import os; os._exit(1)", Outcome.KILLED, ""),
    ):
        result = await sandbox.run(code)
        assert (result.outcome, result.stderr) == (outcome, stderr)


async def test_a_sleeping_program_ends_at_its_time_limit(sandbox):
    result = await sandbox.run("import time\ntime.sleep(30)", timeout_s=0.5)
    assert result.outcome == Outcome.TIMEOUT
    assert 0.45 < result.duration_s < 0.5 + 3


async def test_a_program_gets_its_whole_time_limit(sandbox):
    result = await sandbox.run("import time\ntime.sleep(0.8)\nprint('done')", timeout_s=1.0)
    assert (result.outcome, result.stdout) == (Outcome.OK, "done\n")


@pytest.mark.slow
async def test_cpu_time_of_all_processes_counts():
    """The CPU time of both processes counts towards the limit; waiting for a CPU does not."""
    async with LocalSandbox(Limits(timeout_s=2, wall_slack_s=60), workers=1) as sandbox:
        code = """
import os, time
if os.fork() == 0:
    while True: pass
while True:
    sum(range(10**5))
    print(time.process_time())"""
        result = await sandbox.run(code)
        assert result.outcome == Outcome.TIMEOUT
        assert float(result.stdout.splitlines()[-2]) < 1.8


async def test_limits_above_the_maximum_are_rejected(sandbox):
    with pytest.raises(ValueError, match="timeout_s"):
        await sandbox.run("1", timeout_s=10**6)
    with pytest.raises(ValueError, match="timeout_s"):
        await sandbox.run("1", timeout_s=0)
    with pytest.raises(ValueError, match="memory_mb"):
        await sandbox.run("1", memory_mb=10**9)
    with pytest.raises(ValueError, match="stdin"):
        await sandbox.run("1", "x" * (65 * 1024 * 1024))
    with pytest.raises(ValueError, match="workers"):
        LocalSandbox(workers=0)
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=0)


@pytest.mark.slow
async def test_hundreds_of_concurrent_calls_get_their_results(sandbox):
    before = sandbox.outcomes[Outcome.OK]
    calls = [Call(f"print({i})", timeout_s=20) for i in range(300)]
    task = asyncio.create_task(sandbox.run_many(calls))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 300 - sandbox.gauges["queue_depth"] in (2, 2 + EXTRA_SHORT_CALLS)
    results = await task
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(300)]
    assert sandbox.outcomes[Outcome.OK] - before == 300
    assert sandbox.gauges["queue_depth"] == 0
    assert max(result.queue_s for result in results) > min(result.queue_s for result in results)


@pytest.mark.slow
async def test_a_call_that_waits_too_long_ends_as_queue_timeout():
    async with LocalSandbox(Limits(queue_timeout_s=0.3), workers=1) as sandbox:
        running = asyncio.create_task(sandbox.run("import time\nwhile time.process_time() < 2: pass"))
        await asyncio.sleep(0.1)
        waiting = await sandbox.run("1")
        assert waiting.outcome == Outcome.QUEUE_TIMEOUT
        assert waiting.queue_s >= 0.3
        assert (await running).outcome == Outcome.OK
        assert (await sandbox.run("1")).outcome == Outcome.OK


@pytest.mark.slow
async def test_short_calls_overtake_rare_long_ones():
    """Two loops occupy both workers. Short calls still run, and the loops end as errors of the model."""
    async with LocalSandbox(Limits(timeout_s=4, wall_slack_s=30), workers=2) as sandbox:
        await sandbox.run_many([Call("1")] * 30)
        loops = [asyncio.create_task(sandbox.run("while True: pass")) for _ in range(2)]
        await asyncio.sleep(0.3)
        short = await sandbox.run_many([Call("1 + 1")] * 20)
        assert not any(loop.done() for loop in loops)
        assert {result.value for result in short} == {"2"}
        assert [result.outcome for result in await asyncio.gather(*loops)] == [Outcome.TIMEOUT] * 2


@pytest.mark.slow
async def test_many_heavy_calls_are_queued_and_finish():
    """More heavy calls than workers are queued. None is preempted as an endless loop."""
    async with LocalSandbox(Limits(timeout_s=3, wall_slack_s=30), workers=2) as sandbox:
        code = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n'done'"
        results = await sandbox.run_many([Call(code)] * 8)
        assert [(result.outcome, result.value) for result in results] == [(Outcome.OK, "'done'")] * 8
