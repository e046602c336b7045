"""Requests and results of the panels that run a model: the most likely tokens, and continuations from a turn."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.inspector.listing import to_json_value
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs.messages import own_texts
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.text import visible

if TYPE_CHECKING:
    from rstar_lab.analysis.forks import Fork

_END = re.compile(r"(?<!\s)\s*+<\|[a-z_]+\|>\s*$")


def alternatives_model(weights: str, source: Source, traj_id: str) -> dict[str, Any]:
    """Return the argument `model` or `url` of `Inspector.alternatives` for the text of the panel's field.

    weights: a model folder, the URL of a server, or empty for the run's nearest checkpoint. Raises UserError if it is
    empty and the run has no checkpoint.
    """
    if not weights:
        _require_checkpoint(source, traj_id, "enter a model folder or the URL of a server")
    return _model_argument(weights)


def fork_model(weights: str, source: Source, traj_id: str) -> dict[str, Any]:
    """Return the argument `model` or `url` of `Inspector.fork` for the text of the panel's field.

    weights: as in `alternatives_model`. A server also requires a checkpoint, whose tokenizer encodes the edited text.
    """
    if not weights:
        _require_checkpoint(source, traj_id, "enter a model folder")
    elif "url" in _model_argument(weights):
        _require_checkpoint(source, traj_id, "a server needs its tokenizer; enter a model folder instead of a URL")
    return _model_argument(weights)


def _model_argument(weights: str) -> dict[str, Any]:
    return {"url": weights} if weights.startswith(("http://", "https://")) else {"model": weights or None}


def _require_checkpoint(source: Source, traj_id: str, advice: str) -> None:
    run_id = source.row(traj_id)["run_id"]
    folder = source.run_dir(run_id)
    if folder is not None and not RunReader(folder).checkpoints():
        raise UserError(f"run {run_id} has no checkpoint: {advice}")


def turn_text(record: Mapping[str, Any], turn: int) -> str:
    """Return the text that the model wrote in a turn (from 0), without the special token at its end."""
    written = own_texts(record.get("messages"))
    return _END.sub("", written[turn]) if turn < len(written) else ""


def alternatives_table(
    run_dir: Path, traj_id: str, position: int, *, k: int, model: Path | None, url: str
) -> pd.DataFrame:
    """Return the table of `Inspector.alternatives`. run_dir: folder of the run."""
    from rstar_lab.rl.engines.alternatives import most_likely_tokens  # imports torch

    reader, runs = RunReader(run_dir), open_runs(run_dir)
    record = runs.record(traj_id)
    prompt, response = record["prompt_ids"], record["response_ids"]
    if prompt is None or response is None:
        raise UserError(f"trajectory {traj_id} has no token arrays, which alternatives need: see rl.token_arrays")
    if not 0 <= position < len(response):
        raise UserError(f"position {position}: trajectory {traj_id} has the response tokens 0 to {len(response) - 1}")
    if model is None and not url:
        model = reader.nearest_checkpoint(record["step"])
    likely = most_likely_tokens([*prompt, *response[:position]], response[position], k=k, model=model, url=url)
    ids = list(likely.log_probs)
    frame = pd.DataFrame({"token_id": ids, "text": runs.texts(reader.run_id, ids) or [None] * len(ids)})
    frame["log_prob"] = list(likely.log_probs.values())
    frame.insert(0, "rank", [likely.rank if token == likely.token_id else i + 1 for i, token in enumerate(ids)])
    frame.insert(3, "probability", np.exp(frame.log_prob))
    frame["stored"] = frame.token_id == likely.token_id
    frame.attrs = {"weights": likely.weights}
    return frame


def alternatives_payload(frame: pd.DataFrame) -> dict[str, Any]:
    """Convert the result of `Inspector.alternatives` to JSON values: its rows, and the model or server that computed them."""
    rows = frame.astype({"text": object}).to_dict("records")
    for row in rows:
        row["text"] = None if pd.isna(row["text"]) else visible(row["text"])
    return {"rows": rows, "weights": frame.attrs["weights"]}


def fork_payload(forked: "Fork") -> dict[str, Any]:
    """Return values, continuations (tree) and provenance of a fork as JSON values. Turns are numbered from 0."""
    values, tree = (
        [{str(name): to_json_value(value) for name, value in row.items()} for row in frame.to_dict("records")]
        for frame in (forked.values, forked.tree)
    )
    return {
        "values": values, "tree": tree, "lost_at": forked.lost_at, "reward": forked.reward,
        "run": forked.run.name, "weights": forked.weights, "differing": forked.differing,
    }  # fmt: skip
