"""Tests of output that arrives while a call runs."""

import asyncio
import time

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import CallResult, Limits, LocalSandbox, SandboxClient
from rstar_lab.sandbox.call import Output
from rstar_lab.sandbox.scheduler import SlotState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

SLOW = """
import os, sys, time
print("first", flush=True)
time.sleep(0.6)
os.write(1, "\u00e9".encode()[:1]); time.sleep(0.2); os.write(1, "\u00e9".encode()[1:] + b"\\n")
print("error", file=sys.stderr)
"""


async def check_stream(sandbox: LocalSandbox | SandboxClient) -> None:
    for session in (None, "streamed"):
        pieces: list[Output] = []
        times: list[float] = []
        result = None
        async for item in sandbox.stream(SLOW + "6 * 7", session=session):
            if isinstance(item, CallResult):
                result = item
            else:
                pieces.append(item)
                times.append(time.monotonic())
        assert result is not None and (result.outcome, result.value) == (Outcome.OK, "42")
        assert time.monotonic() - times[0] > 0.5
        for name in ("stdout", "stderr"):
            assert "".join(piece.text for piece in pieces if piece.stream == name) == getattr(result, name)
        assert pieces[0] == Output("stdout", "first\n") and result.stdout == "first\n\u00e9\n"


async def test_output_of_an_embedded_sandbox_arrives_while_the_call_runs():
    async with LocalSandbox(Limits(timeout_s=10.0), workers=1) as sandbox:
        await check_stream(sandbox)


async def test_output_of_a_service_arrives_while_the_call_runs(service):
    async with SandboxClient(service["url"]) as client:
        await check_stream(client)


async def test_a_closed_generator_cancels_the_call_and_limits_apply():
    async with LocalSandbox(Limits(timeout_s=10.0), workers=1) as sandbox:
        stream = sandbox.stream("print(1, flush=True)\nimport time\ntime.sleep(99)")
        assert await anext(stream) == Output("stdout", "1\n")
        await stream.aclose()
        async with asyncio.timeout(5):
            while sandbox._scheduler.count(SlotState.RUNNING):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        items = [item async for item in sandbox.stream("while True: print('x' * 1000)")]
        text = "".join(item.text for item in items if isinstance(item, Output))
        assert isinstance(items[-1], CallResult) and items[-1].outcome == Outcome.OUTPUT_LIMIT
        assert 0 < len(text) <= sandbox.limits.output_bytes
