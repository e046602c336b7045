"""Send the metrics of each step to experiment trackers, in addition to the run store (recipe key `log_to`).

W&B reads its own environment variables, such as WANDB_MODE=offline and WANDB_PROJECT; its local files are in the folder of the run,
as those of TensorBoard. trackio writes to TRACKIO_DIR (default: its own folder). MLflow logs to MLFLOW_TRACKING_URI (default:
`mlflow.db` beside the run).
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError

PROJECT = "rstar_lab"
MLFLOW_TAG = "rstar_lab_run"  # of the run id; MLflow's own ids are random
MLFLOW_LENGTH, MLFLOW_BATCH = 500, 100  # limits of MLflow: characters of a parameter, parameters of a request
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
            for tracker in logs:
                tracker(step, numbers)

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


@contextmanager
def _trackio(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    trackio = _package("trackio")
    with redirect_stdout(sys.stderr):  # its messages would mix with the lines of `--json`
        run = trackio.init(project=PROJECT, name=run_dir.name, config=recipe, resume="allow", embed=False)
        try:
            yield lambda step, metrics: run.log(dict(metrics), step=step)
        finally:
            run.finish()


@contextmanager
def _mlflow(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    entities = _package("mlflow.entities")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.absolute().parent / 'mlflow.db'}"
    client = _package("mlflow").MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(PROJECT)
    experiment = found.experiment_id if found else client.create_experiment(PROJECT)
    known = client.search_runs([experiment], f"tags.{MLFLOW_TAG} = '{run_dir.name}'")
    run = known[0] if known else client.create_run(experiment, run_name=run_dir.name, tags={MLFLOW_TAG: run_dir.name})
    name = run.info.run_id
    if known:
        client.update_run(name, status="RUNNING")
    else:
        keys = [entities.Param(key, str(value)[:MLFLOW_LENGTH]) for key, value in _flat(recipe)]
        for start in range(0, len(keys), MLFLOW_BATCH):
            client.log_batch(name, params=keys[start : start + MLFLOW_BATCH])

    def log(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [entities.Metric(re.sub(r"[^\w\-. :/]", "_", key), value, now, step) for key, value in metrics.items()]
        client.log_batch(name, metrics=rows)

    try:
        yield log
    except BaseException:
        client.set_terminated(name, "FAILED")
        raise
    client.set_terminated(name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
