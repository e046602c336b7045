"""Fuzz tests: random sequences of allowed system calls do not affect other calls or the processes of the sandbox."""

import asyncio
import platform
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox
from rstar_lab.sandbox.runtime.syscalls import NUMBERS

pytestmark = pytest.mark.slow

COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
PROGRAM = """
import ctypes
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(b'file', 1 << 16)
address = ctypes.addressof(buffer)
for number, *arguments in {calls}:
    values = [address + value[0] if isinstance(value, tuple) else value for value in arguments]
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, values))
"""
NEIGHBOURS = 8
BATCH = 32

NUMBERS_ALLOWED = [number for numbers in NUMBERS.values() if (number := numbers[COLUMN]) is not None]


def draw_argument(draw: random.Random) -> int | tuple[int]:
    """Return an address in the program's buffer (as a tuple), a descriptor, a flag, or an arbitrary number."""
    kind = draw.randrange(4)
    if kind == 0:
        return (draw.randrange(60_000),)
    return (draw.randint(-1, 8), 1 << draw.randrange(40), draw.randint(-(2**63), 2**63 - 1))[kind - 1]


def draw_batch(draw: random.Random) -> list[list[tuple]]:
    """Return sequences of system calls: (number, six arguments)."""
    return [
        [(draw.choice(NUMBERS_ALLOWED), *(draw_argument(draw) for _ in range(6))) for _ in range(draw.randint(1, 20))]
        for _ in range(BATCH)
    ]


async def check(batches: list[list[list[tuple]]]) -> None:
    """Run batches of sequences, as calls and as cells, and assert that all others have their results."""
    limits = Limits(timeout_s=0.5, wall_slack_s=8.0, memory_mb=256, processes=64)
    async with LocalSandbox(limits, workers=2) as sandbox:
        await sandbox.run("import math")
        for batch in batches:
            hostile = [Call(PROGRAM.format(calls=calls)) for calls in batch]
            hostile += [Call(PROGRAM.format(calls=calls), session="fuzz") for calls in batch[:2]]
            honest = [Call(f"print({number} + 1)", timeout_s=5.0) for number in range(NEIGHBOURS)]
            results = await sandbox.run_many(hostile + honest)
            neighbours = results[len(hostile) :]
            assert [result.stdout for result in neighbours] == [f"{number + 1}\n" for number in range(NEIGHBOURS)]
            failed = [
                call.code
                for call, result in zip(hostile, results, strict=False)
                if result.outcome in (Outcome.SANDBOX_ERROR, Outcome.QUEUE_TIMEOUT)
            ]
            assert not failed
            await sandbox.close_session("fuzz")
        assert not +sandbox.events, sandbox.events


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_system_calls_do_not_affect_other_calls(seed):
    draw = random.Random(seed)
    asyncio.run(check([draw_batch(draw) for _ in range(2)]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_10000_sequences_of_system_calls_do_not_affect_other_calls(seed):
    draw = random.Random(seed)
    asyncio.run(check([draw_batch(draw) for _ in range(16)]))
