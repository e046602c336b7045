"""`rstar-lab sandbox soak`: runs mixed calls on Redis workers while processes are killed, and checks every result."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.redis_server import TemporaryRedis
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.sandbox import transport
from rstar_lab.sandbox.client import SandboxClient
from rstar_lab.sandbox.launch import serving


class Kind(NamedTuple):
    """One kind of program. weight: its share. outcomes: correct outcomes. stdout: correct output; None accepts any."""

    weight: int
    code: str
    outcomes: set[Outcome]
    stdout: str | None
    memory_mb: int | None = None


KINDS = {
    "plain": Kind(60, "print(1 + 1)", {Outcome.OK}, "2\n"),
    "numpy": Kind(15, "import numpy as np\nprint(int(np.arange(10).sum()))", {Outcome.OK}, "45\n"),
    "sympy": Kind(10, "import sympy\nprint(sympy.solve(sympy.Symbol('x')**2 - 4))", {Outcome.OK}, "[-2, 2]\n"),
    "exception": Kind(8, "1 / 0", {Outcome.EXCEPTION}, ""),
    "loop": Kind(2, "while True: pass", {Outcome.TIMEOUT}, ""),
    "memory": Kind(1, "x = []\nwhile True: x.append(bytearray(10**7))", {Outcome.MEMORY}, "", 128),
    "fork bomb": Kind(
        1, "import os\nwhile True:\n try: os.fork()\n except OSError: pass", {Outcome.TIMEOUT, Outcome.MEMORY}, ""
    ),
    "flood": Kind(1, "while True: print('x' * 999)", {Outcome.OUTPUT_LIMIT}, None),
    "kills itself": Kind(2, "import os\nos.kill(os.getpid(), 9)", {Outcome.KILLED}, ""),
}
VICTIMS = ("supervisor", "zygote", "worker", "server", "redis")
IN_FLIGHT = 64
TIME_LIMIT_S = "1"
DEADLINE_S = 1800.0
# Seconds in which all processes must end after the services are stopped.
END_S = 15.0


@dataclass
class SoakResult:
    """Counts of a soak. wrong: (kind, outcome) -> wrong results. processes_left, entries_left: what remained at the end."""

    calls: int
    answered: int = 0
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    processes_left: int = 0
    entries_left: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0  # longest time until the result of a call

    @property
    def passed(self) -> bool:
        return self.answered == self.calls and not (self.wrong or self.processes_left or self.entries_left)

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "answered": self.answered,
            "wrong": {f"{kind}: {outcome}": count for (kind, outcome), count in self.wrong.items()},
            "kills": dict(self.kills),
            "retries": self.retries,
            "processes_left": self.processes_left,
            "entries_left": self.entries_left,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
        }


class Services:
    """A Redis, workers and a server, each of which can be killed and started again."""

    def __init__(self, folder: str, workers: int) -> None:
        self.redis = TemporaryRedis(folder)
        self.port = free_port()
        self.names = [*(f"worker {number}" for number in range(workers)), "server"]
        self._running: dict[str, tuple[contextlib.ExitStack, int]] = {}
        # Processes of all workers and servers so far: zygotes, supervisors, programs.
        self.seen: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.redis.start()
        for name in self.names:
            self._start(name)

    def _start(self, name: str) -> None:
        arguments = ["serve", "--port", str(self.port)] if name == "server" else ["worker", "--workers", "1"]
        stack = contextlib.ExitStack()
        ready = stack.enter_context(serving(*arguments, "--time-limit", TIME_LIMIT_S, redis=self.redis.url))
        self._running[name] = stack, ready["pid"]

    def _remember(self) -> None:
        """Add the present processes to `seen`: after the end of its owner, a process cannot be assigned to it."""
        for _, pid in self._running.values():
            self.seen |= descendants(pid)

    def kill(self, victim: str, draw: random.Random) -> bool:
        """Kill a process of this kind; start it again unless its sandbox does that. Returns False if there is no such process."""
        self._remember()
        if victim == "redis":
            self.redis.kill()
            self.redis.start()
            return True
        name = "server" if victim == "server" else draw.choice([name for name in self.names if name != "server"])
        stack, pid = self._running[name]
        if victim in ("supervisor", "zygote"):
            candidates = sandbox_parts(pid)[victim]
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(draw.choice(candidates), signal.SIGKILL)
                return True
            return False
        os.kill(pid, signal.SIGKILL)
        stack.close()
        self._start(name)
        return True

    def stop(self) -> None:
        self._remember()
        for name in reversed(self.names):
            if name in self._running:
                self._running[name][0].close()
        self.redis.kill()


def sandbox_parts(owner: int) -> dict[str, list[int]]:
    """Return the process ids of the zygotes and supervisors of a process's sandbox.

    Programs are in deeper PID namespaces. A supervisor leads a session of its own.
    """
    level = pid_namespace_level("self") + 1
    parts: dict[str, list[int]] = {"zygote": [], "supervisor": []}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(owner).children(recursive=True):
            with contextlib.suppress(OSError):
                if pid_namespace_level(process.pid) == level:
                    leads = os.getsid(process.pid) == process.pid
                    parts["supervisor" if leads else "zygote"].append(process.pid)
    return parts


def pid_namespace_level(pid: int | str) -> int:
    """Return the depth of a process's PID namespace below that of /proc. Raises OSError if the process has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return len(next(line for line in status.splitlines() if line.startswith("NSpid")).split()) - 1


def soak(calls: int, kills: int, *, workers: int, seed: int, report: Callable[[SoakResult], None]) -> SoakResult:
    """Run `calls` calls while `kills` processes are killed. report: called about every ten seconds.

    Raises UserError if redis-server is not installed.
    """
    if shutil.which("redis-server") is None:
        raise UserError("redis-server is not installed; `make services` installs it")
    result = SoakResult(calls)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        services = Services(folder, workers)
        try:
            services.start()
            asyncio.run(_soak(services, result, kills, random.Random(seed), report))
        finally:
            services.stop()
    deadline = time.monotonic() + END_S
    while (left := count_running(services.seen)) and time.monotonic() < deadline:
        time.sleep(0.1)
    result.processes_left = left
    result.seconds = time.monotonic() - began
    return result


def descendants(pid: int) -> set[psutil.Process]:
    """Return the processes below a process; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def count_running(processes: Iterable[psutil.Process]) -> int:
    """Return how many of these processes have not ended. Zombies have ended."""
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return count


async def _soak(
    services: Services, result: SoakResult, kills: int, draw: random.Random, report: Callable[[SoakResult], None]
) -> None:
    names = draw.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=result.calls)
    async with SandboxClient(services.url, deadline_s=DEADLINE_S) as client:
        left = list(names)

        async def run_client() -> None:
            while left:
                name = left.pop()
                kind = KINDS[name]
                began = time.monotonic()
                answer = await client.run(kind.code, memory_mb=kind.memory_mb)
                result.slowest_s = max(result.slowest_s, time.monotonic() - began)
                result.answered += 1
                if answer.outcome not in kind.outcomes or kind.stdout not in (None, answer.stdout):
                    result.wrong[name, str(answer.outcome)] += 1

        async def kill_evenly() -> None:
            done = 0
            while done < kills:
                if result.answered >= (done + 1) * result.calls / (kills + 1):
                    victim = VICTIMS[done % len(VICTIMS)]
                    result.kills[victim] += await asyncio.to_thread(services.kill, victim, draw)
                    done += 1
                await asyncio.sleep(0.05)

        async def report_often() -> None:
            while True:
                await asyncio.sleep(10)
                report(result)

        reporting = asyncio.create_task(report_often())
        killing = asyncio.create_task(kill_evenly())
        try:
            await asyncio.gather(*(run_client() for _ in range(IN_FLIGHT)))
            await killing
        finally:
            reporting.cancel()
            killing.cancel()
            result.retries = client.retries
    redis = transport.connect(services.redis.url)
    pending = await redis.xpending(transport.CALLS, transport.GROUP)
    result.entries_left = await redis.xlen(transport.CALLS) + pending["pending"]
    await redis.aclose()


def print_progress(result: SoakResult) -> None:
    killed = sum(result.kills.values())
    print(f"{result.answered} of {result.calls} calls answered, {killed} processes killed", file=sys.stderr)
