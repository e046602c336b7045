"""Send the metrics of each step to experiment trackers, in addition to the run store (recipe key `log_to`).

W&B reads its own environment variables, such as WANDB_MODE=offline; its local files are in the folder of the run, as those of
TensorBoard. trackio has the functions of W&B and writes to TRACKIO_DIR (default: its own folder).
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError

PROJECT = "rstar_lab"  # in W&B and trackio, without WANDB_PROJECT
Log = Callable[[int, Mapping[str, Any]], None]


@contextmanager
def open_loggers(names: Sequence[str], run_dir: Path, recipe: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs (step, metrics) to the trackers `names`. A resumed run continues their runs.

    recipe: stored as the configuration of the run. Raises UserError if the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        opened = [_tensorboard(run_dir) if name == "tensorboard" else _wandb(name, run_dir, recipe) for name in names]
        logs = [stack.enter_context(tracker) for tracker in opened]

        def log(step: int, metrics: Mapping[str, Any]) -> None:
            numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            for tracker in logs:
                tracker(step, numbers)

        yield log


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise UserError(f"log_to: the package {error.name} is not installed: pip install {package}") from error


@contextmanager
def _tensorboard(run_dir: Path) -> Iterator[Log]:
    writer = _package("torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with writer:
        yield log


@contextmanager
def _wandb(name: str, run_dir: Path, recipe: Mapping[str, Any]) -> Iterator[Log]:
    """Log to W&B, or to trackio, which has its functions."""
    options = {"id": run_dir.name, "dir": str(run_dir)} if name == "wandb" else {"embed": False}
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    with redirect_stdout(sys.stderr):  # messages of trackio would mix with the lines of `--json`
        package = _package(name)
        run = package.init(project=project, name=run_dir.name, config=dict(recipe), resume="allow", **options)
        try:
            yield lambda step, metrics: run.log(dict(metrics), step=step)
        finally:
            run.finish()
