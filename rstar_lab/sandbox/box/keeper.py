"""A keeper runs one call at a time: forks the program, watches it, ends all of it, answers.

It is a fork of a zygote, so its own forks start with the zygote's imports. It lives on the trusted side: programs
cannot reach it, and what it reports of time, memory and endings comes from the kernel.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

from rstar_lab.sandbox.box import kernel, program
from rstar_lab.sandbox.box.frames import (
    CALL,
    HEAD,
    LONG,
    YIELD,
    Request,
    Result,
    pack_result,
    unpack_request,
)

TICK_S = 0.05
LONG_CPU_S = 0.1
ENDINGS = {
    program.DONE: "ok",
    program.RAISED: "exception",
    program.INVALID: "syntax_error",
    program.NO_MEMORY: "memory",
}


class Keeper:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.report = program.Report()
        self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def serve(self) -> None:
        while True:
            kind, body = self._receive()
            if kind == CALL:
                self.sock.sendall(pack_result(self.run(unpack_request(body))))

    def _receive(self) -> tuple[bytes, bytes]:
        size, kind = HEAD.unpack(self._read(HEAD.size))
        return kind, self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def run(self, request: Request) -> Result:
        self.report.clear()
        streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        if request.stdin:
            os.write(streams[0], request.stdin)
            os.lseek(streams[0], 0, os.SEEK_SET)
        start = time.monotonic()
        init = kernel.new_pid_namespace()
        namespace = os.pidfd_open(init)
        kernel.setns(namespace, kernel.CLONE_NEWPID)
        os.close(namespace)
        pid = os.fork()
        if pid == 0:
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            kernel.close_from(3)
            program.run_program(request.code, request.seed, request.value_bytes, self.report)
        kernel.setns(self.own_pid_namespace, kernel.CLONE_NEWPID)
        verdict = self._watch(request, pid, streams, start)
        os.kill(init, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        os.waitpid(init, 0)
        duration_s = time.monotonic() - start
        ending, value = self.report.read(request.value_bytes + 64)
        if verdict is None:
            verdict = self._ending(status, ending)
        if any(os.fstat(fd).st_size > request.output_bytes for fd in streams[1:]):
            verdict = "output_limit"
        stdout, stderr = (_head(fd, request.output_bytes) for fd in streams[1:])
        for fd in streams:
            os.close(fd)
        return Result(
            verdict,
            False,
            duration_s,
            usage.ru_utime + usage.ru_stime,
            stdout,
            stderr,
            value if verdict == "ok" else None,
        )

    def _ending(self, status: int, ending: int) -> str:
        if ending != program.NOTHING and status == 0:
            return ENDINGS[ending]
        return "ok" if status == 0 else "killed"

    def _watch(self, request: Request, pid: int, streams: list[int], start: float) -> str | None:
        """Wait for the program's end; name the reason where we end it."""
        pidfd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(self.sock, select.POLLIN)
        told = False
        try:
            while True:
                for fd, _ in poller.poll(TICK_S * 1000):
                    if fd == pidfd:
                        return None
                    kind, _body = self._receive()
                    assert kind == YIELD
                wall = time.monotonic() - start
                if wall >= request.timeout_s:
                    return "timeout"
                if any(os.fstat(fd).st_size > request.output_bytes for fd in streams[1:]):
                    return "output_limit"
                if not told and wall > LONG_CPU_S:
                    told = True
                    self.sock.sendall(HEAD.pack(0, LONG))
        finally:
            os.close(pidfd)


def _head(fd: int, most: int) -> bytes:
    size = os.fstat(fd).st_size
    data = os.pread(fd, min(size, most), 0) if size else b""
    return data + b"\n[output cut at %d bytes]\n" % most if size > most else data


def keep(sock: socket.socket) -> None:
    """Serve calls on this socket until it closes; never return."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Keeper(sock).serve()
    except BaseException:
        with contextlib.suppress(BaseException):
            import traceback

            traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)
