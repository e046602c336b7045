"""Write the transcripts of a step in a separate process, `TranscriptWriter`, to which the agent-loop workers send them.

The trainer's process never holds the tokens and texts of a step: it selects, measures and commits the step from a table
of numbers. The writer holds the transcripts of one step in compact form (about 14 bytes per token) and writes them while
the model is updated.
"""

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import ray
import transfer_queue as tq

from rstar_lab.rl.rollout.agent_loop import ANSWER_TAG
from rstar_lab.rl.rollout.records import NOT_KEPT, call_rows, mean_over, trajectory_row, transcript_row
from rstar_lab.rl.step import Mismatch
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.tables import table_of
from rstar_lab.runs.writer import write_parts

_AT_ONCE = 256  # rollouts


@dataclass(frozen=True, slots=True)
class RolloutNumbers:
    """The data of a rollout in the trainer's process. outline: used by the selection and the metrics; see `outline`.
    row, calls: rows of the run store, without the labels of training. ended_at: Unix time. retried: number of further attempts.
    """

    outline: Trajectory
    row: dict[str, Any]
    calls: list[dict[str, Any]]
    ended_at: float = 0.0
    retried: int = 0


def split(trajectory: Trajectory, *, with_texts: bool, retried: int = 0) -> tuple[RolloutNumbers, bytes]:
    """Return the numbers of a rollout and its pickled transcript. with_texts: if True, the outline is the trajectory itself."""
    row = transcript_row(trajectory, NOT_KEPT, arrays=True) | {
        "sample": trajectory.sample,
        "prompt_ids": np.asarray(trajectory.prompt_ids, np.int32),
        "response_ids": np.asarray(trajectory.response_ids, np.int32),
        "loss_mask": np.asarray(trajectory.loss_mask, bool),
        "engine_log_probs": np.asarray(trajectory.log_probs, np.float32),
        "versions": _versions(trajectory),
    }
    kept = trajectory if with_texts else outline(trajectory)
    numbers = RolloutNumbers(kept, trajectory_row(trajectory, NOT_KEPT), call_rows(trajectory), time.time(), retried)
    return numbers, pickle.dumps(row)


def _versions(trajectory: Trajectory) -> np.ndarray:
    """Return the policy version of each token; one element if all have the same."""
    versions = {version for turn in trajectory.turns for version, _ in turn.versions}
    if versions <= {trajectory.policy_version}:
        return np.array([trajectory.policy_version], np.int32)
    return np.asarray(trajectory.token_versions, np.int32)


def outline(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without tokens and texts. Ids and log-probs become ranges of the same length. The text keeps only
    its answer tags, which the metrics count."""
    return replace(
        trajectory,
        prompt_ids=range(len(trajectory.prompt_ids)),  # type: ignore[arg-type]
        response_ids=range(len(trajectory.response_ids)),  # type: ignore[arg-type]
        log_probs=range(len(trajectory.log_probs)),  # type: ignore[arg-type]
        loss_mask=np.asarray(trajectory.loss_mask, bool),  # type: ignore[arg-type]
        question="",
        text=ANSWER_TAG * trajectory.text.count(ANSWER_TAG),
        turns=tuple(replace(turn, text="", observation="") for turn in trajectory.turns),
        calls=tuple(replace(call, code="", response="") for call in trajectory.calls),
    )


@dataclass(frozen=True, slots=True)
class TrainerValues:
    """Results that the writer computes from the trainer's log-probs of the kept rollouts.

    mismatch: of the log-probs of engine and trainer, over the model's tokens.
    means: by traj_id, mean log-prob and mean entropy over the model's tokens.
    """

    mismatch: Mismatch = field(default_factory=Mismatch)
    means: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


class TranscriptWriter:
    """Holds the transcripts of a run until they are written; a Ray actor."""

    def __init__(self) -> None:
        tq.init()
        self.rows: dict[str, bytes] = {}
        self.trainer_arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.errors: list[str] = []

    def add_error(self, text: str) -> None:
        """Store the error of a rollout that ended with an exception."""
        self.errors.append(text)

    def first_error(self) -> str | None:
        """Return the first error of a rollout, or None. verl only logs the error and continues without the rollout."""
        return self.errors[0] if self.errors else None

    def add(self, traj_id: str, row: bytes) -> None:
        """Store the transcript of a rollout that has ended; see `split`."""
        self.rows[traj_id] = row

    def add_trainer_values(self, keys: Mapping[str, str], version: int) -> TrainerValues:
        """Read log-probs and entropy of the kept rollouts from the transfer queue.

        keys: traj_id -> key in the queue. version: that of the weights with which the trainer computed the log-probs.
        """
        means: dict[str, tuple[float | None, float | None]] = {}
        gaps: list[np.ndarray] = []
        current: list[np.ndarray] = []
        for names in _parts_of(list(keys)):
            data = tq.kv_batch_get(
                keys=[keys[name] for name in names], partition_id="train", select_fields=["old_log_probs", "entropy"]
            )
            for name, log_probs, entropy in zip(names, data["old_log_probs"], data["entropy"], strict=True):
                row = pickle.loads(self.rows[name])
                mask = row["loss_mask"]
                arrays = [np.where(mask, values.float().numpy(), np.nan) for values in (log_probs, entropy)]
                self.trainer_arrays[name] = (arrays[0].astype(np.float16), arrays[1].astype(np.float16))
                means[name] = (mean_over(arrays[0], mask), mean_over(arrays[1], mask))
                gaps.append(np.abs(arrays[0].astype(np.float32) - row["engine_log_probs"])[mask])
                current.append(np.broadcast_to(row["versions"] >= version, mask.shape)[mask])
        return TrainerValues(Mismatch.of(gaps, current), means)

    def write(
        self,
        path: Path,
        fill: Mapping[str, Any],
        names: Sequence[str],
        kept: Sequence[str],
        token_arrays: Literal["all", "kept", "sampled"],
    ) -> int:
        """Write the transcripts of the step, release them, and return their number. The transcripts of later steps stay.

        path: file of the step. fill: run, stage and step. names: traj_ids of the step; kept: traj_ids of the rollouts
        that are trained on. token_arrays: see `step_rows`. The file becomes part of the run when the trainer commits the step.
        """
        count = write_parts(path, "transcripts", self._parts(fill, names, set(kept), token_arrays))
        for name in names:
            del self.rows[name]
        self.trainer_arrays.clear()
        return count

    def _parts(
        self, fill: Mapping[str, Any], names: Sequence[str], kept: set[str], token_arrays: str
    ) -> Iterator[pa.Table]:
        for part in _parts_of(sorted(names)):
            rows = []
            for name in part:
                row = pickle.loads(self.rows[name])
                row["trainer_log_probs"], row["entropy"] = self.trainer_arrays.get(name, (None, None))
                if not {"all": True, "kept": name in kept, "sampled": row["sample"] == 0}[token_arrays]:
                    row = {key: row[key] for key in ("traj_id", "question", "truth", "messages")}
                for name_only_here in ("sample", "versions"):
                    row.pop(name_only_here, None)
                rows.append(row)
            yield table_of("transcripts", rows, dict(fill))


def _parts_of(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))


def start_writer(run: str) -> Any:
    """Start the writer of a run on the node of this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor: Any = ray.remote(TranscriptWriter)
    return actor.options(name=_name(run), num_cpus=0, scheduling_strategy=here).remote()


def find_writer(run: str) -> Any:
    """Return the writer that the trainer of this job has started."""
    return ray.get_actor(_name(run))


def _name(run: str) -> str:
    return f"transcripts of {run}"
