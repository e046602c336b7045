"""A supervisor runs one call at a time: forks the program, watches it, ends all of it, answers.

It is a fork of a zygote, so its own forks start with the zygote's imports. It lives on the trusted side: programs
cannot reach it, and what it reports of time, memory and endings comes from the kernel.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import time

from rstar_lab.sandbox.runtime import kernel, procfs, program
from rstar_lab.sandbox.runtime.cgroup import BOOSTED, Group
from rstar_lab.sandbox.runtime.isolation import Isolation, fork_into
from rstar_lab.sandbox.runtime.monitor import BACKGROUND_TICK_S, LONG_CPU_S, TICK_S, CallMonitor
from rstar_lab.sandbox.runtime.protocol import LONG, READY, YIELD, Channel, Closed, Request

ENDINGS = {
    program.DONE: "ok",
    program.RAISED: "exception",
    program.INVALID: "syntax_error",
    program.NO_MEMORY: "memory",
}
# Processes of a slot's group that are not the program's: the supervisor and the namespace's init.
OWN_PROCESSES = 2
OWN_MEMORY_MB = 16
GRACE_S = 0.5
# What was killed may take so long to die; then its call is answered first.
DEATH_S = 1.0
IDLE_TICK_S = 10.0
IDLE_CPU_S = 1.0


class Streams:
    """The program's standard streams: files in memory, so that nobody has to pump them while it runs."""

    def __init__(self) -> None:
        self.stdin, self.stdout, self.stderr = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
        self.fds = [self.stdin, self.stdout, self.stderr]

    @property
    def outputs(self) -> tuple[int, int]:
        return self.stdout, self.stderr

    def attach(self) -> None:
        """In the program: become its descriptors 0, 1 and 2."""
        for target, fd in enumerate(self.fds):
            os.dup2(fd, target)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Program:
    """A forked program with all it started."""

    def __init__(self, supervisor: "Supervisor", request: Request, code: memoryview, streams: Streams) -> None:
        self.streams = streams
        self.channel, theirs, self.cell = None, None, -1
        self._status: int | None = None
        if request.session:
            self.channel, theirs = socket.socketpair()
            self.cell = os.memfd_create("cell")
        # The program's last sign before the user's code is a byte here; then it lets go of the page for ever.
        self._started = mmap.mmap(-1, mmap.PAGESIZE)
        self.init = kernel.new_pid_namespace() if supervisor.isolation.has("pid_namespace") else 0
        self.pid = fork_into(self.init, supervisor.own_pid_namespace)
        if self.pid == 0:
            try:
                self._become(supervisor, request, code, theirs)
            finally:
                os._exit(70)
        if theirs is not None:
            theirs.close()
        self.pidfd = os.pidfd_open(self.pid)

    def _become(
        self, supervisor: "Supervisor", request: Request, code: memoryview, channel: socket.socket | None
    ) -> None:
        self.streams.attach()
        if channel is not None:
            os.dup2(channel.fileno(), 3)
            os.dup2(self.cell, 4)
        supervisor.isolation.enter(request, supervisor.number, supervisor.scratch, 5 if channel else 3)
        self._started[0] = 1
        self._started.close()
        if channel is not None:
            program.run_session(3, 4, request.value_bytes, supervisor.report)
        else:
            program.run_program(bytes(code), request.seed, request.value_bytes, supervisor.report)

    @property
    def started(self) -> bool:
        return self._started[0] == 1

    def submit(self, request: Request, code: memoryview, stdin: int) -> None:
        """Hand a session its next cell, and the input that came with it."""
        assert self.channel is not None
        for fd in self.streams.fds:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        size = os.fstat(stdin).st_size
        while (at := os.fstat(self.streams.stdin).st_size) < size:
            os.sendfile(self.streams.stdin, stdin, at, size - at)
        os.lseek(self.streams.stdin, 0, os.SEEK_SET)
        seed = "" if request.seed is None else str(request.seed)
        os.ftruncate(self.cell, 0)
        os.pwrite(self.cell, b"%s\n%s" % (seed.encode(), code), 0)
        with contextlib.suppress(OSError):
            self.channel.send(b".")

    def kill(self) -> None:
        """All of it, or where there is no PID namespace its first process."""
        if self.init or self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init or self.pid, signal.SIGKILL)

    def gone(self, within_s: float) -> bool:
        """Is nothing left of what was killed?"""
        deadline = time.monotonic() + within_s
        if not select.select([self.pidfd], [], [], within_s)[0]:
            return False
        self._reap()
        if not self.init:
            return True
        pidfd = os.pidfd_open(self.init)
        try:
            return bool(select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0])
        finally:
            os.close(pidfd)

    def _reap(self) -> int:
        """Wait for the first process, without which the namespace's init does not end; its status."""
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status

    def end(self) -> int:
        """Kill whatever still runs; return the program's wait status."""
        self.kill()
        status = self._reap()
        if self.init:
            os.waitpid(self.init, 0)
        else:
            procfs.end_all(os.getpid())
        os.close(self.pidfd)
        self._started.close()
        if self.channel is not None:
            self.channel.close()
            os.close(self.cell)
        return status


class Supervisor:
    def __init__(self, sock: socket.socket, isolation: Isolation, group: Group | None, number: int) -> None:
        self.channel = Channel(sock)
        self.isolation = isolation
        self.group = group
        self.number = number
        self.report = program.Report()
        self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self.running: Program | None = None
        self.scratch = ""

    def serve(self) -> None:
        """Until the other side is gone."""
        try:
            while True:
                if self.running is not None:
                    self._idle()
                streams = Streams()
                _, request, code = self.channel.receive(streams.stdin)
                if request is not None:
                    answer = self._cell if request.session else self._call
                    answer(request, code, streams)
                if self.running is None or self.running.streams is not streams:
                    streams.close()
        except Closed:
            if self.running is not None:
                self.running.end()
            if self.scratch:
                import shutil

                shutil.rmtree(self.scratch, ignore_errors=True)

    def _call(self, request: Request, code: memoryview, streams: Streams) -> None:
        """One call in a process of its own."""
        self._prepare(request)
        self.running = running = Program(self, request, code, streams)
        self.channel.wipe()
        monitor = CallMonitor(request, running.pid, self.group, streams.outputs)
        outcome_by_limit, _ = self._wait(monitor, running)
        self._finish_call(request, outcome_by_limit, running, monitor)

    def _cell(self, request: Request, code: memoryview, streams: Streams) -> None:
        """One cell of a session; the first starts its interpreter."""
        self._prepare(request)
        if self.running is None:
            self.running = Program(self, request, code, Streams())
        running = self.running
        running.submit(request, code, streams.stdin)
        self.channel.wipe()
        monitor = CallMonitor(request, running.pid, self.group, running.streams.outputs)
        outcome_by_limit, done = self._wait(monitor, running)
        if outcome_by_limit == "timeout":
            # An interrupt keeps the session's state, if the cell lets it through.
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGINT)
            done = self._finished(running, GRACE_S)
        if not done:
            self._finish_call(request, outcome_by_limit, running, monitor)
            running.streams.close()
            return
        ending, value = self.report.read(request.value_bytes)
        outcome = outcome_by_limit or ENDINGS.get(ending, "killed")
        self._send_result(request, outcome, value, running.streams, monitor.wall_s(), monitor.cpu_s(), alive=True)

    def _prepare(self, request: Request) -> None:
        self.report.clear()
        if self.running is None and not self.isolation.has("mount_namespace"):
            self._new_scratch()
        if self.group:
            self.group.limit(request.memory_mb + OWN_MEMORY_MB, request.processes + OWN_PROCESSES)
            self.group.leave_background()

    def _new_scratch(self) -> None:
        """A folder on the host's disk, for programs that cannot have a file system of their own."""
        import shutil

        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch = f"/tmp/rstar-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
        os.mkdir(self.scratch, 0o700)
        if self.isolation.root and self.isolation.has("user_id"):
            os.chown(self.scratch, self.isolation.uid(self.number), -1)

    def _wait(self, monitor: CallMonitor, running: Program) -> tuple[str | None, bool]:
        """Wait until the program or its cell ends, or has to be ended: (outcome_by_limit, the cell is done)."""
        poller = select.poll()
        poller.register(running.pidfd, select.POLLIN)
        poller.register(self.channel, select.POLLIN)
        if running.channel is not None:
            poller.register(running.channel, select.POLLIN)
        reported_long = False
        tick_s = TICK_S
        while True:
            for fd, _ in poller.poll(tick_s * 1000):
                if fd == self.channel.fileno():
                    if self.channel.receive()[0] == YIELD:
                        monitor.preempt()
                elif fd == running.pidfd:
                    return None, False
                else:
                    assert running.channel is not None
                    return None, running.channel.recv(1) == b"."
            looked = time.monotonic()
            outcome_by_limit = monitor.exceeded_limit()
            if outcome_by_limit:
                return outcome_by_limit, False
            if not reported_long and monitor.last_cpu_s > LONG_CPU_S:
                reported_long = True
                self.channel.send_message(LONG)
            # Looking at hundreds of processes takes a while; it must not become the work.
            least_s = BACKGROUND_TICK_S if monitor.in_background else TICK_S
            tick_s = min(max(least_s, 4 * (time.monotonic() - looked)), monitor.left_s())

    def _finished(self, running: Program, within_s: float) -> bool:
        assert running.channel is not None
        return bool(select.select([running.channel], [], [], within_s)[0]) and running.channel.recv(1) == b"."

    def _idle(self) -> None:
        """Wait for the session's next cell; end it where it works on meanwhile."""
        if self.group:
            self.group.start_accounting()
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        while not poller.poll(IDLE_TICK_S * 1000):
            if self.group and self.group.cpu_s() > IDLE_CPU_S:
                raise Closed

    def _finish_call(
        self, request: Request, outcome_by_limit: str | None, running: Program, monitor: CallMonitor
    ) -> None:
        """End the program and answer for it."""
        duration_s, cpu_s = monitor.wall_s(), monitor.cpu_s()
        if self.group:
            # Dying takes processor time too: that of a bomb's processes seconds, in the background.
            self.group.set_weight(BOOSTED)
        if outcome_by_limit:
            running.kill()
        # Hundreds of processes die slowly, and one that waits for a lock which they hold does too.
        dying = outcome_by_limit is not None and not running.gone(DEATH_S)
        if outcome_by_limit and dying:
            self._send_result(request, outcome_by_limit, None, running.streams, duration_s, cpu_s, dying=True)
        outcome, value = self._ending(request, outcome_by_limit, running)
        self.running = None
        if dying:
            self.channel.send_message(READY)
        else:
            self._send_result(request, outcome, value, running.streams, duration_s, cpu_s)

    def _ending(
        self, request: Request, outcome_by_limit: str | None, running: Program
    ) -> tuple[str, memoryview | None]:
        """End the program; its outcome by what the kernel says, and its own word last."""
        started = running.started
        status = running.end()
        # Asked in any case: a kill that nobody asked about would be the next call's.
        out_of_memory = self.group is not None and self.group.out_of_memory()
        ending, value = self.report.read(request.value_bytes)
        if outcome_by_limit:
            return outcome_by_limit, None
        if not started:
            return "sandbox_error", None
        if out_of_memory:
            return "memory", None
        if status == 0 and ending != program.NOTHING:
            return ENDINGS[ending], value
        return "ok" if status == 0 else "killed", None

    def _send_result(
        self,
        request: Request,
        outcome: str,
        value: memoryview | None,
        streams: Streams,
        duration_s: float,
        cpu_s: float,
        *,
        alive: bool = False,
        dying: bool = False,
    ) -> None:
        too_much = max(os.fstat(fd).st_size for fd in streams.outputs) > request.output_bytes
        if too_much and outcome != "sandbox_error":
            outcome = "output_limit"
        value = value if outcome == "ok" else None
        self.channel.send_result(outcome, alive, dying, duration_s, cpu_s, value, streams.outputs, request.output_bytes)


def run_supervisor(
    sock: socket.socket, isolation: Isolation, group: Group | None, background: Group | None, number: int
) -> None:
    """Serve calls on this socket until it closes; `background` takes this process while its program is in the background."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    # No handler: what has none cannot be woken in its sleep (kernel.new_pid_namespace).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if group and background:
        group.join(background)
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWCGROUP)
    # Above its programs, so that a fork bomb cannot keep it from the kill.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    if not isolation.has("pid_namespace"):
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(sock, isolation, group, number).serve()
