"""Send the metrics of each step to experiment trackers, in addition to the run store (recipe key `log_to`).

W&B, trackio and MLflow also get a table with a few rollouts of the step: outcomes, reward and the text. W&B reads its own
environment variables, such as WANDB_MODE=offline and WANDB_PROJECT; its local files are in the folder of the run, as those of
TensorBoard. trackio writes to TRACKIO_DIR (default: its own folder). MLflow logs to MLFLOW_TRACKING_URI (default: `mlflow.db`
beside the run, its tables in `mlflow-artifacts`).
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

from rstar_lab.common.errors import UserError
from rstar_lab.runs.messages import read_messages
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.parquet import parquet_batches
from rstar_lab.untrusted.text import escaped, printable

PROJECT = "rstar_lab"
MLFLOW_TAG = "rstar_lab_run"  # of the run id; MLflow's own ids are random
MLFLOW_LENGTH, MLFLOW_BATCH = 500, 100  # limits of MLflow: characters of a parameter, parameters of a request
ROLLOUTS, FIRST_ROWS = 8, 256  # rollouts in a table, and rollouts of a step among which they are selected
TEXT_CHARS = 20_000  # of a text in a table
_COLUMNS = ("traj_id", "problem_id", "reward", "kept", "errors", "outcomes", "stop_reason", "response_tokens")
Row = dict[str, Any]
Log = Callable[[int, Mapping[str, float], Sequence[Row]], None]


@contextmanager
def open_loggers(names: Sequence[str], run_dir: Path, recipe: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs (step, metrics, rollouts) to the trackers `names`. A resumed run continues their runs.

    recipe: stored as the configuration of the run. Raises UserError if the package of a tracker is not installed.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_TRACKERS[name](run_dir, dict(recipe))) for name in names]

        def log(step: int, metrics: Mapping[str, Any], rollouts: Sequence[Row] = ()) -> None:
            numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            for tracker in logs:
                tracker(step, numbers, rollouts)

        yield log


def sample_rollouts(run_dir: Path, step: int) -> list[Row]:
    """Return rows for a table: rollouts of a stored step, from different groups and half of them rewarded, where there are any.

    Only the first FIRST_ROWS rollouts of the step are read: transcripts are large.
    """
    reader, read = RunReader(run_dir), dict[str, dict[str, Row]]()
    for level, columns in (
        ("trajectories", (*_COLUMNS, "group_id")),
        ("transcripts", ("question", "truth", "messages")),
    ):
        found = next((file for file in reader.files(level) if file.steps == (step,)), None)
        if found is None:
            return []
        batch = next(parquet_batches(found.path, list({"traj_id", *columns}), FIRST_ROWS), None)
        read[level] = {row["traj_id"]: row for row in (batch.to_pylist() if batch is not None else [])}
    rows = [row for row in read["trajectories"].values() if row["traj_id"] in read["transcripts"]]
    place = {
        row["traj_id"]: sum(row["group_id"] == other["group_id"] for other in rows[:index])
        for index, row in enumerate(rows)
    }
    rows.sort(key=lambda row: place[row["traj_id"]])  # the first of each group, then the second of each group
    sides = [[row for row in rows if ((row["reward"] or 0) > 0) == rewarded] for rewarded in (True, False)]
    half = max(ROLLOUTS // 2, ROLLOUTS - len(sides[1]))
    chosen = [*sides[0][:half], *sides[1][: ROLLOUTS - min(half, len(sides[0]))]]
    return [_table_row(step, row, read["transcripts"][row["traj_id"]]) for row in chosen]


def _table_row(step: int, row: Row, transcript: Row) -> Row:
    text = "\n\n".join(f"[{m['role']}] {m['content']}" for m in read_messages(transcript["messages"]))
    texts = {"question": transcript["question"], "truth": transcript["truth"], "transcript": text}
    columns = {name: row[name] for name in _COLUMNS} | {"outcomes": ", ".join(row["outcomes"] or ())}
    return {"step": step, **columns, **{name: printable(value or "")[:TEXT_CHARS] for name, value in texts.items()}}


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

    def log(step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    with writer:
        yield log


@contextmanager
def _wandb(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    wandb = _package("wandb")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=run_dir.name, id=run_dir.name, resume="allow", dir=str(run_dir),
        config=recipe,
    )  # fmt: skip

    def log(step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        table = [[*row.values()] for row in rollouts]
        run.log({**metrics, **({"rollouts": wandb.Table([*rollouts[0]], table)} if rollouts else {})}, step=step)

    try:
        yield log
    finally:
        run.finish()


@contextmanager
def _trackio(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    trackio = _package("trackio")
    with redirect_stdout(sys.stderr):  # its messages would mix with the lines of `--json`
        run = trackio.init(project=PROJECT, name=run_dir.name, config=recipe, resume="allow", embed=False)

        def log(step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
            # Its page shows texts as Markdown and HTML.
            table = [
                [escaped(value).replace("[", "&#91;") if isinstance(value, str) else value for value in row.values()]
                for row in rollouts
            ]
            run.log({**metrics, **({"rollouts": trackio.Table([*rollouts[0]], table)} if rollouts else {})}, step=step)

        try:
            yield log
        finally:
            run.finish()


@contextmanager
def _mlflow(run_dir: Path, recipe: dict[str, Any]) -> Iterator[Log]:
    entities = _package("mlflow.entities")
    runs_dir, own = run_dir.absolute().parent, os.environ.get("MLFLOW_TRACKING_URI")
    uri = own or f"sqlite:///{runs_dir / 'mlflow.db'}"
    client = _package("mlflow").MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(PROJECT)
    artifacts = None if own else (runs_dir / "mlflow-artifacts").as_uri()  # default: the working directory
    experiment = found.experiment_id if found else client.create_experiment(PROJECT, artifact_location=artifacts)
    known = client.search_runs([experiment], f"tags.{MLFLOW_TAG} = '{run_dir.name}'")
    run = known[0] if known else client.create_run(experiment, run_name=run_dir.name, tags={MLFLOW_TAG: run_dir.name})
    name = run.info.run_id
    if known:
        client.update_run(name, status="RUNNING")
    else:
        keys = [entities.Param(key, str(value)[:MLFLOW_LENGTH]) for key, value in _flat(recipe)]
        for start in range(0, len(keys), MLFLOW_BATCH):
            client.log_batch(name, params=keys[start : start + MLFLOW_BATCH])

    def log(step: int, metrics: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        rows = [entities.Metric(re.sub(r"[^\w\-. :/]", "_", key), value, now, step) for key, value in metrics.items()]
        client.log_batch(name, metrics=rows)
        if rollouts:
            table = {column: [row[column] for row in rollouts] for column in rollouts[0]}
            client.log_table(name, table, f"rollouts/step-{step:06d}.json")

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
