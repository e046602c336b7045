"""The verdict on a running call: has it used up what it may?"""

import contextlib
import os
import time

from rstar_lab.sandbox.runtime import procfs
from rstar_lab.sandbox.runtime.cgroup import BOOSTED, NORMAL, PREEMPTED, Group
from rstar_lab.sandbox.runtime.protocol import Request

TICK_S = 0.05
# A call longer than this may be asked to make room for shorter ones. Less than a tick, so that the first look can tell.
LONG_CPU_S = 0.04
# Of a call in the background there is little to see, and many may be there.
BACKGROUND_TICK_S = 0.2
# One that made room is moved to the background after this share of its limit, where that is not less than so many seconds.
BACKGROUND_SHARE, BACKGROUND_LEAST_S = 1 / 20, 0.2


class CallMonitor:
    """Judges one call at every tick.

    The limit is on the seconds the program had: on a processor, or asleep and blocked with all it started. Seconds in
    which it was ready to run and others had the processor, or a lock of the kernel, do not count, up to the slack; a call
    that falls behind gets more weight, and one that still has not had its time when the slack is gone was starved by us.
    """

    def __init__(self, request: Request, pid: int, group: Group | None, outputs: tuple[int, int]) -> None:
        self.request = request
        self.pid = pid
        self.group = group
        self.outputs = outputs
        self.start = self._last = time.monotonic()
        self.yielded = False
        self.last_cpu_s = 0.0
        self._idle_s = 0.0
        self._base_s = procfs.usage([pid])[0] if request.session and not group else 0.0
        if group:
            group.start_accounting()

    @property
    def in_background(self) -> bool:
        return self.group is not None and self.group.in_background

    def left_s(self) -> float:
        """Until it is ended, whatever it had."""
        return max(0.0, self.request.timeout_s + self.request.wall_slack_s - self.wall_s())

    def wall_s(self) -> float:
        return time.monotonic() - self.start

    def cpu_s(self) -> float:
        """Processor seconds of all processes of the call; without a group those of the last look."""
        if self.group:
            self.last_cpu_s = self.group.cpu_s()
        return self.last_cpu_s

    def preempt(self) -> None:
        """Shorter calls wait: this one no longer counts among the workers."""
        self.yielded = True

    def exceeded_limit(self) -> str | None:
        """The outcome, where the call has to be ended now."""
        request = self.request
        tree: list[int] = []
        if self.group is None:
            tree = [self.pid, *procfs.descendants(self.pid)]
            cpu_s, memory_mb = procfs.usage(tree)
            self.last_cpu_s = cpu_s - self._base_s
            if memory_mb > request.memory_mb:
                return "memory"
        elif self.group.out_of_memory():
            return "memory"
        if any(os.fstat(fd).st_size > request.output_bytes for fd in self.outputs):
            return "output_limit"
        now = time.monotonic()
        if not self._ready(tree):
            self._idle_s += now - self._last
        self._last = now
        had_s = self.cpu_s() + self._idle_s
        if had_s >= request.timeout_s:
            return "timeout"
        left_s = self.left_s()
        if left_s <= 0:
            return "timeout" if self._belongs_in_background() else "sandbox_error"
        self._adjust_weight(request.timeout_s - had_s, left_s)
        return None

    def _ready(self, tree: list[int]) -> bool:
        """Is any thread of the call running, or would be but for others?"""
        if procfs.ready(self.pid):
            return True
        return any(procfs.ready(task) for task in self._others(tree))

    def _others(self, tree: list[int]) -> list[int]:
        """Threads of the call beside the program's first one; the namespace's init is among them."""
        tasks = self.group.tasks() if self.group else tree
        return [task for task in tasks if task not in (self.pid, os.getpid())]

    def _belongs_in_background(self) -> bool:
        """Has a call that made room had enough for the background?"""
        return self.yielded and self.last_cpu_s > max(BACKGROUND_SHARE * self.request.timeout_s, BACKGROUND_LEAST_S)

    def _adjust_weight(self, needed_s: float, left_s: float) -> None:
        if self.group is None:
            if self._belongs_in_background():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self.pid, 19)
            return
        # Forks share locks in the kernel with all of their zygote's, so a tree of them is better soon at its end.
        alone = len(self._others([])) <= 1
        if alone and self._belongs_in_background():
            with contextlib.suppress(OSError):
                self.group.enter_background()
                return
        aside = self.yielded and alone
        behind = left_s - needed_s < self.request.wall_slack_s * 3 / 4
        self.group.set_weight(PREEMPTED if aside else BOOSTED if behind else NORMAL)
