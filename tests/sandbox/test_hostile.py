"""Tests of hostile programs: each ends in time, and eight ordinary calls beside it have correct results."""

import asyncio

import pytest
import pytest_asyncio
from helpers.sandbox_tmp import OWN_TMP

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 1.0
# More slack than the default, so that on a busy machine errors of the model do not become sandbox_error.
SLACK_S = 8.0
ANSWER_S = LIMIT_S + SLACK_S + 1.0
MODEL = {Outcome.OK, Outcome.EXCEPTION, Outcome.TIMEOUT, Outcome.MEMORY, Outcome.KILLED, Outcome.OUTPUT_LIMIT}

HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", {Outcome.TIMEOUT, Outcome.MEMORY}),
    "thread bomb": (
        "import threading, time\nwhile True:\n try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        " except RuntimeError: pass",
        {Outcome.TIMEOUT, Outcome.MEMORY},
    ),
    "setsid daemon": (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(999)\n os._exit(0)\nprint('x')",
        {Outcome.OK},
    ),
    "grandchild holds the streams": (
        "import os, time\nif os.fork() == 0:\n time.sleep(999)\nprint('x')",
        {Outcome.OK},
    ),
    "kill -1": ("import os\nos.kill(-1, 9)", {Outcome.OK, Outcome.EXCEPTION}),
    "kill all visible processes": (
        "import os\nfor pid in range(1, 40000):\n if pid != os.getpid():\n  try: os.kill(pid, 9)\n  except OSError: pass",
        {Outcome.OK},
    ),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", {Outcome.KILLED}),
    "every signal ignored": (
        "import signal\nfor s in signal.valid_signals():\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass",
        {Outcome.TIMEOUT},
    ),
    "memory of one process": ("x = []\nwhile True: x.append(bytearray(10**7))", {Outcome.MEMORY}),
    "memory of many processes": (
        "import os, time\nfor _ in range(8):\n if os.fork() == 0:\n  x = [bytearray(3 * 10**7) for _ in range(10)]\n"
        "  time.sleep(99)\ntime.sleep(99)",
        {Outcome.MEMORY},
    ),
    "one absurd allocation": ("x = bytearray(10**15)", {Outcome.MEMORY}),
    "memory in temporary files": (
        "for i in range(10**6): open(f'/tmp/{i}', 'wb').write(bytes(10**7))",
        {Outcome.EXCEPTION, Outcome.MEMORY},
    ),
    "unbounded recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        {Outcome.TIMEOUT, Outcome.MEMORY, Outcome.KILLED},
    ),
    "all inodes": ("for i in range(10**9): open(f'/tmp/{i}', 'w').close()", {Outcome.EXCEPTION}),
    "all descriptors": ("import os\nx = []\nwhile True: x.append(os.open('/dev/null', 0))", {Outcome.EXCEPTION}),
    "endless stdout": ("while True: print('x' * 999)", {Outcome.OUTPUT_LIMIT}),
    "endless stderr": ("import sys\nwhile True: sys.stderr.write('x' * 999)", {Outcome.OUTPUT_LIMIT}),
    "endless stdout from a child": (
        "import os\nif os.fork() == 0:\n while True: os.write(1, b'x' * 99999)\nos.wait()",
        {Outcome.OUTPUT_LIMIT, Outcome.OK},
    ),
    "closed descriptors": ("import os\nos.closerange(0, 999)\nprint('x')", {Outcome.OK, Outcome.EXCEPTION}),
    "a C call that never returns": ("9**9**8", {Outcome.TIMEOUT}),
    "sympy hangs": (
        "from sympy import *\nfactorint(nextprime(10**40) * nextprime(3 * 10**45))",
        {Outcome.TIMEOUT},
    ),
    "sleeps": ("import time\ntime.sleep(99)", {Outcome.TIMEOUT}),
    "sleeps while its parent waits in the kernel": (
        "import ctypes, time\nctypes.CDLL(None).vfork()\ntime.sleep(99)",
        {Outcome.TIMEOUT},
    ),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {Outcome.TIMEOUT}),
    "segfault": ("import ctypes\nctypes.string_at(0)", {Outcome.KILLED}),
    "abort": ("import os\nos.abort()", {Outcome.KILLED}),
    "os._exit": ("import os\nprint('before', flush=True)\nos._exit(3)", {Outcome.KILLED}),
    "end of stdin": ("input()\ninput()", {Outcome.EXCEPTION}),
    "a repr that hangs": ("class A:\n def __repr__(self):\n  while True: pass\nA()", {Outcome.TIMEOUT}),
    "an exit handler that hangs": (
        "import atexit, time\natexit.register(time.sleep, 99)",
        {Outcome.TIMEOUT},
    ),
    "a thread that never ends": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        {Outcome.TIMEOUT},
    ),
    "exception that cannot be printed": (
        "class E(Exception):\n def __str__(self): raise SystemExit\nraise E",
        {Outcome.EXCEPTION},
    ),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    limits = Limits(timeout_s=LIMIT_S, wall_slack_s=SLACK_S, memory_mb=256, output_bytes=100_000)
    async with LocalSandbox(limits, workers=3) as sandbox:
        # Start all zygotes first, so that imports do not count towards the deadlines below.
        await asyncio.gather(*(sandbox.run(f"import {name}") for name in ("math", "numpy", "sympy", "scipy")))
        yield sandbox


async def attack(sandbox, code: str):
    """Return the outcome. Runs the program again after `sandbox_error`, which a very busy machine causes."""
    for _ in range(4):
        # On a slow machine, filling the memory takes longer than the time limit.
        extra_s = 3.0 if "bytearray" in code else 0.0
        result = await sandbox.run(code, "one line\n", timeout_s=LIMIT_S + extra_s)
        assert result.duration_s < ANSWER_S + extra_s
        if result.outcome != Outcome.SANDBOX_ERROR:
            break
    return result


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_program_has_its_outcome_and_harms_no_other_call(sandbox, name):
    code, expected = HOSTILE[name]
    attacking = asyncio.create_task(attack(sandbox, code))
    honest = [asyncio.create_task(sandbox.run(f"print(sum(range({i})))\n{OWN_TMP}", timeout_s=10)) for i in range(8)]
    for i, result in enumerate(await asyncio.gather(*honest)):
        assert (result.outcome, result.stdout, result.value) == (Outcome.OK, f"{sum(range(i))}\n", "[]")
    result = await attacking
    assert result.outcome in expected, result
    assert sandbox.events["retry"] == 0
    assert len(result.stdout) < 110_000


async def test_output_before_a_kill_is_returned(sandbox):
    for end in ("while True: pass", "os._exit(1)", "os.kill(os.getpid(), 9)", "x = bytearray(6 * 10**8)"):
        result = await attack(sandbox, f"import os\nprint('seen')\n{end}")
        assert result.outcome in {Outcome.TIMEOUT, Outcome.KILLED, Outcome.MEMORY}
        assert result.stdout == "seen\n"


async def test_a_memory_hog_does_not_affect_other_calls(sandbox):
    hog = "x = []\nwhile True: x.append(bytearray(10**7))"
    modest = "x = bytearray(10**8)\nsum(x[::4096])\nlen(x)"
    results = await asyncio.gather(*(sandbox.run(code, timeout_s=8) for code in [hog, modest] * 4))
    assert [result.outcome for result in results] == [Outcome.MEMORY, Outcome.OK] * 4


async def test_a_program_can_forge_only_its_own_value(sandbox):
    """A program can forge its own value and output, but not its outcome."""
    code = """
import os, sys, gc, mmap
for fd in range(3, 500):
    try: os.write(fd, b"\\xff" * 64)
    except OSError: pass
for thing in gc.get_objects():
    if isinstance(thing, mmap.mmap):
        try: thing[:64] = b"\\xff" * 64
        except (ValueError, IndexError, TypeError): pass
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if hasattr(value, "_map"): value._map[:4096] = b"\\xff" * 4096
        if hasattr(value, "write") and type(value).__name__ == "Report": value.write(200, b"forged" * 1000)
    frame = frame.f_back
print('{"outcome": "sandbox_error"}')
os._exit(0)
"""
    result = await sandbox.run(code)
    assert result.outcome in {Outcome.OK, Outcome.KILLED}
    assert result.stdout == '{"outcome": "sandbox_error"}\n'


async def test_abrupt_exits_are_not_infrastructure_failures(sandbox):
    """Every abrupt exit is an error of the model."""
    for code in ("import os\nos._exit(70)", "import os\nos.kill(0, 9)", "import ctypes\nctypes.CDLL(None)._exit(70)"):
        assert (await sandbox.run(code)).outcome in MODEL


async def test_binary_output_is_returned_as_escaped_text(sandbox):
    result = await sandbox.run("import sys\nsys.stdout.buffer.write(bytes(range(256)))\nsys.stdout.flush()")
    assert result.outcome == Outcome.OK
    assert result.stdout.encode("utf-8").startswith(bytes(range(128)))
    assert result.stdout.endswith("\\xfe\\xff")
    assert (await sandbox.run("print('\\udcff\\ud800')")).outcome in {Outcome.OK, Outcome.EXCEPTION}


async def test_a_megabyte_of_stdin_is_read(sandbox):
    result = await sandbox.run("import sys\nlen(sys.stdin.read())", "x" * 3_000_000)
    assert (result.outcome, result.value) == (Outcome.OK, "3000000")
