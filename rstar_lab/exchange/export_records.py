"""Read complete rollouts of runs, one step at a time, and report what an export left out."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rstar_lab.analysis.filters import Where
from rstar_lab.analysis.runs import Runs
from rstar_lab.runs import TRAJECTORIES, RunStoreError
from rstar_lab.runs.files import json_safe
from rstar_lab.runs.messages import read_messages

Row = dict[str, Any]
ARRAYS = ("engine_log_probs", "trainer_log_probs", "entropy")  # per response token
TOKENS = ("prompt_ids", "response_ids", "loss_mask", *ARRAYS)


@dataclass
class Exported:
    """What an export wrote.

    Attributes:
        path: File or folder that was written.
        written: Number of rollouts, rows or pairs.
        left_out: Number of rollouts that were left out, by reason.
        notes: What the format cannot hold.
    """

    path: Path
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> Row:
        """Return the fields as JSON values."""
        return {"path": str(self.path), "written": self.written, "left_out": dict(self.left_out), "notes": self.notes}


@dataclass
class Rollout:
    """A rollout with its transcript and calls, as JSON values. Its token arrays are None if the run does not store them."""

    trajectory: Row
    messages: list[Row]
    transcript: Row
    calls: list[Row]

    @property
    def traj_id(self) -> str:
        return str(self.trajectory["traj_id"])

    def spans(self) -> list[tuple[int, int]] | None:
        """Return [start, end) of each turn of the model in the response; None if they do not match the messages."""
        mask = self.transcript["loss_mask"]
        if mask is None or self.transcript["response_ids"] is None:
            return None
        spans, position = [], 0
        for by_model, tokens in groupby(mask):
            length = sum(1 for _ in tokens)
            if by_model:
                spans.append((position, position + length))
            position += length
        turns = sum(message["role"] == "assistant" for message in self.messages)
        return spans if len(spans) == turns else None


def read_rollouts(runs: Runs, where: Where, exported: Exported) -> Iterator[Rollout]:
    """Yield the rollouts that a filter selects, in the order of run, step, group and sample.

    Rollouts without a transcript are counted in `exported`. Raises RunStoreError for an invalid filter.
    """
    columns = ", ".join(f'"{name}"' for name in TRAJECTORIES.names)
    query = f"SELECT {columns} FROM trajectories WHERE {runs.condition(where)} ORDER BY run_id, step, group_id, sample, traj_id"
    for (run_id, step), rows in groupby(runs.arrow(query).to_pylist(), itemgetter("run_id", "step")):
        place = [run_id, step]
        stored = runs.arrow("SELECT * FROM transcripts WHERE run_id = ? AND step = ?", place).to_pylist()
        transcripts = {row["traj_id"]: row for row in stored}
        calls: dict[str, list[Row]] = {}
        with suppress(RunStoreError):  # the run has no calls
            query = 'SELECT * FROM calls WHERE run_id = ? AND step = ? ORDER BY turn, "index"'
            for call in runs.arrow(query, place).to_pylist():
                calls.setdefault(call["traj_id"], []).append(call)
        for row in rows:
            transcript = transcripts.get(row["traj_id"])
            if transcript is None:
                exported.left_out["no transcript"] += 1
                continue
            if row.get("metrics") is not None:
                row["metrics"] = dict(row["metrics"])
            text = transcript.pop("messages")
            messages = read_messages(text)
            for message, stored_message in zip(messages, json.loads(text), strict=True):
                if stored_message.get("control_token") is True:
                    message["control_token"] = True
            yield Rollout(json_safe(row), messages, json_safe(transcript), calls.get(row["traj_id"], []))
