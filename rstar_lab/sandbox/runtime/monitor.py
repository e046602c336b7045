"""Monitors a running call: whether it has exceeded a limit, whether it waits, and which CPU weight it gets."""

import contextlib
import os
import random
import time

from rstar_lab.sandbox.runtime import procfs
from rstar_lab.sandbox.runtime.cgroup import BOOSTED, NORMAL, PREEMPTED, Group
from rstar_lab.sandbox.runtime.forked_program import Program
from rstar_lab.sandbox.runtime.pressure import CROWD_TASKS, Pressure
from rstar_lab.sandbox.runtime.protocol import Request
from rstar_lab.sandbox.runtime.socket_memory import SocketMemory

# Seconds between checks. The first ones are short, so that a call that sleeps releases its slot soon.
FIRST_TICKS_S = (0.02, 0.03)
TICK_S = 0.05
# A call that has used more CPU seconds may be preempted by shorter ones.
LONG_CPU_S = 0.04
# Preempted calls and calls that wait are checked less often, because there may be many. The interval of a call that waits
# grows with the time it has waited.
BACKGROUND_TICK_S = 0.2
WAITING_TICK_SHARE, WAITING_TICK_MOST_S = 1 / 8, 1.0
# CPU seconds that a preempted call gets in any case: this share of its time limit, but at least BACKGROUND_LEAST_S. Without them, short
# calls could make a program that needs a little more time end as `timeout`. It gets the first BACKGROUND_LEAST_S with a normal weight.
# The rest it gets in the background, while no other process wants the CPU; what is still missing after DEFERRED_S, with a weight again.
BACKGROUND_SHARE, BACKGROUND_LEAST_S = 1 / 8, 0.2
# Seconds after which a preempted call does not wait for them in the background any more.
DEFERRED_S = 4.0
# A call waits if none of its threads runs or is ready to run, and it has used less than this share of one CPU since the
# previous check.
WAITING_CPU_SHARE = 0.5
# Only calls with at most this many processes move to the background: forks of a zygote share kernel locks, which a large tree
# would hold while it gets no CPU.
BACKGROUND_PROCESSES = 8
# A check that comes late counts at most this many planned intervals as sleep.
LATE_TICKS = 2
# Without a control group a call cannot get a higher CPU weight. On a busy machine its wall time grows by the time that it waited
# for a CPU, up to this many time limits, so that an honest call succeeds and an endless loop reaches its time limit.
STARVED_TIMEOUTS = 40
# A check measures at most this many threads of a call; if it has more, a random sample.
MEASURED_TASKS = 64


class CallMonitor:
    """Checks one call periodically.

    The time limit counts seconds on a CPU (all processes together) and seconds in which no thread was ready to run
    (asleep or blocked). Seconds in which a thread was ready but did not get a CPU do not count, up to the slack. A call
    that falls behind gets a higher CPU weight; without a control group it gets more wall time instead. If the slack is used up,
    the outcome is `sandbox_error` if the code of the program is not started yet, or if the call waited for a CPU for at least
    half of the slack because of other work (run delay in schedstat); else `timeout`. The threads of a crowd wait for each other
    and for the CPU limit of the call: a crowd has waited because of other work only while the call used less than a quarter of the
    CPU time that it was allowed.
    """

    def __init__(
        self,
        request: Request,
        running: Program,
        group: Group | None,
        pressure: Pressure | None,
        sockets: SocketMemory | None = None,
    ) -> None:
        self.request = request
        self.sockets = sockets
        self.running = running
        self.pid = running.pid
        self.group = group
        self.pressure = pressure
        self.outputs = running.streams.outputs
        self.start = self._last = time.monotonic()
        self.preempted = self._gave_way = False
        self.waiting = self._light = False
        self._active = self.start
        self.ticks = 0
        self.last_cpu_s = 0.0
        self._checked_cpu_s = 0.0
        self._needed_s = request.timeout_s
        self._idle_s = 0.0
        self._tick_s = 0.0
        self._starved_s = 0.0
        self._granted_s = 0.0
        # Whether the call has been a crowd (pressure.py), and how many CPUs it may use since then.
        self._crowd = False
        self._cpus = 1.0
        self._schedstat: dict[int, tuple[float, float]] = {}
        # Thread -> seconds it waited for a CPU while no other thread of the call ran, and the longest of these times so far.
        self._waited: dict[int, float] = {}
        self._longest_s = 0.0
        self._tasks: list[int] = []
        self._measured: set[int] = set()
        self._base_s = procfs.cpu_s([self.pid]) if request.session and not group else 0.0
        if group:
            group.start_accounting()

    def left_s(self) -> float:
        """Return the seconds until the call is ended in any case."""
        return max(0.0, self.request.timeout_s + self.request.wall_slack_s + self._granted_s - self.wall_s())

    def wall_s(self) -> float:
        return time.monotonic() - self.start

    def next_tick_s(self, check_s: float) -> float:
        """Return the seconds until the next check: at least four times `check_s`, the duration of the last check."""
        tick_s = (
            BACKGROUND_TICK_S if (self.group and self.group.in_background) or self.waiting or self._light else TICK_S
        )
        if self.waiting:
            tick_s = max(tick_s, min(WAITING_TICK_SHARE * (self._last - self._active), WAITING_TICK_MOST_S))
        if self.ticks < len(FIRST_TICKS_S):
            tick_s = FIRST_TICKS_S[self.ticks]
        self._tick_s = min(max(tick_s, 4 * check_s), self.left_s(), max(self._needed_s, FIRST_TICKS_S[0]))
        return self._tick_s

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes of the call; without a control group, the value of the last check."""
        if self.group:
            self.last_cpu_s = self.group.cpu_s()
        return self.last_cpu_s

    def preempt(self) -> None:
        """Lower the priority of this call at the next check, because shorter calls wait."""
        self.preempted = self._gave_way = True

    def resume(self) -> None:
        """Give the call its CPU weight back at the next check, because no call waits any more."""
        self.preempted = False
        if self.group:
            self.group.in_background = False

    def exceeded_limit(self) -> str | None:
        """Check the call; return the outcome if it must be ended now."""
        self.ticks += 1
        request = self.request
        sockets = self.sockets.bytes_by_socket() if self.sockets else {}
        if self.group is None:
            tree = self.running.processes()
            self.last_cpu_s = procfs.cpu_s(tree) - self._base_s
            sockets_mb = sum(sockets.values()) >> 20
            if procfs.exceeds_memory(tree, request.memory_mb - sockets_mb):
                return "memory"
        else:
            if self.pressure and self.group.out_of_memory():
                return self.pressure.outcome_of_kill(self.group)
            tree = self.group.tasks()
            self._limit_crowd(self.group, len(tree))
            if self.pressure and (outcome := self.pressure.exceeded_limit(self.group, len(tree))):
                return outcome
        # While the first process ends, it has sockets but no descriptors any more. All others end with it.
        too_much = self.sockets is not None and self.sockets.exceeds_user_limits(self.running.processes, sockets)
        if too_much and procfs.has_memory(procfs.living_thread(self.pid)):
            return "killed"
        if any(os.fstat(fd).st_size > request.output_bytes for fd in self.outputs):
            return "output_limit"
        others = [task for task in tree if task not in (self.pid, os.getpid())]
        sample = others if len(others) < MEASURED_TASKS else random.sample(others, MEASURED_TASKS - 1)
        self._measure([self.pid, *sample])
        used_s = self.last_cpu_s + self._idle_s
        if used_s >= request.timeout_s:
            return "timeout"
        self._needed_s = request.timeout_s - used_s
        if self.group is None and not self._was_in_background():
            self._granted_s = min(self._starved_s, STARVED_TIMEOUTS * request.timeout_s)
        left_s = self.left_s()
        if left_s <= 0:
            starved = self._starved_s >= request.wall_slack_s / 2 and not self._was_in_background()
            return "sandbox_error" if starved or not self.running.started else "timeout"
        self._adjust_weight(others, self._needed_s, left_s)
        return None

    def _limit_crowd(self, group: Group, tasks: int) -> None:
        """Limit the CPU time of a call with many threads, and keep its supervisor out of its CPU share."""
        crowd = tasks > CROWD_TASKS
        if crowd:
            self._crowd = True
            with contextlib.suppress(OSError):
                group.move_supervisor_out()
        if not self.pressure or tasks <= group.own_processes + 1:
            return
        crowds = self.pressure.crowds
        if self._crowd:
            crowds.mark(os.getpid(), crowd and not self.waiting)
        self._cpus = crowds.cpus_each() if crowd else crowds.call_cpus
        group.limit_cpus(self._cpus)

    def leave_crowd(self) -> None:
        """Lift the limit on the CPU time of a crowd, so that its processes die fast."""
        if self._crowd and self.group and self.pressure:
            self.pressure.crowds.mark(os.getpid(), False)
            self.group.limit_cpus(self.pressure.crowds.call_cpus)

    def _measure(self, tasks: list[int]) -> None:
        """Add the time since the last check to the idle and starved seconds, and update `waiting`."""
        now = time.monotonic()
        elapsed_s, self._last = now - self._last, now
        cpu_s = self.cpu_s() - self._checked_cpu_s
        self._checked_cpu_s = self.last_cpu_s
        states = [procfs.state(task) for task in tasks]
        # Seconds in state D are not charged, because forks of one zygote share kernel locks, which a fork bomb may hold.
        # The seconds of a zombie are not charged either: the supervisor reaps it later.
        # Nor are seconds before the code of the program runs: its isolation waits for locks of the kernel.
        if self.running.started and not {"R", "D"} & set(states) and set(states) - {"Z", ""}:
            # If this check is late, the program may have waited for a CPU before it fell asleep.
            self._idle_s += max(0.0, min(elapsed_s, LATE_TICKS * self._tick_s) - cpu_s)
        self.waiting = "R" not in states and cpu_s < WAITING_CPU_SHARE * elapsed_s
        if not self.waiting:
            self._active = now
        if self._crowd:
            runnable = max(1, sum(state == "R" for state in states))
            self._starved_s += max(0.0, elapsed_s - 4 * cpu_s / min(self._cpus, runnable))
            return
        # Without a control group, the CPU time of processes that start and end between two checks is unknown: the program may
        # have waited for them.
        changed = self.group is None and set(tasks) != self._measured and self.ticks > 1
        self._measured = set(tasks)
        stats = {task: procfs.schedstat(task) for task in tasks}
        # Thread -> seconds since the last check in which it ran, and in which it waited for a CPU.
        times: dict[int, tuple[float, float]] = {}
        for task, stat in stats.items():
            if stat is not None:
                # In a random sample, a thread that was not measured before is counted from the next check on.
                new = (0.0, 0.0) if len(tasks) < MEASURED_TASKS else stat
                before = self._schedstat.get(task, new)
                times[task] = stat[0] - before[0], stat[1] - before[1]
        # /proc/PID/stat counts in steps of 10 ms, which would subtract several milliseconds at each check.
        all_ran_s = cpu_s if self.group or len(tasks) >= MEASURED_TASKS else sum(ran_s for ran_s, _ in times.values())
        # The time in which other threads of the same call ran is subtracted: only waiting for other calls is starvation. The
        # kernel adds the time that a thread waited when it gets a CPU, which can be many checks later. So the sums are compared.
        self._waited = {
            task: self._waited.get(task, self._longest_s) + delayed_s - max(0.0, all_ran_s - ran_s)
            for task, (ran_s, delayed_s) in times.items()
        }
        before_s, self._longest_s = self._longest_s, max([self._longest_s, *self._waited.values()])
        if not changed:
            self._starved_s = min(self._starved_s + self._longest_s - before_s, self.wall_s())
        self._schedstat = {task: stat for task, stat in stats.items() if stat is not None}

    def _was_in_background(self) -> bool:
        """Return whether the call waited for a CPU because it had been preempted by shorter ones."""
        return self._gave_way and self.last_cpu_s > self._guaranteed_s()

    def _guaranteed_s(self) -> float:
        """Return the CPU seconds that a preempted call gets in any case."""
        return max(BACKGROUND_SHARE * self.request.timeout_s, BACKGROUND_LEAST_S)

    def _adjust_weight(self, others: list[int], needed_s: float, left_s: float) -> None:
        """Set the CPU weight of the call, or move it to the background.

        others: its threads except the first. needed_s: time limit that is left. left_s: wall time that is left.
        """
        if self.group is None:
            if self.preempted and self.last_cpu_s > self._guaranteed_s():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self.pid, 19)
            return
        # A tree that forks all the time has other processes at every check, and keeps its weight so that it ends soon.
        stable = len(others) <= 1 or (others == self._tasks and len(self.group.processes()) <= BACKGROUND_PROCESSES)
        self._tasks = others
        gives_way = self.preempted and stable
        if gives_way:
            needed_s = self._guaranteed_s() - self.last_cpu_s
        behind = left_s - needed_s < self.request.wall_slack_s * 3 / 4
        can_wait = self.last_cpu_s > BACKGROUND_LEAST_S and not behind and self.wall_s() < DEFERRED_S
        if gives_way and (needed_s < 0 or can_wait):
            with contextlib.suppress(OSError):
                self.group.enter_background()
                return
        self._needed_s = needed_s
        # A call without a slot that uses CPU time now and then must not take it from calls with a slot.
        self._light = (gives_way and not behind) or (self.waiting and self.last_cpu_s > LONG_CPU_S)
        self.group.in_background = False
        self.group.set_weight(PREEMPTED if self._light else BOOSTED if behind else NORMAL)
