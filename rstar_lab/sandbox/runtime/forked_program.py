"""A supervisor's view of a forked program: its standard streams, its processes, and the channel of a session."""

import contextlib
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from rstar_lab.sandbox.runtime import kernel, procfs, program, rootfs
from rstar_lab.sandbox.runtime.cgroup import KILL_S, Group
from rstar_lab.sandbox.runtime.isolation import Isolation
from rstar_lab.sandbox.runtime.protocol import Copy, Request

# struct ucred: process id, user id, group id.
_CREDENTIALS = struct.Struct("=iII")
# Linux 6.5 or later: the kernel adds a pidfd of the sender to messages.
_SO_PASSPIDFD, _SCM_PIDFD = 76, 4


class Streams:
    """The program's standard streams as files in memory, so that no process has to copy output while the program runs."""

    def __init__(self, fds: list[int] | None = None, *, sealable: bool = True) -> None:
        """fds: existing files for stdin, stdout and stderr. sealable: allow seals on the outputs.

        False for a session, whose code could otherwise seal the files, which its next cell uses again.
        """
        if fds is None:
            flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealable else 0)
            fds = [os.memfd_create("stdin"), os.memfd_create("stdout", flags), os.memfd_create("stderr", flags)]
        self.fds = fds
        self.stdin, self.stdout, self.stderr = fds
        # Bytes of stdout and stderr that `new_output` has returned.
        self._returned = [0, 0]

    @property
    def outputs(self) -> tuple[int, int]:
        return self.stdout, self.stderr

    def new_output(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the output since the previous call, as messages: one byte (1: stdout, 2: stderr), then at most 64 KiB of output.

        max_bytes: bytes of each stream that are returned in all calls.
        """
        for number, fd in enumerate(self.outputs):
            at = self._returned[number]
            while data := os.pread(fd, min(1 << 16, max_bytes - at), at):
                at += len(data)
                yield bytes([number + 1]) + data
            self._returned[number] = at

    def forbid_truncation(self) -> None:
        """Make `> /dev/stdout` fail where it would delete earlier output."""
        for fd in self.outputs:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def rewind(self, stdin: int) -> None:
        """Prepare for the next cell of a session: empty the outputs and copy the file `stdin` to the input."""
        self._returned = [0, 0]
        for fd in self.fds:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        # Do not loop until the copy has the size of the original: a thread of the session can truncate it again and again.
        size, at = os.fstat(stdin).st_size, 0
        while at < size and (sent := os.sendfile(self.stdin, stdin, at, size - at)):
            at += sent

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class ProgramEnvironment(NamedTuple):
    """What a supervisor provides to its programs.

    number: the supervisor's number, which determines the user id. scratch: writable folder on the host, used if there is no mount
    namespace.
    """

    isolation: Isolation
    group: Group | None
    report: program.Report
    number: int
    scratch: str


class Program:
    """A forked program with all processes that it starts. Raises OSError if it cannot be forked."""

    def __init__(self, environment: ProgramEnvironment, request: Request, code: memoryview, streams: Streams) -> None:
        self.streams = streams
        self.report = environment.report
        self.group = environment.group
        # Whether copies of this interpreter can be in its PID namespace. Its init must then not be killed.
        self.has_copies = False
        self.channel: socket.socket | None = None
        self.cell = -1
        self._status: int | None = None
        self._secret = b""
        theirs: socket.socket | None = None
        if request.session:
            self.channel, theirs = socket.socketpair()
            # A session that does not read must not block the supervisor.
            self.channel.setblocking(False)
            self.cell = os.memfd_create("cell")
        else:
            streams.forbid_truncation()
        # The program sets a byte in this page before it runs user code, and unmaps the page.
        self._started = mmap.mmap(-1, mmap.PAGESIZE)
        # Before the fork, because a program has to copy every page that it writes to.
        program.reseed(None if request.session else request.seed)
        program.new_main()
        streams_again = program.reopen(*streams.fds)
        isolation, group = environment.isolation, environment.group
        descriptors = [*streams_again, *((theirs.fileno(), self.cell) if theirs else ())]
        steps: list[kernel.Step] = [
            *(group.entering() if group else ()),
            # Leave the supervisor's process group, because kill(0) signals all of it, across PID namespaces. Join that of init,
            # because the leader of a group cannot call setsid.
            ("other", os.setpgid, (0, int(isolation.has("pid_namespace")))),
            *(("other", os.dup2, (fd, number)) for number, fd in enumerate(descriptors)),
            *isolation.steps(request, environment.number, environment.scratch, len(descriptors)),
        ]
        self.init, self.pid = 0, -1
        try:
            self.init, self.pid = isolation.fork()
            if self.pid == 0:
                self._become(steps, request, code, environment.scratch or rootfs.SCRATCH)
        finally:
            for fd in streams_again:
                os.close(fd)
            if theirs is not None:
                theirs.close()
            if self.pid < 0:
                self._close()
        self.pidfd = kernel.end_descriptor(self.pid)

    def _become(self, steps: list[kernel.Step], request: Request, code: memoryview, folder: str) -> NoReturn:
        try:
            kernel.run_steps(steps)
            self._started[0] = 1
            self._started.close()
            if request.session:
                program.run_session(3, 4, request.value_bytes, self.report)
            else:
                program.run_program(bytes(code), f"{folder}/{program.FILENAME}", request.value_bytes, self.report)
        finally:
            os._exit(70)

    @property
    def started(self) -> bool:
        """Whether the program has reached user code. False means that isolating it failed."""
        return self._started[0] == 1

    def processes(self) -> list[int]:
        """Return the ids of its processes. Used if there is no control group that lists them.

        Orphans are children of the namespace's init, or of this supervisor. A program with copies shares the init with them,
        so its orphans are missing from the list.
        """
        if self.has_copies:
            return [self.pid, *procfs.descendants(self.pid)]
        return [pid for pid in procfs.descendants(os.getpid()) if pid != self.init]

    def submit(self, request: Request, code: memoryview, stdin: int) -> None:
        """Send a session its next cell, and the input of the cell."""
        assert self.channel is not None
        self.streams.rewind(stdin)
        seed = "" if request.seed is None else str(request.seed)
        os.ftruncate(self.cell, 0)
        os.pwrite(self.cell, b"%s\n%s" % (seed.encode(), code), 0)
        # Discard answers that arrived before this cell.
        with contextlib.suppress(OSError):
            while self.channel.recv(4096):
                pass
        self._secret = self.report.challenge()
        with contextlib.suppress(OSError):
            self.channel.send(b".")

    def cell_done(self) -> bool | None:
        """Read the session's channel. Returns True if this cell is done, False if the interpreter has closed the channel.

        Returns None for a message that does not answer this cell, because any code of the session can write to the channel.
        """
        assert self.channel is not None
        with contextlib.suppress(BlockingIOError):
            if not self.channel.recv(4096):
                return False
            return True if self.report.answered(self._secret) else None
        return None

    def fork(self, count: int, within_s: float) -> list[tuple[int, list[int]]]:
        """Have a session's interpreter fork itself; return (process id, descriptors) of each copy.

        Fewer copies than `count` mean that a limit was reached or that the interpreter did not answer within `within_s`.
        """
        assert self.channel is not None
        self.has_copies = True
        deadline = time.monotonic() + within_s
        copies = []
        for first in range(0, count, program.COPIES_PER_MESSAGE):
            files = [_CopyFiles() for _ in range(min(program.COPIES_PER_MESSAGE, count - first))]
            with contextlib.suppress(OSError):  # then no copy arrives
                socket.send_fds(self.channel, [b"f"], [fd for file in files for fd in file.theirs])
            for file in files:
                pid = file.wait(deadline)
                if pid:
                    copies.append((pid, file.ours))
        return copies

    def kill(self) -> None:
        """Kill all its processes, or only the first one if there is no PID namespace."""
        if self.has_copies:
            self._kill_group()
        elif self.init or self._status is None:
            procfs.kill(self.init or self.pid)

    def gone(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds; return whether all killed processes have ended."""
        deadline = time.monotonic() + within_s
        if not select.select([self.pidfd], [], [], within_s)[0]:
            return False
        self._reap()
        if not self.init or self.has_copies:
            return True
        pidfd = os.pidfd_open(self.init)
        try:
            return bool(select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0])
        finally:
            os.close(pidfd)

    def _reap(self) -> int:
        """Wait for the first process and return its wait status. The namespace's init cannot end before this."""
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status

    def end(self) -> int:
        """Kill all processes that still run; return the program's wait status."""
        self.kill()
        status = self._reap()
        if self.has_copies:
            pass
        elif self.init:
            os.waitpid(self.init, 0)
        else:
            procfs.end_all()
        procfs.reap()
        os.close(self.pidfd)
        self._close()
        return status

    def _kill_group(self) -> None:
        """Kill the processes of this session but not those of its copies, which are in the same PID namespace."""
        if self.group:
            self.group.kill({os.getpid(), self.init})
            return
        for pid in self.processes():
            procfs.kill(pid)

    def _close(self) -> None:
        self._started.close()
        if self.channel is not None:
            self.channel.close()
            os.close(self.cell)


class AdoptedProgram(Program):
    """A copy of a session's interpreter, which another interpreter has forked. Raises OSError if it has ended."""

    def __init__(self, copy: Copy, group: Group | None) -> None:
        holder = os.pidfd_open(copy.holder)
        try:
            channel, self.cell, *streams, report, self.pidfd = [kernel.pidfd_getfd(holder, fd) for fd in copy.fds]
        finally:
            os.close(holder)
        # The process id is valid only until the copy ends; after that, another process can have it.
        if select.select([self.pidfd], [], [], 0)[0]:
            raise ProcessLookupError
        self.channel = socket.socket(fileno=channel)
        self.channel.setblocking(False)
        self.streams = Streams(streams)
        self.report = program.Report(report)
        os.close(report)
        self.group = group
        self.has_copies = True
        self.init, self.pid = 0, copy.pid
        self._started = mmap.mmap(-1, mmap.PAGESIZE)
        self._started[0] = 1
        self._status = None
        self._secret = b""
        if group:
            group.add(copy.pid)

    def _reap(self) -> int:
        """Wait for the end of the process. Returns SIGKILL, because only the init of its namespace receives its status."""
        select.select([self.pidfd], [], [], KILL_S)
        return signal.SIGKILL


class _CopyFiles:
    """The descriptors of a copy that is being forked."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        # The kernel adds the process id of the sender to its messages, as seen in this process's namespace.
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(OSError):
            self._ours.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)
        report = os.memfd_create("report", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(report, program.REPORT_BYTES)
        # The supervisor maps this file: if it became smaller, the supervisor would end with SIGBUS.
        fcntl.fcntl(report, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        files = [os.memfd_create("cell"), *Streams(sealable=False).fds, report]
        self.theirs = [self._theirs.fileno(), *files]
        self.ours = [self._ours.fileno(), *files]

    def wait(self, deadline: float) -> int:
        """Wait for the copy and return its process id. If it is not ready in time, close `ours` and return 0."""
        self._theirs.close()
        ready = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]
        if ready:
            message, ancillary, _, _ = self._ours.recvmsg(
                1, socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)
            )
            received = {kind: data for _, kind, data in ancillary}
            pid = _CREDENTIALS.unpack(received[socket.SCM_CREDENTIALS])[0] if message else 0
            with contextlib.suppress(OSError):
                pidfd = int.from_bytes(received[_SCM_PIDFD], sys.byteorder) if _SCM_PIDFD in received else -1
                if message and pidfd < 0:
                    pidfd = os.pidfd_open(pid)
                if message == b"r":
                    self._ours.detach()
                    self.ours.append(pidfd)
                    return pid
                if pidfd >= 0:
                    os.close(pidfd)
        self._ours.close()
        for fd in self.ours[1:]:
            os.close(fd)
        return 0
