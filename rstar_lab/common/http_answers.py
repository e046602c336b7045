"""Limits of the answers of HTTP servers that a user names: their size, their time, and no compression, which hides a size."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import httpx

MAX_BYTES = 64 * 2**20
MAX_S = 3600.0

Client = TypeVar("Client", httpx.Client, httpx.AsyncClient)


class AnswerTooLong(httpx.ProtocolError):
    """An answer has more bytes or takes more time than a client accepts, or is compressed."""


class _Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of an answer, which ends with AnswerTooLong at a limit."""

    def __init__(self, response: httpx.Response, max_bytes: int, max_s: float):
        self._stream: Any = response.stream
        self._url, self._max_bytes, self._max_s = response.url, max_bytes, max_s
        self._bytes, self._end = 0, response.request.extensions["rstar_lab.end"]

    def _count(self, chunk: bytes) -> bytes:
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            raise AnswerTooLong(f"the answer of {self._url} is longer than {self._max_bytes:,} bytes")
        if time.monotonic() > self._end:
            raise AnswerTooLong(f"the answer of {self._url} takes longer than {self._max_s:g} s")
        return chunk

    def __iter__(self) -> Iterator[bytes]:
        yield from map(self._count, self._stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._count(chunk)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


def limit_answers(client: Client, max_bytes: int = MAX_BYTES, max_s: float = MAX_S) -> Client:
    """Make a client raise AnswerTooLong, an httpx.TransportError, for an answer that is too long. Returns the client.

    A server that sends a byte now and then ends no other timeout of httpx.

    Args:
        client: The client. It asks for answers without compression.
        max_bytes: Bytes of a body.
        max_s: Seconds from the start of a request to the end of its answer. Until the headers arrive, only the client's own
            timeouts apply; its `read` timeout limits a pause.
    """

    def start(request: httpx.Request) -> None:
        request.extensions["rstar_lab.end"] = time.monotonic() + max_s

    async def start_async(request: httpx.Request) -> None:
        start(request)

    def limit(response: httpx.Response) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerTooLong(f"the answer of {response.url} is compressed")
        response.stream = _Body(response, max_bytes, max_s)

    async def limit_async(response: httpx.Response) -> None:
        limit(response)

    client.headers["Accept-Encoding"] = "identity"
    sync = isinstance(client, httpx.Client)
    client.event_hooks = {"request": [start if sync else start_async], "response": [limit if sync else limit_async]}
    return client
