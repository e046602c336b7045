"""`rstar-lab bench store`: queries on 8 million trajectories and 100,000 transcripts, compared with pandas.

Both read the same files. pandas uses `read_parquet` with the required columns and row filters. Each side runs in its own
process, so that its peak memory is measured separately. rstar_lab has the caches of an open store: the rollups (one row
per step) and the texts of the last search. `open` is the time to open the store and compute the first curves; each page
is counted, sorted and read without a cache.
"""

import itertools
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.synthetic_store import LONG_TOKENS, NEEDLE, STAGE, Size, make_store

_TEN = (
    "pass1", "tool_error_rate", "response_tokens", "model_tokens", "turns", "truncation_rate", "entropy", "log_prob_gap",
    "reflection_tokens", "kept",
)  # fmt: skip
# Columns that pandas reads for a page. The inspector's list reads twice as many.
_SHOWN = ("traj_id", "run_id", "step", "problem_id", "reward", "kept", "errors", "calls", "response_tokens", "entropy")
_FILTER = "reward > 0 AND errors >= 2"
_RUN, _STEPS = "run007", (3, 22)
_LONG = "run000/000001/00000"
_opened: dict[str, float] = {}
_QUERIES = {
    "curves": "ten metrics over all runs",
    "page": "a page of the inspector's list and its length: filtered, newest first",
    "page_by_length": "the same, sorted by response length",
    "transcript": f"a transcript of {LONG_TOKENS} tokens by id",
    "search": "a word in 20 steps of one run, after an earlier search in the same steps",
    "search_first": "the same, as the first search",
}


_MAX_PANDAS_ROWS = 20_000_000  # pandas reads all rows into memory: 1.4 GB for 8 million


def sized(rows: int) -> Size:
    """Return a store of about `rows` trajectories in runs of 200,000, with 100,000 transcripts or a few more."""
    runs = max(8, round(rows / 200_000))  # the search reads run 7
    return Size(runs=runs, transcripts=max(1, 100_000 // (25 * runs)))


def bench(rows: int = 8_000_000, size: Size | None = None) -> Iterator[dict[str, Any]]:
    """Yield one line per query (value and against in ms; n: trajectories or transcripts) and the peak memory in GB.

    rows: number of trajectories; with more than 20 million, pandas is not measured. size: replaces rows.
    Requires about 2 GB of disk in the temporary folder for 8 million rows, 6 GB for 100 million.
    """
    size = size or sized(rows)
    with tempfile.TemporaryDirectory(prefix="rstar-lab-bench-") as folder:
        root = Path(folder)
        started = time.perf_counter()
        make_store(root, size, _progress)
        seconds = time.perf_counter() - started
        n = size.all_rollouts
        yield {"name": "make", "value": seconds, "unit": "s", "against": None, "ratio": None, "n": n}
        ours = _run_side("ours", root)
        theirs = _run_side("pandas", root) if n <= _MAX_PANDAS_ROWS else None
        for name in _QUERIES:
            if theirs and ours["answers"][name] != theirs["answers"][name]:
                raise AssertionError(f"{name}: the results of the two sides differ: {ours}, {theirs}")
            rows_read = size.all_transcripts if name in ("transcript", "search") else n
            yield _line(name, "ms", rows_read, ours["ms"][name], theirs["ms"][name] if theirs else None)
        yield _line("open", "ms", n, ours["open_ms"])
        yield _line("memory", "GB", n, ours["memory_gb"], theirs["memory_gb"] if theirs else None)


def _line(name: str, unit: str, n: int, ours: float, theirs: float | None = None) -> dict[str, Any]:
    ratio = None if theirs is None else theirs / ours
    return {"name": name, "value": ours, "unit": unit, "against": theirs, "ratio": ratio, "n": n}


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rmaking run {done} of {total}", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _run_side(side: str, root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.store", side, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return json.loads(done.stdout)


def _ours(root: Path) -> dict[str, Callable[[], Any]]:
    from rstar_lab.analysis.inspector.source import Source
    from rstar_lab.analysis.metrics import curves
    from rstar_lab.analysis.runs import open_runs

    runs = open_runs(root)
    rows = Source(runs)
    started = time.perf_counter()
    curves(open_runs(root), _TEN)
    _opened["ms"] = 1000 * (time.perf_counter() - started)

    def all_curves() -> Any:
        frame = curves(runs, _TEN)
        return len(frame), round(float(frame.pass1.mean()), 4), round(float(frame.response_tokens.mean()), 2)

    def page(*sort: Any) -> Any:
        """Return a page without cached counts, as after a change of filter or order."""
        rows.refresh()
        listed = rows.page(_FILTER, sort, 1000, 100)
        return rows.count(_FILTER), [row["traj_id"] for row in listed[:3]]

    others = itertools.count(10**6)

    def first_search() -> Any:
        return search(f" AND step < {next(others)}")  # the same steps, but a condition that is not cached

    def search(more: str = "") -> Any:
        hits = runs.search(NEEDLE, f"run_id = '{_RUN}' AND step BETWEEN {_STEPS[0]} AND {_STEPS[1]}{more}")
        return sorted(hits.traj_id)

    return {
        "curves": all_curves,
        "page": page,
        "page_by_length": lambda: page("response_tokens", True),
        "transcript": lambda: len(runs.transcript(_LONG)),
        "search": search,
        "search_first": first_search,
    }


def _pandas(root: Path) -> dict[str, Callable[[], Any]]:
    import pandas as pd

    def files(level: str, run: str = "*") -> list[Path]:
        return sorted(root.glob(f"{run}/{level}/stage={STAGE}/*.parquet"))

    def read(level: str, columns: list[str], run: str = "*", filters: Any = None) -> pd.DataFrame:
        parts = [
            pd.read_parquet(path, columns=columns, filters=filters, partitioning=None) for path in files(level, run)
        ]
        return pd.concat(parts, ignore_index=True)

    def all_curves() -> Any:
        columns = [
            "run_id", "step", "reward", "errors", "calls", "response_tokens", "model_tokens", "turns", "truncated",
            "entropy", "engine_log_prob", "trainer_log_prob", "reflection_tokens", "kept",
        ]  # fmt: skip
        frame = read("trajectories", columns).groupby(["run_id", "step"]).mean()
        return len(frame), round(float(frame.reward.mean()), 4), round(float(frame.response_tokens.mean()), 2)

    newest = ["step", "run_id", "group_id", "sample", "traj_id"]

    def page(order: list[str], ascending: list[bool]) -> Any:
        columns = list(dict.fromkeys([*_SHOWN, *order]))
        frame = read("trajectories", columns, filters=[("reward", ">", 0), ("errors", ">=", 2)])
        shown = frame.sort_values(order, ascending=ascending).iloc[1000:1100]
        return len(frame), shown.traj_id.tolist()[:3]

    def transcript() -> Any:
        row = read("transcripts", ["messages"], filters=[("traj_id", "==", _LONG)]).iloc[0]
        return len(json.loads(row.messages))

    def search() -> Any:
        rows = [("step", ">=", _STEPS[0]), ("step", "<=", _STEPS[1])]
        frame = read("transcripts", ["traj_id", "messages"], _RUN, rows)
        return sorted(frame[frame.messages.str.contains(NEEDLE, case=False, regex=False)].traj_id)

    return {
        "curves": all_curves,
        "page": lambda: page(newest, [False, True, True, True, True]),
        "page_by_length": lambda: page(["response_tokens", *newest], [False, False, True, True, True, True]),
        "transcript": transcript,
        "search": search,
        "search_first": search,
    }


def _measure(queries: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    times: dict[str, float] = {}
    answers = {}
    for name, query in queries.items():
        answers[name] = query()  # the first call fills the page cache of the disk
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            query()
            seconds.append(time.perf_counter() - started)
        times[name] = 1000 * statistics.median(seconds)
    return {"open_ms": _opened.get("ms"), "ms": times, "answers": answers, "memory_gb": _peak_memory_gb()}


def _peak_memory_gb() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss starts at the size of the parent process
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 2**20  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    side, folder = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(_measure(_ours(folder), 5) if side == "ours" else _measure(_pandas(folder), 3)))
