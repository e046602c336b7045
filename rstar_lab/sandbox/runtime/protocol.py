"""Messages between the embedding program and supervisors over a socket pair: a length, a kind, and a body of fixed layout.

To a supervisor:
CALL     a request
YIELD    preempt the call
RESUME   no call waits any more: the preempted call gets its CPU weight back
FORK     fork the interpreter of the session; layout of CALL, with the number of copies as code
ADOPT    become the supervisor of a copy; layout of CALL, with a Copy as code
RELEASE  the copies are adopted
END      end the interpreter, but not its copies

From a supervisor:
LONG            the call has used LONG_CPU_S
WAITING, ACTIVE the call sleeps or is blocked; it runs again
OUTPUT          new output of a streamed call; one byte: 1 stdout, 2 stderr; then the bytes
EXCEEDED        the call has exceeded a limit; one byte: its outcome
RESULT          the result of the call
READY           killed processes are gone; from a gVisor container also: the imports are done
ENDED           the session was ended between two cells
REFUSED         sent by a zygote: it starts no supervisor for a session, because the sandbox is short of memory or processes

Nothing is unpickled on either side. A supervisor keeps no copy of what programs read and wrote, because the next program is
a fork of it: it receives into one buffer, wipes it, and sends output directly from the file that the program wrote.
"""

import os
import socket
import struct
from typing import NamedTuple

HEAD = struct.Struct("=Ic")
CALL, YIELD, RESUME = b"c", b"y", b"g"
FORK, ADOPT, RELEASE, END = b"k", b"o", b"e", b"x"
LONG, WAITING, ACTIVE, RESULT, READY = b"l", b"w", b"a", b"r", b"d"
REFUSED, ENDED, EXCEEDED, OUTPUT = b"f", b"n", b"t", b"u"
_REQUEST = struct.Struct("=?q??ddIIIIIIII")
# Position in OUTCOMES; whether the session's interpreter still runs; whether killed processes are not gone yet (READY follows when
# they are); whether there is a value; whether stdout, and stderr, are cut; seconds; sizes of value, stdout and stderr, which follow.
RESULT_HEAD = struct.Struct("=B?????dIII")
_BUFFER = 1 << 16

# The outcomes that a supervisor can report; sent as positions in this tuple.
OUTCOMES = ("ok", "syntax_error", "exception", "timeout", "memory", "output_limit", "killed", "sandbox_error")
# Sent to a zygote instead of the number of a supervisor: it sends a byte back.
PING = 0
# Flags in the number of a supervisor: a requested one is for a session; of a running one, the program is killed.
FOR_SESSION, KILL_PROGRAM = 1 << 31, 1 << 30


class Request(NamedTuple):
    """The limits of one call. stream: send output while the call runs."""

    seed: int | None
    session: bool
    stream: bool
    timeout_s: float
    wall_slack_s: float
    memory_mb: int
    processes: int
    open_files: int
    file_mb: int
    output_bytes: int
    value_bytes: int


class Copy(NamedTuple):
    """A copy of a session's interpreter that waits for its supervisor.

    pid: process id of the copy. holder: process id of the supervisor that holds its descriptors. fds: their numbers: channel,
    cell, stdin, stdout, stderr, report, pidfd of the copy.
    """

    pid: int
    holder: int
    fds: list[int]


def pack_request(request: Request, code: bytes, stdin: bytes, kind: bytes = CALL) -> bytes:
    fields = _REQUEST.pack(request.seed is not None, request.seed or 0, *request[1:], len(code), len(stdin))
    return b"".join((HEAD.pack(len(fields) + len(code) + len(stdin), kind), fields, code, stdin))


def unpack_limits(message: bytes) -> Request:
    """Return the limits of a packed request."""
    seeded, seed, *rest = _REQUEST.unpack_from(message, HEAD.size)[:-2]
    return Request(seed if seeded else None, *rest)


class Channel:
    """A supervisor's end of the socket. Methods raise ConnectionError if the other end is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray(_BUFFER)
        self._used = 0
        self._code = memoryview(b"")

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether a part of the next message is already in the buffer."""
        return self._used > 0

    def receive(self, stdin: int | None = None) -> tuple[bytes, Request | None, memoryview]:
        """Return the next message: its kind and, if it has a body, the limits and the code.

        The input is written to the file `stdin`. The code is valid until `wipe`.
        """
        self._fill(HEAD.size)
        size, kind = HEAD.unpack_from(self._buffer)
        if kind not in (CALL, FORK, ADOPT) or stdin is None:
            self._shift(HEAD.size)
            return kind, None, memoryview(b"")
        start = HEAD.size + _REQUEST.size
        self._fill(start)
        seeded, seed, *rest, code_size, stdin_size = _REQUEST.unpack_from(self._buffer, HEAD.size)
        if start + code_size > len(self._buffer):
            self._buffer += bytes(start + code_size - len(self._buffer))
        self._fill(start + code_size)
        self._code = memoryview(self._buffer)[start : start + code_size]
        self._save(stdin, start + code_size, stdin_size)
        assert size == _REQUEST.size + code_size + stdin_size
        return kind, Request(seed if seeded else None, *rest), self._code

    def _fill(self, least: int) -> None:
        while self._used < least:
            self._used += self._receive_into(memoryview(self._buffer)[self._used :])

    def _receive_into(self, buffer: memoryview) -> int:
        got = self.sock.recv_into(buffer)
        if not got:
            raise ConnectionResetError
        return got

    def _shift(self, size: int) -> None:
        rest = self._buffer[size : self._used]
        self._buffer[: len(rest)] = rest
        self._used = len(rest)

    def _save(self, stdin: int, start: int, size: int) -> None:
        """Write the call's input to its file. Only YIELD and RESUME can follow before the result is sent."""
        part = memoryview(self._buffer)[start : min(self._used, start + size)]
        remaining = size - len(part)
        if part:
            os.write(stdin, part)
        if remaining:
            chunk = bytearray(1 << 20)
            while remaining:
                got = self._receive_into(memoryview(chunk)[:remaining])
                os.write(stdin, memoryview(chunk)[:got])
                remaining -= got
            chunk[:] = bytes(len(chunk))
        if size:
            os.lseek(stdin, 0, os.SEEK_SET)

    def wipe(self) -> None:
        """Overwrite the received request. Its code must have been copied before."""
        self._code.release()
        if len(self._buffer) > _BUFFER:
            self._buffer = bytearray(_BUFFER)
        else:
            self._buffer[: self._used] = bytes(self._used)
        self._used = 0

    def send_message(self, kind: bytes, body: bytes = b"") -> None:
        self._send(HEAD.pack(len(body), kind) + body)

    def send_result(
        self,
        outcome: str,
        alive: bool,
        dying: bool,
        duration_s: float,
        value: memoryview | None,
        outputs: tuple[int, int],
        max_bytes: int,
    ) -> None:
        """Send a result with the content of the two output files, at most `max_bytes` of each."""
        sizes = [os.fstat(fd).st_size for fd in outputs]
        kept = [min(size, max_bytes) for size in sizes]
        body = memoryview(b"") if value is None else value
        fields = RESULT_HEAD.pack(
            OUTCOMES.index(outcome),
            alive,
            dying,
            value is not None,
            sizes[0] > max_bytes,
            sizes[1] > max_bytes,
            duration_s,
            len(body),
            *kept,
        )
        total = RESULT_HEAD.size + len(body) + sum(kept)
        self._send(HEAD.pack(total, RESULT) + fields, body)
        for fd, size in zip(outputs, kept, strict=True):
            at = 0
            while at < size:
                sent = os.sendfile(self.sock.fileno(), fd, at, size - at)
                if not sent:
                    # The file can shrink while it is read if the program's processes live on, as in a session.
                    self._send(bytes(size - at))
                    break
                at += sent

    def _send(self, data: bytes, more: memoryview | bytes = b"") -> None:
        sent = self.sock.sendmsg([data, more])
        for part in (data, more):
            if sent < len(part):
                self.sock.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))
