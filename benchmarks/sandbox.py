"""`rstar-lab bench sandbox --against URL`: compares this sandbox with another service that has code-judge's API.

Both get the same requests over HTTP in alternating rounds, so that other load on the machine affects both. The other service
must have two workers, like the one started here. Rates are calls per second; a ratio is the median over the rounds.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np

from benchmarks.redis_server import temporary_redis
from benchmarks.sandbox_load import BROKEN, ENDLESS, NUMPY, SHORT, SYMPY, mixed
from benchmarks.sandbox_sizing import simulate
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.sandbox.client import SandboxClient
from rstar_lab.sandbox.launch import serving

WORKERS = 2
TIME_LIMIT_S = 4
BATCH = 64
ANSWER_S = 600


def bench(against: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per measurement: name, value, unit, against, ratio, n. Takes about ten minutes with `against`."""
    if against is not None:
        check_reachable(against)
    with serving(
        "serve", "--no-token", "--port", "0", "--workers", str(WORKERS), "--time-limit", str(TIME_LIMIT_S)
    ) as ready:
        ours = ready["url"]
        warm_up(ours)
        for name, code, count, rounds in (("a", SHORT, 384, 9), ("b", NUMPY, 128, 9), ("c", SYMPY, 64, 5)):
            yield compare(name, ours, against, [code] * count, rounds, batch=BATCH, clients=2)
        # Many calls, so that the last endless loops, which run alone, do not dominate the rate.
        yield compare("mix", ours, against, mixed(1600), 1, batch=1, clients=64)
        yield from many_in_flight(ours)
        yield from beside_endless_loops(ours)
        yield from all_at_once(ready)
    yield from over_a_bare_fork()
    yield from over_redis()


def check_reachable(url: str) -> None:
    """Raise UserError if no service with code-judge's API answers at the URL."""
    body = {"type": "batch", "submissions": [{"type": "python", "solution": SHORT}]}
    try:
        httpx.post(f"{url}/run/long-batch", json=body, timeout=60, trust_env=False).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"bench sandbox --against {url}: no service with code-judge's API answers ({error})") from error


def line(
    name: str, value: float, unit: str, n: int, *, against: float | None = None, ratio: float | None = None
) -> dict:
    return {"name": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "n": n}


def warm_up(url: str) -> None:
    """Return when all zygotes are ready; the service answers before they have imported their libraries."""
    asyncio.run(load(url, [SHORT, NUMPY, SYMPY, "import scipy"] * BATCH, batch=BATCH, clients=1))


def compare(
    name: str, ours: str, against: str | None, codes: list[str], rounds: int, *, batch: int, clients: int
) -> dict[str, Any]:
    """Send the same calls to both services in alternating rounds, after one warm-up batch each; return a row of rates."""
    mine: list[float] = []
    other: list[float] = []
    sides = [(ours, mine)] if against is None else [(against, other), (ours, mine)]
    for url, _ in sides:
        asyncio.run(load(url, codes[:batch], batch=batch, clients=1))
    for _ in range(rounds):
        for url, rates in sides:
            rates.append(len(codes) / asyncio.run(load(url, codes, batch=batch, clients=clients)).seconds)
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True)) if other else None
    median = statistics.median(other) if other else None
    return line(name, statistics.median(mine), "calls/s", rounds * len(codes), against=median, ratio=ratio)


class Load:
    """Result of a load: results in any order, the latency (s) of each request, and the total wall time."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.latencies: list[tuple[str, float]] = []
        self.seconds = 0.0


async def load(url: str, codes: list[str], *, batch: int, clients: int, path: str = "/run/long-batch") -> Load:
    """Send the calls in batches, `clients` requests at a time."""
    batches = [codes[start : start + batch] for start in range(0, len(codes), batch)][::-1]
    done = Load()

    async def run_client() -> None:
        connection = Connection(url)
        while batches:
            codes = batches.pop()
            began = time.perf_counter()
            if path == "/run":
                body: dict[str, Any] = {"type": "python", "solution": codes[0]}
            else:
                body = {"type": "batch", "submissions": [{"type": "python", "solution": code} for code in codes]}
            try:
                reply = await connection.post(path, body)
                done.results += reply.get("results", [reply])
            except (OSError, EOFError, ValueError) as error:  # counted as a lost call
                print(f"{url}{path}: {type(error).__name__}: {error}", file=sys.stderr)
                connection.close()
            done.latencies.append((codes[0], time.perf_counter() - began))
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(run_client() for _ in range(clients)))
    done.seconds = time.perf_counter() - began
    return done


class Connection:
    """A connection to a service that stays open, so that calls are measured and not TCP handshakes.

    An HTTP library would need 3 CPU ms per request, as much as a short call, on the cores that the services use.
    """

    def __init__(self, url: str) -> None:
        self._address = httpx.URL(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON response. Raises OSError, EOFError or ValueError if there is none; then call `close`."""
        content = json.dumps(body).encode()
        url = self._address
        head = f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Type: application/json\r\n"
        async with asyncio.timeout(ANSWER_S):
            if self._streams is None:
                tls = url.scheme == "https"
                port = url.port or (443 if tls else 80)
                self._streams = await asyncio.open_connection(url.host, port, ssl=tls or None)
            reader, writer = self._streams
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
            if first.split()[1] != "200" or "content-length" not in fields:
                raise ValueError(f"response {first!r}, Content-Length {fields.get('content-length')}")
            return json.loads(await reader.readexactly(int(fields["content-length"])))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def many_in_flight(url: str, count: int = 20_000, clients: int = 512) -> Iterator[dict[str, Any]]:
    done = asyncio.run(load(url, [SHORT] * count, batch=1, clients=clients, path="/run"))
    right = sum(result.get("stdout") == "2\n" for result in done.results)
    ours = sum(result.get("outcome") in INFRASTRUCTURE_FAILURES for result in done.results)
    yield line("in_flight_512", count / done.seconds, "calls/s", count)
    yield line("in_flight_512_lost_or_wrong", count - right, "calls", count)
    yield line("in_flight_512_errors_of_ours", ours, "calls", count)


def beside_endless_loops(url: str, count: int = 2_000, clients: int = 16) -> Iterator[dict[str, Any]]:
    """Measure the latency of short calls while 2% of all calls are endless loops."""
    codes = [ENDLESS] * (count // 50) + [SHORT] * (count - count // 50)
    random.Random(1).shuffle(codes)
    done = asyncio.run(load(url, codes, batch=1, clients=clients))
    short = sorted(seconds for code, seconds in done.latencies if code == SHORT)
    p50, p99 = short[len(short) // 2], short[int(0.99 * len(short))]
    yield line("short_p50_beside_loops", 1000 * p50, "ms", len(short))
    yield line("short_p99_beside_loops", 1000 * p99, "ms", len(short))
    yield line("short_p99_over_p50", p99 / p50, "times", len(short))


def all_at_once(ready: dict[str, Any], count: int = 512) -> Iterator[dict[str, Any]]:
    """Compare the mean latency of a burst with the queue simulation of docs/sandbox.md, which uses the burst's CPU time."""
    codes = [code for code in mixed(count) if code not in (ENDLESS, BROKEN)]
    before = cpu_ms(ready["pid"])
    latencies = asyncio.run(burst(ready["url"], codes))
    service_s = np.full(len(codes), (cpu_ms(ready["pid"]) - before) / len(codes) / 1000)
    predicted = simulate(np.zeros(len(codes)), service_s, WORKERS).mean()
    measured = statistics.mean(latencies)
    yield line("burst_mean", measured, "s", len(codes), against=predicted, ratio=predicted / measured)


async def burst(url: str, codes: list[str]) -> list[float]:
    async with SandboxClient(url) as client:

        async def run_one(code: str) -> float:
            began = time.perf_counter()
            await client.run(code)
            return time.perf_counter() - began

        return await asyncio.gather(*map(run_one, codes))


def over_a_bare_fork(count: int = 400) -> Iterator[dict[str, Any]]:
    """Compare the CPU time of a call, with service and HTTP, with a bare fork that runs the same code."""
    for name, code in (("a", SHORT), ("b", NUMPY), ("c", SYMPY)):
        bare = bare_fork_ms(code, count)
        with serving(
            "serve", "--no-token", "--port", "0", "--workers", str(WORKERS), "--time-limit", str(TIME_LIMIT_S)
        ) as ready:
            warm_up(ready["url"])
            before = cpu_ms(ready["pid"])
            asyncio.run(load(ready["url"], [code] * count, batch=BATCH, clients=2))
            ms = (cpu_ms(ready["pid"]) - before) / count
        yield line(f"cpu_{name}", ms, "CPU ms/call", count, against=bare, ratio=bare / ms)


BARE_FORK = """
import contextlib, gc, io, os, resource, sys, time
code, count = sys.argv[1], int(sys.argv[2])
with contextlib.redirect_stdout(io.StringIO()):
    exec(code, {})
gc.collect(); gc.freeze()
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
sink = os.open(os.devnull, os.O_WRONLY)
began = cpu()
for _ in range(count):
    child = os.fork()
    if child == 0:
        os.dup2(sink, 1)
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
print(1000 * (cpu() - began) / count)
"""


def bare_fork_ms(code: str, count: int) -> float:
    command = [sys.executable, "-c", BARE_FORK, code, str(count)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def cpu_ms(pid: int) -> float:
    """Return the CPU time (ms) of a process, its live descendants, and all reaped children."""
    ticks, todo = 0, [pid]
    while todo:
        with contextlib.suppress(OSError):
            process = todo.pop()
            with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
                ticks += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:15]))
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                with open(f"/proc/{process}/task/{thread}/children") as file:  # noqa: PTH123
                    todo += map(int, file.read().split())
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")


def over_redis(count: int = 768) -> Iterator[dict[str, Any]]:
    """Measure rates with one, two and three workers, of one slot each, behind a temporary Redis."""
    with contextlib.ExitStack() as stack:
        try:
            redis = stack.enter_context(temporary_redis()).url
        except FileNotFoundError:
            print("redis-server is not installed: skipping the Redis measurements", file=sys.stderr)
            return
        ready = stack.enter_context(serving("serve", "--no-token", "--port", "0", redis=redis))
        first = None
        for workers in (1, 2, 3):
            stack.enter_context(serving("worker", "--workers", "1", "--time-limit", str(TIME_LIMIT_S), redis=redis))
            asyncio.run(load(ready["url"], [SHORT] * BATCH, batch=BATCH, clients=1))
            rate = count / asyncio.run(load(ready["url"], [SHORT] * count, batch=BATCH, clients=4)).seconds
            first = first or rate
            yield line(f"redis_workers_{workers}", rate, "calls/s", count, against=first, ratio=rate / first)
