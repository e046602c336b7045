"""Run a grid for an ablation: every arm with every seed, as jobs, one after the other. Finished runs are skipped."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.jobs.job import Job, JobStatus
from rstar_lab.jobs.submit import submit
from rstar_lab.runs.reader import RunReader


def run_grid(
    recipe: str | Path,
    arms: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    *,
    runs_dir: str | Path = "runs",
    profile: str = "laptop",
    overrides: Mapping[str, Any] | None = None,
    name: str = "ablation",
    log: Callable[[str], None] = print,
) -> list[str]:
    """Train all arms from one model and return the ids of their runs.

    The recipe's SFT runs once, as run `<name>-sft`; every RL run starts from its model.

    arms: name of an arm -> recipe keys. The name becomes the recipe's `label`, by which figures group runs.
    overrides: recipe keys of all runs, the SFT included.
    After an interrupt, the same call continues. Raises UserError if a job fails.
    """
    runs = Path(runs_dir)
    common = dict(overrides or {})
    model = runs / f"{name}-sft" / "sft" / "model"
    if not (model / "config.json").exists():
        _wait(submit(recipe, profile, common, command="sft", runs_dir=runs, name=name, log=log))
    total, number, run_ids = len(arms) * len(seeds), 0, []
    for seed in seeds:
        for arm, keys in arms.items():
            run = "".join(c if c.isalnum() else "-" for c in f"{name}-{arm}-s{seed}".lower())
            run_ids.append(f"{run}-rl")
            number += 1
            folder = runs / f"{run}-rl"
            if (folder / "run.json").exists() and RunReader(folder).status == "finished":
                continue
            log(f"{number}/{total}: {arm}, seed {seed}")
            keys_of_run = {"model": str(model.resolve()), "sft": None, "seed": seed, "label": arm}
            keys = common | dict(keys) | keys_of_run
            # The recipe was checked when the SFT was submitted.
            job = submit(recipe, profile, keys, command="train", runs_dir=runs, name=run, preflight=False, log=log)
            _wait(job)
    return run_ids


def _wait(job: Job) -> None:
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.stop()
        raise
    if status is not JobStatus.FINISHED:
        raise UserError(f"job {job.id} {status}; the end of its log: {job.logs(tail=3).strip()}")
