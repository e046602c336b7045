"""`rstar-lab bench scheduler`: makespans of the scheduling policies in the simulator, over a grid of workloads."""

import math
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import track

from benchmarks.process_pool import process_pool
from benchmarks.workloads import Regime, makespans
from rstar_lab.common.errors import UserError


class WorkloadGrid(BaseModel):
    """All combinations of the lists. The defaults are the reference grid."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: int = Field(8, ge=1)
    rollouts: int = Field(256, ge=1)
    kv_tokens: list[int] = [125_000, 250_000, 800_000]
    mean_tokens: list[float] = [1000, 3000, 6000]
    tool_s: list[float] = [0.1, 0.3, 4.0]
    max_turns: int = Field(10, ge=1)
    history: int = Field(8, ge=0)
    seeds: int = Field(3, ge=1)

    def regimes(self) -> list[Regime]:
        """Return the workloads of the grid."""
        shared = {
            "engines": self.engines,
            "rollouts": self.rollouts,
            "max_turns": self.max_turns,
            "history": self.history,
        }
        return [
            Regime(kv_tokens=kv, mean_tokens=mean, tool_s=tool, **shared)
            for kv, mean, tool in product(self.kv_tokens, self.mean_tokens, self.tool_s)
        ]


def read_grid(path: Path) -> WorkloadGrid:
    """Read a grid from a YAML file. Raises UserError with the key."""
    try:
        return WorkloadGrid(**(yaml.safe_load(path.read_text()) or {}))
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise UserError(f"{path}: not a YAML file with the keys of a workload grid: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {field}: {first['msg']}; keys are {', '.join(WorkloadGrid.model_fields)}") from None


def bench(grid: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield lines with geometric means of makespan ratios over the grid, and their 95% intervals over seeds.

    adaptive_over_best is the ratio in the worst workload. grid: YAML file with keys of WorkloadGrid.
    """
    chosen = read_grid(grid) if grid else WorkloadGrid()
    regimes = chosen.regimes()
    jobs = [(regime, seed) for seed in range(chosen.seeds) for regime in regimes]
    workers = min(len(os.sched_getaffinity(0)), len(jobs))
    with process_pool(workers) as pool:
        done = pool.map(makespans, *zip(*jobs, strict=True))
        times = list(track(done, "simulating", len(jobs), console=Console(stderr=True), transient=True))
    logs = {name: np.log([run[name] for run in times]).reshape(chosen.seeds, len(regimes)) for name in times[0]}
    others = np.min([logs[name] for name in ("turn-barrier", "static", "least-in-flight", "kv")], axis=0)
    ours = logs["adaptive"]
    yield _line("async_over_barrier", logs["turn-barrier"] - logs["least-in-flight"], "turn-barrier")
    yield _line("adaptive_over_least_in_flight", logs["least-in-flight"] - ours, "least-in-flight")
    yield _line("adaptive_over_best", others - ours, "best of the others", worst=True)
    yield _line("adaptive_over_bound", logs["bound"] - ours, "lower bound")
    yield _line("adaptive_no_history", logs["least-in-flight"] - logs["adaptive, no history"], "least-in-flight")
    yield _line("kv_over_least_in_flight", logs["least-in-flight"] - logs["kv"], "least-in-flight")


def _line(name: str, gain: np.ndarray, against: str, worst: bool = False) -> dict[str, Any]:
    """Return one line. gain: (seeds, regimes), logs of ratios. worst: report the worst regime (mean over seeds), not the mean."""
    by_seed = gain.mean(axis=1)
    ratio = math.exp(gain.mean(axis=0).min() if worst else gain.mean())
    line = {"name": name, "value": ratio, "unit": "x", "against": against, "ratio": ratio, "n": gain.size}
    if len(by_seed) > 1 and not worst:
        from scipy.stats import t

        half = t.ppf(0.975, len(by_seed) - 1) * by_seed.std(ddof=1) / math.sqrt(len(by_seed))
        line["interval"] = [math.exp(by_seed.mean() - half), math.exp(by_seed.mean() + half)]
    return line
