"""Send the metrics of each step to experiment trackers, in addition to the run store (recipe key `log_to`).

W&B reads its own environment variables, such as WANDB_MODE=offline and WANDB_PROJECT. Local files are in the folder of the run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError

PROJECT = "rstar_lab"
Log = Callable[[int, Mapping[str, float]], None]


@contextmanager
def open_loggers(names: Sequence[str], run_dir: Path, recipe: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs (step, metrics) to the trackers `names`. A resumed run continues their runs.

    recipe: stored as the configuration of the run. Raises UserError if the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_TRACKERS[name](run_dir, dict(recipe))) for name in names]

        def log(step: int, metrics: Mapping[str, Any]) -> None:
            numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            for one in logs:
                one(step, numbers)

        yield log


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"log_to: the package {error.name} is not installed: pip install {name.partition('.')[0]}"
        ) from error


@contextmanager
def _tensorboard(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    writer = _package("torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with writer:
        yield log


@contextmanager
def _wandb(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    run = _package("wandb").init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=run_dir.name, id=run_dir.name, resume="allow", dir=str(run_dir),
        config=recipe,
    )  # fmt: skip
    try:
        yield lambda step, metrics: run.log(dict(metrics), step=step)
    finally:
        run.finish()


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}
