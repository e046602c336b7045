"""Run a grid for an ablation: every arm with every seed, as jobs that start from one SFT model.

A detached process keeps a number of jobs running. It outlives the notebook, and the same call again runs only missing runs.
"""

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, exit_with_message
from rstar_lab.hardware.ends import end_like_ctrl_c
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.jobs.backend import JobStatus
from rstar_lab.jobs.job import Job, list_jobs, submit
from rstar_lab.jobs.local import Local
from rstar_lab.jobs.store import JobFolder, JobSpec, check_name
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.files import read_json

ERROR_LINE = re.compile(r"^(error: .*|[\w.]*(?:Error|Exception|Interrupt)\b.*)", re.MULTILINE)
POLL_S = 1.0
Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class GridPlan:
    """The runs of a grid. arms: name -> recipe keys; the name becomes the recipe's `label`, by which figures group
    runs. overrides: recipe keys of all runs, including the SFT. concurrency: RL jobs at a time.
    """

    name: str
    recipe: str
    profile: str
    runs_dir: str
    arms: dict[str, dict[str, Any]]
    seeds: list[int]
    overrides: dict[str, Any]
    concurrency: int

    @classmethod
    def of(
        cls, recipe: str | Path, arms: Arms, seeds: Sequence[int], *, runs_dir: str | Path = "runs", profile: str = "laptop",
        overrides: Mapping[str, Any] | None = None, name: str = "ablation", concurrency: int | None = None,
    ) -> "GridPlan":  # fmt: skip
        """Return the plan of the arguments of `submit_grid`."""
        has_queue = load_profile(profile).backend == "slurm"
        return cls(
            check_name(name, "name of the grid"), str(recipe), profile, str(Path(runs_dir).absolute()),
            {arm: dict(keys) for arm, keys in arms.items()}, list(seeds), dict(overrides or {}),
            concurrency or (len(arms) * len(seeds) if has_queue else 1),
        )  # fmt: skip

    def __post_init__(self) -> None:
        names = [self.run_name(arm, seed) for arm, seed in self.cells()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"grid {self.name}: two runs would be called {twice}: letters and digits of the arms, or seeds, are equal"
            )

    def cells(self) -> list[tuple[str, int]]:
        """Return (arm, seed) of every run: all arms of the first seed first, so that early results compare arms."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    def run_name(self, arm: str, seed: int) -> str:
        return re.sub(r"[^a-z0-9]", "-", f"{self.name}-{arm}-s{seed}".lower())

    @property
    def model(self) -> Path:
        """The SFT model from which every arm starts."""
        return Path(self.runs_dir) / f"{self.name}-sft" / "sft" / "model"

    @property
    def has_model(self) -> bool:
        return (self.model / "config.json").exists()

    def finished(self, arm: str, seed: int) -> bool:
        folder = Path(self.runs_dir) / f"{self.run_name(arm, seed)}-rl"
        return (folder / "run.json").exists() and RunReader(folder).status == "finished"

    def keys(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the overrides of one run."""
        own = {"model": str(self.model.resolve()), "sft": None, "seed": seed, "label": arm}
        return self.overrides | self.arms[arm] | own


class Grid:
    """The jobs of a submitted grid. They are found in the runs folder, so another notebook can create the same
    object."""

    def __init__(self, name: str, runs_dir: str | Path):
        self.name, self.runs_dir = name, Path(runs_dir).absolute()

    def jobs(self) -> list[Job]:
        """Return the newest job of each run of the grid, the SFT first."""
        newest = {job.spec.run: job for job in list_jobs(self.runs_dir) if job.spec.grid == self.name}
        return list(newest.values())

    def live(self) -> dict[str, Job]:
        """Return {run: job} of the jobs that have not ended."""
        return {str(job.spec.run): job for job in self.jobs() if not job.status_or_unknown().ended}

    def status(self) -> dict[str, str]:
        """Return {run: status} of the jobs so far."""
        return {str(job.spec.run): str(job.status_or_unknown()) for job in self.jobs()}

    def failures(self) -> dict[str, list[str]]:
        """Return {first error line: runs} of the failed jobs, the most frequent error first."""
        groups = defaultdict(list)
        for job in self.jobs():
            if job.status_or_unknown() is JobStatus.FAILED:
                log = job.logs()
                found = ERROR_LINE.search(log)
                groups[found[0] if found else (log.strip().splitlines() or ["no output"])[-1]].append(str(job.spec.run))
        return dict(sorted(groups.items(), key=lambda item: -len(item[1])))

    def stop(self) -> None:
        """End the process that submits the grid, and all its jobs."""
        for job in list_jobs(self.runs_dir):
            if job.spec.grid == self.name or job.spec.run == f"{self.name}-grid":
                job.stop()


def submit_grid(recipe: str | Path, arms: Arms, seeds: Sequence[int], **options: Any) -> Grid:
    """Start a grid and return. Runs that are finished are skipped, so the same call continues a grid.

    The SFT of the recipe runs once, as run `<name>-sft`; every RL run starts from its model.

    Args:
        recipe: File, or a name that `rstar-lab recipes` lists.
        arms: Name of an arm -> its recipe keys.
        seeds: Seeds of the runs of each arm.
        options: `runs_dir`, `profile` and `overrides` (recipe keys of all runs), as of `submit`; `name` of the grid, by default
            `ablation`; `concurrency`, the RL jobs at a time, by default all on Slurm, else 1.

    Raises:
        UserError: For an unknown profile or a recipe that fails preflight.
    """
    plan = GridPlan.of(recipe, arms, seeds, **options)
    run = f"{plan.name}-grid"
    controllers = [job for job in list_jobs(plan.runs_dir) if job.spec.run == run]
    if any(not job.status_or_unknown().ended for job in controllers):
        raise UserError(f"grid {plan.name} is already running; stop it first, or use another name")
    job_id = f"{run}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = JobFolder.of(Path(plan.runs_dir), job_id)
    # The process that runs the grid is a job of this machine, so `jobs list` shows it.
    spec = JobSpec(
        id=job_id, recipe=plan.recipe, profile=plan.profile, backend="local",
        command=[sys.executable, "-m", "rstar_lab.jobs.grid", str(folder.path / "grid.json")], cwd=str(Path.cwd()),
        runs_dir=plan.runs_dir, overrides=plan.overrides, run=run,
    )  # fmt: skip
    folder.save(spec)
    folder.write("grid.json", asdict(plan))
    Local().start(folder, spec)
    return Grid(plan.name, plan.runs_dir)


def run_grid(
    recipe: str | Path, arms: Arms, seeds: Sequence[int], *, log: Callable[[str], None] = print, **options: Any
) -> list[str]:
    """Run a grid to its end and return the ids of its RL runs. Args: as of `submit_grid`.

    Ctrl-C stops the running jobs; the same call continues the grid. A failed run does not stop the others. Raises
    UserError at the end if runs failed, with their errors.
    """
    return _run(GridPlan.of(recipe, arms, seeds, **options), log)


def _run(plan: GridPlan, log: Callable[[str], None]) -> list[str]:
    grid = Grid(plan.name, plan.runs_dir)
    running: list[Job] = []
    options: dict[str, Any] = {"runs_dir": plan.runs_dir, "grid": plan.name, "log": log}
    try:
        if not plan.has_model:
            running = [submit(plan.recipe, plan.profile, plan.overrides, command="sft", name=plan.name, **options)]
            _wait_for_one(running)
            if not plan.has_model:
                raise UserError(f"the SFT of grid {plan.name} failed: {'; '.join(grid.failures())}")
        live, cells = grid.live(), plan.cells()
        for number, (arm, seed) in enumerate(cells, 1):
            if plan.finished(arm, seed):
                continue
            while len(running) >= plan.concurrency:
                _wait_for_one(running)
            log(f"{number}/{len(cells)}: {arm}, seed {seed}")
            name, keys = plan.run_name(arm, seed), plan.keys(arm, seed)
            # A job of an earlier call may still be running if the process that started it was killed.
            if (job := live.get(f"{name}-rl")) is None:  # the recipe was checked when the SFT was submitted
                job = submit(plan.recipe, plan.profile, keys, command="train", name=name, preflight=False, **options)
            running.append(job)
        while running:
            _wait_for_one(running)
    except BaseException:
        for job in running:
            job.stop()
        raise
    if failures := grid.failures():
        groups = "; ".join(f"{line} ({', '.join(runs)})" for line, runs in failures.items())
        raise UserError(f"grid {plan.name}: {groups}. The same call runs the missing runs")
    return [f"{plan.run_name(arm, seed)}-rl" for arm, seed in cells]


def _wait_for_one(running: list[Job]) -> None:
    """Wait until a job has ended and remove it from the list."""
    while True:
        for job in running:
            if job.status().ended:
                running.remove(job)
                return
        time.sleep(POLL_S)


def main(path: str) -> None:
    """Run the grid of a grid.json. SIGTERM also stops its running jobs."""
    end_like_ctrl_c()
    with exit_with_message():
        _run(read_json(path, GridPlan), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
