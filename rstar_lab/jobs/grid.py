"""A grid of runs for an ablation: every arm with every seed, as jobs, one after the other; what is finished is not done again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.jobs.job import Job, JobStatus, submit
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
    say: Callable[[str], None] = print,
) -> list[str]:
    """Train all arms from one model and return the ids of their runs.

    The recipe's SFT is done once, as run `<name>-sft`; every run starts from its model. arms: name of an arm -> recipe keys;
    it becomes the recipe's `label`, by which figures group runs. overrides: for all of them, the SFT included.
    Interrupted, the same call goes on. Raises UserError where a job fails.
    """
    runs = Path(runs_dir)
    common = dict(overrides or {})
    model = runs / f"{name}-sft" / "sft" / "model"
    if not (model / "config.json").exists():
        _wait(submit(recipe, profile, common, command="sft", runs_dir=runs, name=name, say=say))
    total, done, made = len(arms) * len(seeds), 0, []
    for seed in seeds:
        for arm, keys in arms.items():
            run = "".join(c if c.isalnum() else "-" for c in f"{name}-{arm}-s{seed}".lower())
            made.append(f"{run}-rl")
            done += 1
            folder = runs / f"{run}-rl"
            if (folder / "run.json").exists() and RunReader(folder).status == "finished":
                continue
            say(f"{done}/{total}: {arm}, seed {seed}")
            own = {"model": str(model.resolve()), "sft": None, "seed": seed, "label": arm}
            keys = common | dict(keys) | own
            # The recipe was checked when the SFT was submitted.
            job = submit(recipe, profile, keys, command="train", runs_dir=runs, name=run, preflight=False, say=say)
            _wait(job)
    return made


def _wait(job: Job) -> None:
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.stop()
        raise
    if status is not JobStatus.FINISHED:
        raise UserError(f"job {job.id} {status}; its log ends: {job.logs(tail=3).strip()}")
