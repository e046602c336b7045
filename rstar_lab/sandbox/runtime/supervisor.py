"""A supervisor runs one call at a time: it forks the program, monitors it, ends all its processes and sends the result.

It is a fork of a zygote, so that the programs that it forks start with the zygote's imports. Programs cannot access it. The
times, memory use and exit status that it reports come from the kernel.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time

from rstar_lab.sandbox.runtime import kernel, procfs, program, protocol
from rstar_lab.sandbox.runtime.cgroup import PREEMPTED, Group
from rstar_lab.sandbox.runtime.forked_program import AdoptedProgram, Program, ProgramEnvironment, Streams
from rstar_lab.sandbox.runtime.isolation import Isolation
from rstar_lab.sandbox.runtime.monitor import LONG_CPU_S, CallMonitor
from rstar_lab.sandbox.runtime.pressure import Pressure
from rstar_lab.sandbox.runtime.protocol import Channel, Copy, Request
from rstar_lab.sandbox.runtime.socket_memory import SocketMemory

ENDINGS = {
    program.DONE: "ok",
    program.RAISED: "exception",
    program.INVALID: "syntax_error",
    program.NO_MEMORY: "memory",
}
OWN_MEMORY_MB = 16
# Seconds in which an interrupted cell must stop; otherwise its session is ended.
GRACE_S = 0.5
# If killed processes take longer to die, the result is sent before they are gone.
DEATH_S = 1.0
# Seconds between two checks of an idle session.
IDLE_TICK_S = 10.0
# A session that uses more than this many CPU seconds in the first second after a cell gets a low CPU weight.
FIRST_TICK_S, FIRST_CPU_S = 1.0, 0.1
# Between its cells a session may use this many CPU seconds per interval, and keep this many processes and threads.
IDLE_CPU_S = 1.0
IDLE_TASKS = 64


class Supervisor:
    """Serves the socket `sock`: runs calls, or the cells of one session."""

    def __init__(
        self,
        sock: socket.socket,
        isolation: Isolation,
        group: Group | None,
        pressure: Pressure | None,
        number: int,
        sockets: SocketMemory | None = None,
    ) -> None:
        """sockets: the sockets of its programs, if these have no user id of their own (`exceeds_user_limits`)."""
        self.channel = Channel(sock)
        self.isolation = isolation
        self.group = group
        self.pressure = pressure
        self.number = number
        self.sockets = sockets
        self.report = program.Report()
        self.running: Program | None = None
        self.scratch = ""
        # Descriptors of copies of the session that their supervisors have not taken yet.
        self.offered: list[int] = []
        # PID namespaces of interpreters that have ended, in which copies can live on.
        self.inits: list[int] = []
        # Whether the session was ended between two cells.
        self.session_ended = False

    def serve(self) -> None:
        """Run calls until the socket closes."""
        with contextlib.suppress(ConnectionError):
            while True:
                if self.running is not None and not self.channel.pending:
                    self._wait_between_cells(self.running)
                streams = Streams()
                kind, request, code = self.channel.receive(streams.stdin)
                if request is None:
                    self._manage_copies(kind)
                elif kind == protocol.FORK:
                    self._run_fork(request, code, streams)
                elif kind == protocol.ADOPT:
                    self._adopt(request, code, streams)
                else:
                    run = self._run_cell if request.session else self._run_call
                    run(request, code, streams)
                if self.running is None or self.running.streams is not streams:
                    streams.close()
        if self.running is not None:
            self.running.end()
            self._keep_namespace(self.running)
        for init in self.inits:  # the copies of this session end with the PID namespace
            kernel.kill_child(init)
        if self.scratch:
            import shutil

            shutil.rmtree(self.scratch, ignore_errors=True)

    def _run_call(self, request: Request, code: memoryview, streams: Streams) -> None:
        """Run one call in its own process."""
        self._prepare(request)
        running = self._start(request, code, streams, streams)
        if running is None:
            return
        self.channel.wipe()
        monitor = CallMonitor(request, running, self.group, self.pressure, self.sockets)
        exceeded, _ = self._wait(monitor, running)
        self._finish_call(request, exceeded, running, monitor)

    def _start(self, request: Request, code: memoryview, own: Streams, streams: Streams) -> Program | None:
        """Fork a program with its own streams. If that fails, send the result: its memory limit, or a limit of the host."""
        environment = ProgramEnvironment(self.isolation, self.group, self.report, self.number, self.scratch)
        try:
            self.running = Program(environment, request, code, own)
        except OSError:
            self.channel.wipe()
            out_of_memory = self.group is not None and self.group.limit_was_reached()
            self._send_result(request, "memory" if out_of_memory else "sandbox_error", None, streams, 0.0)
        return self.running

    def _run_cell(self, request: Request, code: memoryview, streams: Streams) -> None:
        """Run one cell of a session; the first one starts the interpreter."""
        if self.session_ended:  # the cell was sent before the message that the session has ended arrived
            self.channel.wipe()
            self._send_result(request, "killed", None, streams, 0.0)
            return
        self._prepare(request)
        if self.running is None:
            session_streams = Streams(sealable=False)
            if self._start(request, code, session_streams, streams) is None:
                session_streams.close()
                return
        assert self.running is not None
        running = self.running
        running.submit(request, code, streams.stdin)
        self.channel.wipe()
        monitor = CallMonitor(request, running, self.group, self.pressure, self.sockets)
        exceeded, done = self._wait(monitor, running)
        if exceeded == "timeout":
            # An interrupt keeps the session's state, unless the cell catches it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGINT)
            done = self._cell_done_within(running, GRACE_S)
        if not done:
            self._finish_call(request, exceeded, running, monitor)
            running.streams.close()
            return
        ending, value = self.report.read(request.value_bytes)
        outcome = exceeded or ENDINGS.get(ending, "killed")
        duration_s = monitor.wall_s()
        monitor.leave_crowd()
        alive = self._usage(running)[1] <= IDLE_TASKS
        if not alive:
            running.end()
            self._keep_namespace(running)
        self._send_result(request, outcome, value, running.streams, duration_s, alive=alive)
        if not alive:
            running.streams.close()

    def _run_fork(self, request: Request, code: memoryview, streams: Streams) -> None:
        """Have the session's interpreter fork copies of itself, and report their descriptors for other supervisors."""
        count = int(bytes(code))
        self.channel.wipe()
        started, copies = time.monotonic(), []
        if self.running is not None:
            self._prepare(request)
            copies = self.running.fork(count, request.timeout_s)
        self.offered += [fd for _, fds in copies for fd in fds]
        text = json.dumps([Copy(pid, os.getpid(), fds) for pid, fds in copies]).encode()
        duration_s = time.monotonic() - started
        self._send_result(request, "ok", memoryview(text), streams, duration_s, alive=True)

    def _adopt(self, request: Request, code: memoryview, streams: Streams) -> None:
        """Become the supervisor of a copy of a session's interpreter."""
        copy = Copy(*json.loads(bytes(code)))
        self.channel.wipe()
        self._prepare(request)
        try:
            self.running = running = AdoptedProgram(copy, self.group)
        except OSError:
            self._send_result(request, "sandbox_error", None, streams, 0.0)
            return
        self.report = running.report
        self._send_result(request, "ok", None, streams, 0.0, alive=True)

    def _manage_copies(self, kind: bytes) -> None:
        """Handle the messages that follow a fork."""
        if kind == protocol.RELEASE:
            for fd in self.offered:
                os.close(fd)
            self.offered.clear()
        elif kind == protocol.END and self.running is not None:
            self._end_session(self.running)

    def _wait_between_cells(self, running: Program) -> None:
        """Wait for the session's next message.

        End the session if it uses CPU time, keeps many processes, or uses much memory or many processes while the sandbox is
        short of them.
        """
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        cpu_s, tasks = self._usage(running)
        too_much = tasks > IDLE_TASKS
        tick_s = FIRST_TICK_S
        while not too_much and not poller.poll(tick_s * 1000):
            before_s = cpu_s
            cpu_s, tasks = self._usage(running)
            if self.group and tick_s == FIRST_TICK_S and cpu_s - before_s > FIRST_CPU_S:
                self.group.set_weight(PREEMPTED)
            tick_s = IDLE_TICK_S
            too_much = cpu_s - before_s > IDLE_CPU_S or tasks > IDLE_TASKS
            if self.group and self.pressure and self.pressure.exceeded_limit(self.group, tasks):
                too_much = True
        if too_much:
            self._end_session(running)
            self.session_ended = True
            self.channel.send_message(protocol.ENDED)

    def _usage(self, running: Program) -> tuple[float, int]:
        """Return the CPU seconds so far and the number of processes and threads of a session."""
        if self.group:
            return self.group.cpu_s(), len(self.group.tasks()) - self.group.own_processes
        tree = running.processes()
        return procfs.cpu_s(tree), sum(procfs.threads(pid) for pid in tree)

    def _end_session(self, running: Program) -> None:
        running.end()
        running.streams.close()
        self._keep_namespace(running)

    def _keep_namespace(self, ended: Program) -> None:
        """Forget an interpreter that has ended, but keep its PID namespace if copies of it can live on."""
        self.running = None
        if ended.has_copies and ended.init:
            self.inits.append(ended.init)

    def _prepare(self, request: Request) -> None:
        self.report.clear()
        if self.running is None and self.sockets:
            self.sockets.ignore_present()
        if self.running is None and not self.isolation.has("mount_namespace"):
            self.scratch = self.isolation.new_scratch(self.number, self.scratch)
        if self.group:
            memory_mb = request.memory_mb + OWN_MEMORY_MB
            if self.pressure:
                memory_mb = int(min(memory_mb, self.pressure.most_mb()))
            self.group.limit(memory_mb, request.processes + self.group.own_processes)
            self.group.leave_background()
            if self.pressure:
                self.group.limit_cpus(self.pressure.crowds.first_cpus)

    def _wait(self, monitor: CallMonitor, running: Program) -> tuple[str | None, bool]:
        """Wait until the program or its cell ends, or exceeds a limit.

        Returns the outcome if a limit was exceeded, and whether the cell is done.
        """
        poller = select.poll()
        poller.register(running.pidfd, select.POLLIN)
        poller.register(self.channel, select.POLLIN)
        if running.channel is not None:
            poller.register(running.channel, select.POLLIN)
        reported_long = reported_waiting = False
        tick_s = monitor.next_tick_s(0.0)
        checked = time.monotonic()
        while True:
            # A program that sends many messages does not postpone the next check.
            wait_s = max(0.0, checked + tick_s - time.monotonic())
            for fd, _ in poller.poll(wait_s * 1000):
                if fd == self.channel.fileno():
                    kind = self.channel.receive()[0]
                    if kind == protocol.YIELD:
                        monitor.preempt()
                    elif kind == protocol.RESUME:
                        monitor.resume()
                elif fd == running.pidfd:
                    return None, False
                elif (done := running.cell_done()) is not None:
                    return None, done
            if time.monotonic() < checked + tick_s and not monitor.preempted:
                continue
            before = time.monotonic()
            if monitor.request.stream:
                self._send_new_output(monitor.request, running.streams)
            exceeded = monitor.exceeded_limit()
            if exceeded:
                return exceeded, False
            if not reported_long and monitor.last_cpu_s > LONG_CPU_S:
                reported_long = True
                self.channel.send_message(protocol.LONG)
            if monitor.waiting != reported_waiting:
                reported_waiting = monitor.waiting
                self.channel.send_message(protocol.WAITING if reported_waiting else protocol.ACTIVE)
            checked = time.monotonic()
            tick_s = monitor.next_tick_s(checked - before)

    def _cell_done_within(self, running: Program, within_s: float) -> bool:
        assert running.channel is not None
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([running.channel], [], [], left_s)[0]:
                return False
            if (done := running.cell_done()) is not None:
                return done
        return False

    def _finish_call(self, request: Request, exceeded: str | None, running: Program, monitor: CallMonitor) -> None:
        """End the program and send its result."""
        if exceeded:
            # Sent first, so that the outcome is known even if it takes too long to end the processes.
            self.channel.send_message(protocol.EXCEEDED, bytes([protocol.OUTCOMES.index(exceeded)]))
        duration_s = monitor.wall_s()
        # Killed before the limit on the CPU time of a crowd is lifted: its threads could otherwise get all CPU time.
        running.kill()
        monitor.leave_crowd()
        if self.group:
            # Processes need CPU time to die; in the background, those of a fork bomb would need seconds.
            self.group.boost_ending(killed=bool(exceeded))
        # Hundreds of processes die slowly, and so does a process that waits for a lock that they hold.
        dying = exceeded is not None and not running.gone(DEATH_S)
        if exceeded and dying:
            self._send_result(request, exceeded, None, running.streams, duration_s, dying=True)
        outcome, value = self._ending(request, exceeded, running)
        self._keep_namespace(running)
        if dying:
            self.channel.send_message(protocol.READY)
        else:
            self._send_result(request, outcome, value, running.streams, duration_s)

    def _ending(self, request: Request, exceeded: str | None, running: Program) -> tuple[str, memoryview | None]:
        """End the program; return its outcome and value. The kernel's information overrides the program's report."""
        started = running.started
        status = running.end()
        # Always read, because the count would otherwise be attributed to the next call.
        out_of_memory = ""
        if self.group and self.pressure and self.group.out_of_memory():
            out_of_memory = self.pressure.outcome_of_kill(self.group)
        ending, value = self.report.read(request.value_bytes)
        if exceeded:
            return exceeded, None
        if out_of_memory:
            return out_of_memory, None
        if not started:
            return "sandbox_error", None
        if status == 0 and ending != program.NOTHING:
            return ENDINGS[ending], value
        return "ok" if status == 0 else "killed", None

    def _send_new_output(self, request: Request, streams: Streams) -> None:
        for part in streams.new_output(request.output_bytes):
            self.channel.send_message(protocol.OUTPUT, part)

    def _send_result(
        self,
        request: Request,
        outcome: str,
        value: memoryview | None,
        streams: Streams,
        duration_s: float,
        *,
        alive: bool = False,
        dying: bool = False,
    ) -> None:
        if request.stream:
            self._send_new_output(request, streams)
        too_much = max(os.fstat(fd).st_size for fd in streams.outputs) > request.output_bytes
        if too_much and outcome != "sandbox_error":
            outcome = "output_limit"
        value = value if outcome == "ok" else None
        self.channel.send_result(outcome, alive, dying, duration_s, value, streams.outputs, request.output_bytes)


def run_supervisor(
    sock: socket.socket,
    isolation: Isolation,
    group: Group | None,
    supervisors: Group | None,
    pressure: Pressure | None,
    number: int,
) -> None:
    """Turn this process, a fork of a zygote, into a supervisor; return when its socket closes.

    supervisors: group shared by all supervisors (`Group.join`). pressure: usage of the whole sandbox.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    # No signal handlers: they would end the sleep of an init (kernel.new_pid_namespace).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if pressure:
        pressure.crowds.hide_from_children()
    if group and supervisors:
        group.join(supervisors)
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWCGROUP)
    sockets = None
    if isolation.has("network_namespace"):
        # Concurrent calls must not see each other's sockets in /proc/net/unix. If this fails, they share the zygote's namespace.
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWNET)
            sockets = None if isolation.has("user_id") else SocketMemory()
    # The OOM killer kills the program, never the supervisor. Requires CAP_SYS_RESOURCE, which containers and users lack.
    with contextlib.suppress(OSError):
        kernel.write_file("/proc/self/oom_score_adj", b"-1000")
    # Higher priority than programs, so that a fork bomb cannot delay its own end.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    if not isolation.has("pid_namespace"):
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(sock, isolation, group, pressure, number, sockets).serve()
