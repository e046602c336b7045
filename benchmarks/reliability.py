"""Inject faults into runs, jobs, services and clients, and compare what happens with what is promised.

    python -m benchmarks.reliability [AREA...]   # about 80 injections; writes docs/reliability.md

A run that is disturbed and continued must have the metrics (without times), rewards and weights of an undisturbed run, bit for bit, or
the command must end with one line that names the cause. Rewards are a hash of the text, so that an untrained model has something to
learn. The runs are small: 2 problems, groups of 4, 12 steps.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.doctor import replace_part
from benchmarks.soak import VICTIMS, soak
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.resources import benchmark_file
from rstar_lab.common.temporary import SHARED_MEMORY
from rstar_lab.rl.models.model import build_tiny, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.runs.reader import RunReader
from rstar_lab.sandbox import SandboxClient

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULT = "reliability.json"
STEPS, CHECKPOINT_EVERY, BASE_STEP, DAMAGES = 12, 2, 5, 16
LIMIT_S = 600.0  # of one command
RECIPE = {
    "name": "soak",
    "rl": {
        "problems_per_step": 2, "group_size": 4, "lr": 1e-3, "warmup_steps": 2, "token_arrays": "all", "schedule": {"lockstep": True},
        "limits": {"max_response_tokens": 40, "max_turns": 1}, "checkpoint_every": CHECKPOINT_EVERY,
        "reward": "benchmarks.reliability:score",
    },
    "stages": [{"name": "one", "problems": {"synthetic": {"count": 16, "levels": [1]}}, "steps": STEPS}],
    "engine": {"dtype": "float32", "count": 1, "kv_cache_gb": 0.1, "max_num_seqs": 32, "stall_s": 10.0},
    "sandbox": {"workers": 1},
}  # fmt: skip
SAME, LINE = "same bits as undisturbed", "one line, rc"


@dataclass(frozen=True)
class Injection:
    """One fault. seen: what happened. recovery_s: until the next step, answer or message. kept: whether the promise held."""

    area: str
    injected: str
    promised: str
    seen: str
    recovery_s: float
    kept: bool


def score(text: str, answer: str) -> float:
    """Return 0 or 1, from a hash of the text."""
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)


class Training:
    """Runs of one recipe. engine: `transformers`, which starts faster, or `vllm`."""

    def __init__(self, folder: Path, engine: str, processes: int = 1):
        self.folder = folder
        folder.mkdir(parents=True)
        tokenizer = train_tokenizer(["some text"], 300)
        save_model(
            folder / "model", build_tiny(tokenizer, seed=0, hidden_size=64, layers=2, heads=2, kv_heads=1), tokenizer
        )
        recipe = RECIPE | {"model": str(folder / "model"), "processes": processes}
        recipe["engine"] = RECIPE["engine"] | {"kind": engine}  # type: ignore[operator]
        (folder / "soak.yaml").write_text(yaml.safe_dump(recipe))
        self.reference = folder / "reference"
        errors = self.finish(self.reference)
        assert not errors, errors
        self.bits = fingerprint(self.reference)

    def start(self, runs: Path, **options: Any) -> subprocess.Popen[str]:
        runs.mkdir(exist_ok=True)
        return command(["train", str(self.folder / "soak.yaml"), "--runs-dir", str(runs)], runs / "log", **options)

    def finish(self, runs: Path, **options: Any) -> str:
        """Run to the end. Returns what the command printed to stderr if it failed."""
        process = self.start(runs, **options)
        errors = process.communicate(timeout=LIMIT_S)[1]
        return errors or f"rc {process.returncode}" if process.returncode else ""

    def outcome(self, runs: Path, errors: str) -> tuple[str, bool]:
        """Return what a resumed run shows, and whether it is right: the same bits, or an error of one line."""
        if not errors:
            same = fingerprint(runs) == self.bits
            return (SAME if same else "ANOTHER RESULT"), same
        lines = [line for line in errors.splitlines() if "error: " in line]
        right = len(lines) == 1 and "Traceback" not in errors
        text = lines[0].partition("error: ")[2] if right else errors.strip()[-200:]
        return f"{LINE if right else 'a traceback, rc'} 1: {text.replace(str(runs), 'RUNS')[:160]}", right


def command(
    arguments: list[str], log: Path, *, stdout: int | None = None, largest_file: int | None = None
) -> subprocess.Popen[str]:
    """Start a command of `rstar-lab` in a session of its own. stdout: default: a log. largest_file: limit in bytes."""
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rstar_lab.cli", *arguments], cwd=log.parent, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output if stdout is None else stdout, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=partial(_prepare, largest_file),
        )  # fmt: skip


def _prepare(largest_file: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))


def fingerprint(runs: Path) -> str:
    """Return a hash of the metrics without times, the rows and the last weights of a run."""
    reader = RunReader(runs / "soak-rl")
    metrics = [{key: value for key, value in line.items() if not key.endswith("_s")} for line in reader.metrics()]
    rows = reader.read("trajectories", columns=["traj_id", "step", "reward", "kept", "advantage"]).to_pylist()
    weights = (reader.checkpoints()[STEPS] / "model.safetensors").read_bytes()
    return hashlib.sha256(repr((metrics, rows)).encode() + weights).hexdigest()


def steps(runs: Path) -> int:
    """Return how many steps a run has."""
    path = runs / "soak-rl" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_step(runs: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has this step. Raises AssertionError if its process ends before."""
    deadline = time.monotonic() + LIMIT_S
    while steps(runs) < step:
        assert process.poll() is None or steps(runs) >= step, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def leftovers(processes: list[psutil.Process]) -> list[str]:
    """Return the processes that have not ended after 15 s, and the shared memory of ended ones."""
    _, alive = psutil.wait_procs(processes, timeout=15)
    pids = {str(process.pid) for process in processes}
    shared = [path.name for path in SHARED_MEMORY.glob("rstar-*") if pids & set(path.name.split("-"))]
    return [*(f"process {process.pid}" for process in alive), *shared]


def next_command() -> None:
    """Run another command, which removes what killed processes have left."""
    subprocess.run([sys.executable, "-m", "rstar_lab.cli", "profiles"], stdout=subprocess.DEVNULL, cwd=ROOT)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a process and its descendants."""
    own = psutil.Process(process.pid)
    return [own, *own.children(recursive=True)]


def ends(work: Path, training: Training) -> Iterator[Injection]:
    """End one run in all ways, each time in another step; each next command continues it."""
    runs, promised = (
        work / "ends",
        "one line, status stopped, nothing left; the same command continues with the same bits",
    )
    ways = ["SIGTERM", "SIGHUP", "SIGINT", "closed output", "SIGKILL", "SIGKILL to all processes"]
    for how in ways:
        before = steps(runs)
        reading, writing = os.pipe()
        process = training.start(runs, stdout=writing)
        os.close(writing)
        closing = threading.Event()
        threading.Thread(target=_drain, args=(reading, closing), daemon=True).start()
        wait_for_step(runs, before + 1, process)
        own, began = family(process), time.monotonic()
        if how == "SIGKILL to all processes":
            for victim in own:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
        elif how == "closed output":
            closing.set()
        else:
            process.send_signal(getattr(signal, how))
        errors = process.communicate(timeout=LIMIT_S)[1]
        took = time.monotonic() - began
        killed = how.startswith("SIGKILL")
        if killed:
            next_command()
        left = leftovers(own)
        status = RunReader(runs / "soak-rl").status
        right = not left and "Traceback" not in errors and status == ("interrupted" if killed else "stopped")
        seen = f"rc {process.returncode}, status {status}, {', '.join(left) or 'nothing left'}"
        yield Injection("training", f"{how} in step {before + 2}", promised, seen, took, right)
    began = time.monotonic()
    seen, right = training.outcome(runs, training.finish(runs))
    yield Injection("training", "after all of these ends", SAME, seen, time.monotonic() - began, right)


def _drain(descriptor: int, closing: threading.Event) -> None:
    """Read a pipe until its end; close it at the first text after `closing` is set."""
    while os.read(descriptor, 2**16) and not closing.is_set():
        pass
    os.close(descriptor)


def parts(work: Path) -> Iterator[Injection]:
    """Kill and stop processes of one run with vLLM, one in each step."""
    training = Training(work / "vllm", "vllm", processes=2)
    runs, promised = work / "parts", "the run goes on, with the same bits"
    process, found = training.start(runs), list[tuple[str, float]]()
    for number, (name, pattern, how) in enumerate(
        (
            ("an engine", "vllm_worker", "SIGKILL"),
            ("an engine", "vllm_worker", "SIGSTOP without SIGCONT"),
            ("a sandbox", "zygote", "SIGKILL"),
            ("an engine", "vllm_worker", "SIGSTOP 5 s"),
            ("an update helper", "data_parallel", "SIGSTOP 5 s"),
            ("an engine", "vllm_worker", "SIGKILL"),
        )
    ):
        wait_for_step(runs, number + 1, process)
        victims = [one for one in family(process)[1:] if pattern in " ".join(one.cmdline())]
        began = time.monotonic()
        for victim in victims[:1]:
            victim.send_signal(getattr(signal, how.split()[0]))
            if how.endswith(" s"):
                time.sleep(5)
                victim.resume()
        wait_for_step(runs, number + 2, process)
        found.append((f"{how} of {name} process{'' if victims else ' (there was none)'}", time.monotonic() - began))
    errors = process.communicate(timeout=LIMIT_S)[1]
    seen, right = training.outcome(runs, errors if process.returncode else "")
    for injected, took in found:
        yield Injection("training", injected, promised, seen, took, right)
    promised = "one line within 60 s; the same command continues with the same bits"
    for how in ("SIGKILL", "SIGSTOP without SIGCONT"):
        runs = work / f"helper-{how.split()[0]}"
        process = training.start(runs)
        wait_for_step(runs, 2, process)
        helper = next(one for one in family(process)[1:] if "data_parallel" in " ".join(one.cmdline()))
        began = time.monotonic()
        helper.send_signal(getattr(signal, how.split()[0]))
        seen, right = training.outcome(runs, process.communicate(timeout=LIMIT_S)[1])
        took = time.monotonic() - began
        again, same = training.outcome(runs, training.finish(runs))
        right = right and same and took < 60
        yield Injection("training", f"{how} of an update helper", promised, f"{seen}; {again}", took, right)


def damages(work: Path, training: Training, rng: random.Random) -> Iterator[Injection]:
    """Damage one file of a stopped run at a random byte, and continue it."""
    base = work / "base"
    process = training.start(base)
    wait_for_step(base, BASE_STEP, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    names = sorted(str(path.relative_to(base)) for path in (base / "soak-rl").rglob("*") if path.is_file())
    names = [name for name in names if not name.endswith(".lock")]
    for number in range(DAMAGES):
        runs = work / f"damage-{number}"
        shutil.copytree(base, runs)
        name = rng.choice(names)
        how = damage(runs, name, names, rng)
        began = time.monotonic()
        seen, right = training.outcome(runs, training.finish(runs))
        took = time.monotonic() - began
        short = name.removeprefix("soak-rl/")
        yield Injection("run folder", f"{short} {how}", f"{SAME}, or one line", seen, took, right)
        shutil.rmtree(runs)


def damage(runs: Path, name: str, names: list[str], rng: random.Random) -> str:
    """Damage a file in one of five ways; return which."""
    path, way = runs / name, rng.choice(["truncated", "emptied", "removed", "overwritten", "swapped"])
    data = path.read_bytes()
    place = rng.randrange(len(data) or 1)
    if way == "removed":
        path.unlink()
    elif way == "emptied":
        path.write_bytes(b"")
    elif way == "truncated":
        path.write_bytes(data[:place])
    elif way == "overwritten":
        path.write_bytes(data[:place] + rng.randbytes(8) + data[place + 8 :])
    else:
        other = rng.choice([other for other in names if other != name])
        path.write_bytes((runs / other).read_bytes())
        return f"replaced by {Path(other).name}"
    return way if way in ("removed", "emptied") else f"{way} at byte {place}"


def folders(work: Path, training: Training) -> Iterator[Injection]:
    """Move, delete, share and fill the folder of a live run; afterwards the same command continues it."""
    promised = "one line; the same command continues with the same bits"
    for what in (
        "renamed",
        "deleted",
        "a second writer",
        "full while a step is written",
        "full while weights are written",
    ):
        runs = work / f"folder-{what.replace(' ', '-')}"
        limit = 20_000 if "step" in what else 150_000 if what.startswith("full") else None
        process = training.start(runs, largest_file=limit)
        if not what.startswith("full"):
            wait_for_step(runs, 2, process)
        began, other = time.monotonic(), ""
        if what == "renamed":
            (runs / "soak-rl").rename(runs / "moved")
        elif what == "deleted":
            while (runs / "soak-rl").exists():  # the trainer writes meanwhile
                shutil.rmtree(runs / "soak-rl", ignore_errors=True)
        elif what == "a second writer":
            process.send_signal(signal.SIGSTOP)  # otherwise it can end before the second one has started
            other = training.finish(runs)
            process.send_signal(signal.SIGCONT)
        errors = process.communicate(timeout=LIMIT_S)[1]
        seen, right = training.outcome(runs, other or errors)
        took = time.monotonic() - began
        if what == "renamed":
            shutil.rmtree(runs / "soak-rl", ignore_errors=True)
            (runs / "moved").rename(runs / "soak-rl")
        again, same = training.outcome(runs, training.finish(runs))
        yield Injection("run folder", what, promised, f"{seen}; {again}", took, right and same and seen != SAME)


def jobs(work: Path, training: Training) -> Iterator[Injection]:
    """Stop a job, and kill its supervisor and its trainer; then submit it again."""
    from rstar_lab.jobs import JobStatus, submit

    runs, recipe = work / "jobs", training.folder / "soak.yaml"
    runs.mkdir()
    os.environ["PYTHONPATH"] = str(ROOT)
    # The profile of a job sets the number of threads, and with it the bits.
    undisturbed = work / "undisturbed_job"
    assert submit(str(recipe), runs_dir=undisturbed, preflight=False).wait(timeout_s=LIMIT_S) == JobStatus.FINISHED
    for what in ("jobs stop", "SIGKILL of the supervisor", "SIGKILL of the trainer"):
        before = steps(runs)
        job = submit(str(recipe), runs_dir=runs, preflight=False)
        while steps(runs) <= before:
            time.sleep(0.05)
        supervisor = psutil.Process(job.spec.handle["pid"])
        own, began = [supervisor, *supervisor.children(recursive=True)], time.monotonic()
        if what == "jobs stop":
            job.stop()
        else:
            (supervisor if "supervisor" in what else supervisor.children()[0]).kill()
        status = job.wait(timeout_s=60)
        took = time.monotonic() - began
        next_command()
        left = leftovers(own)
        expected = JobStatus.STOPPED if what == "jobs stop" else JobStatus.FAILED
        seen = f"status {status}, {', '.join(left) or 'nothing left'}"
        yield Injection("job", what, f"status {expected}, nothing left", seen, took, status == expected and not left)
    began = time.monotonic()
    status = submit(str(recipe), runs_dir=runs, preflight=False).wait(timeout_s=LIMIT_S)
    same = status == JobStatus.FINISHED and fingerprint(runs) == fingerprint(undisturbed)
    seen = SAME if same else f"status {status}, another result"
    yield Injection("job", "after all of these ends", SAME, seen, time.monotonic() - began, same)


def services(rng: random.Random) -> Iterator[Injection]:
    """Kill processes of a sandbox service over Redis while 64 clients wait for calls."""
    result = soak(400, 5 * len(VICTIMS), workers=2, seed=rng.randrange(1000), report=lambda _: None)
    seen = f"{result.answered} of {result.calls} calls right, {sum(result.wrong.values())} wrong, {result.processes_left} processes left"
    for victim in VICTIMS:
        for _ in range(result.kills[victim]):
            yield Injection(
                "sandbox service",
                "SIGKILL of the Redis server" if victim == "redis" else f"SIGKILL of a {victim}",
                "every call has one right result",
                seen,
                result.slowest_s,
                result.passed,
            )


def peers() -> Iterator[Injection]:
    """Ask services that are silent, answer garbage, or answer one byte per second."""
    answers: dict[str, bytes | None] = {
        "is silent": None, "closes the connection": b"", "answers garbage": b"\0\1\2garbage\r\n\r\n",
        "answers HTML": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
        "answers 502": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
        "sends one byte per second": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    }  # fmt: skip
    for name, answer in answers.items():
        with _peer(answer) as url:
            for mode in ("run", "stream"):
                began = time.monotonic()
                outcome = asyncio.run(_call(url, mode))
                took = time.monotonic() - began
                seen = str(outcome)
                kept = outcome not in (Outcome.OK, Outcome.EXCEPTION, "no end") and took < 12
                yield Injection(
                    "client",
                    f"{mode}() with 4 s; the service {name}",
                    "a failure of the service in time",
                    seen,
                    took,
                    kept,
                )


async def _call(url: str, mode: str) -> str:
    async with SandboxClient(url, deadline_s=4) as client:
        try:
            async with asyncio.timeout(20):
                if mode == "run":
                    return (await client.run("print(1)")).outcome
                events = [event async for event in client.stream("print(1)")]
                return events[-1].outcome if hasattr(events[-1], "outcome") else str(events[-1])
        except TimeoutError:
            return "no end"
        except UserError as error:
            return f"UserError ({str(error).partition(': ')[2][:60]})"


@contextlib.contextmanager
def _peer(answer: bytes | None) -> Iterator[str]:
    """Listen on a port, and answer every connection with these bytes; None: with nothing. Yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.recv(2**16)
                connection.sendall(answer or b"")
                while answer is None or answer.endswith(b"{"):
                    time.sleep(1)
                    connection.sendall(b" " if answer else b"")

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def table(result: dict[str, Any]) -> str:
    """Return the recorded injections as Markdown: those of one area with the same result in one row, without the
    texts of error messages."""
    lines = ["| area | promised | seen | injected | longest time to recover |", "|---|---|---|---|---|"]
    injections = [Injection(**one) for area in AREAS if area in result for one in result[area]["injections"]]
    rows: dict[tuple[str, ...], list[Injection]] = {}
    for one in injections:
        seen = re.sub(r"(one line, rc \d+): .*?(; same bits as undisturbed|$)", r"\1\2", one.seen, flags=re.DOTALL)
        rows.setdefault((one.area, one.promised, seen if one.kept else f"**not kept**: {one.seen}"), []).append(one)
    above: tuple[str, str] | None = None
    for (area, promised, seen), several in rows.items():
        shown = " ".join(seen.replace("|", "/").replace("<", "&lt;").split())
        counts = Counter(one.injected for one in several)
        names = "<br>".join(f"{name} ({n} times)" if n > 1 else name for name, n in counts.items())
        slowest = max(one.recovery_s for one in several)
        first = " | " if (area, promised) == above else f" {area} | {promised} "
        lines.append(f"|{first}| {shown} | {names} | {slowest:.1f} s |")
        above = (area, promised)
    held, minutes = sum(one.kept for one in injections), sum(part["minutes"] for part in result.values())
    loads = [part["load"] for part in result.values()]
    lines += [
        "",
        f"{held} of {len(injections)} promises held. {minutes:.0f} minutes on a machine with {os.cpu_count()} CPU cores and other work "
        f"(load {min(loads):.0f} to {max(loads):.0f}).",
    ]
    return "\n".join(lines) + "\n"


AREAS = ("peers", "services", "ends", "parts", "damages", "folders", "jobs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", default=AREAS, metavar="AREA", help=f"default: {' '.join(AREAS)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        training = functools.cache(lambda: Training(work / "training", "transformers"))
        areas: dict[str, Callable[[random.Random], Iterator[Injection]]] = {
            "peers": lambda rng: peers(),
            "services": services,
            "ends": lambda rng: ends(work, training()),
            "parts": lambda rng: parts(work),
            "damages": lambda rng: damages(work, training(), rng),
            "folders": lambda rng: folders(work, training()),
            "jobs": lambda rng: jobs(work, training()),
        }
        for area in given.areas:
            found, began = list[Injection](), time.monotonic()
            for one in areas[area](random.Random(given.seed)):
                found.append(one)
                print(
                    f"{'kept' if one.kept else 'NOT KEPT'}: {one.injected}: {one.seen} ({one.recovery_s:.1f} s)",
                    flush=True,
                )
                kept = kept and one.kept
                record(area, found, (time.monotonic() - began) / 60)
    sys.exit(not kept)


def record(area: str, found: list[Injection], minutes: float) -> None:
    """Replace the recorded injections of an area, and write the table into the page."""
    file = benchmark_file(RESULT)
    result = json.loads(file.read_text()) if file.exists() else {}
    result[area] = {
        "minutes": round(minutes, 1),
        "load": round(os.getloadavg()[0]),
        "injections": [asdict(one) for one in found],
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_part(PAGE.read_text(), "injections", table(result)))


if __name__ == "__main__":
    main()
