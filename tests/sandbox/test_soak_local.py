"""Soak test of LocalSandbox with a mixed load: correct results, no leaks. Part of `make test-all`."""

import asyncio
import random

import psutil
import pytest

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox

KINDS = {
    "plain": (60, "print(1 + 1)", Outcome.OK, "2\n"),
    "numpy": (15, "import numpy as np\nprint(int(np.arange(10).sum()))", Outcome.OK, "45\n"),
    "sympy": (10, "import sympy\nprint(sympy.solve(sympy.Symbol('x')**2 - 4))", Outcome.OK, "[-2, 2]\n"),
    "exception": (8, "1 / 0", Outcome.EXCEPTION, ""),
    "loop": (2, "while True: pass", Outcome.TIMEOUT, ""),
    "memory": (1, "x = []\nwhile True: x.append(bytearray(10**7))", Outcome.MEMORY, ""),
    "fork bomb": (1, "import os\nwhile True:\n try: os.fork()\n except OSError: pass", Outcome.TIMEOUT, ""),
    "flood": (1, "while True: print('x' * 999)", Outcome.OUTPUT_LIMIT, None),
    "suicide": (2, "import os\nos.kill(os.getpid(), 9)", Outcome.KILLED, ""),
}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("make_room", [True, False])
async def test_10000_mixed_calls_have_their_outcomes(make_room: bool):
    draw = random.Random(0)
    names = draw.choices(list(KINDS), [kind[0] for kind in KINDS.values()], k=10_000)
    limits = Limits(timeout_s=1, wall_slack_s=30, memory_mb=1024, queue_timeout_s=1800, make_room=make_room)
    me = psutil.Process()
    async with LocalSandbox(limits) as sandbox:
        gate = asyncio.Semaphore(256)
        wrong: list[tuple[str, object]] = []

        async def one(name: str) -> None:
            _, code, outcome, stdout = KINDS[name]
            async with gate:
                result = await sandbox.run(code, memory_mb=128 if name == "memory" else None)
            if result.outcome != outcome or stdout not in (None, result.stdout):
                wrong.append((name, result))

        await asyncio.gather(*(one(name) for name in names[:500]))
        processes, fds = len(me.children(recursive=True)), me.num_fds()
        await asyncio.gather(*(one(name) for name in names[500:]))
        assert wrong == []
        assert sum(sandbox.outcomes.values()) == 10_000
        assert sandbox.retries == 0
        await asyncio.sleep(1)
        assert len(me.children(recursive=True)) <= processes + 16
        assert me.num_fds() <= fds + 16
    assert not [child for child in me.children(recursive=True) if "box.zygote" in " ".join(child.cmdline())]
