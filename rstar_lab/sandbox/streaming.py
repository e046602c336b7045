"""Output of a call while it runs."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from rstar_lab.sandbox.call import CallResult

# Receives output as (1 for stdout or 2 for stderr, bytes).
OnOutput = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True)
class Output:
    """New output of a running call. Invalid UTF-8 bytes become `\\xNN`."""

    stream: Literal["stdout", "stderr"]
    text: str


class OutputDecoder:
    """Decodes the output of one call. A character may be split between two pieces of output."""

    def __init__(self) -> None:
        self._decoders = [codecs.getincrementaldecoder("utf-8")("backslashreplace") for _ in range(2)]

    def decode(self, number: int, data: bytes) -> Output:
        return Output("stdout" if number == 1 else "stderr", self._decoders[number - 1].decode(data))


async def stream_output(
    run: Callable[[OnOutput], Awaitable[CallResult]],
) -> AsyncGenerator[Output | CallResult, None]:
    """Yield the output of a call while it runs, then its result. The call is cancelled if the generator is closed."""
    decoder = OutputDecoder()
    items: asyncio.Queue[Output | CallResult | None] = asyncio.Queue()

    def on_output(number: int, data: bytes) -> None:
        items.put_nowait(decoder.decode(number, data))

    task = asyncio.ensure_future(run(on_output))
    task.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        yield task.result()
    finally:
        task.cancel()
