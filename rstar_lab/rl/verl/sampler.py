"""verl's replay buffer with RoC: dropped rollouts are removed before any computation and kept for the run store."""

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rstar_lab.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection, select_rollouts
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.transcripts import RolloutNumbers, find_writer


@dataclass
class StepSelection:
    """The rollouts of a step and the selection. keys: traj_id -> key in the transfer queue, for kept rollouts."""

    rollouts: list[RolloutNumbers] = field(default_factory=list)
    kept: Selection = field(default_factory=lambda: Selection([], [], 0))
    keys: dict[str, str] = field(default_factory=dict)
    roc_s: float = 0.0

    @property
    def trajectories(self) -> list[Trajectory]:
        """Outlines of all rollouts, including dropped ones; see `transcripts.outline`."""
        return [rollout.outline for rollout in self.rollouts]

    @property
    def groups(self) -> int:
        return len({rollout.outline.group_id for rollout in self.rollouts})


class _RocMixin:
    """Mixin for verl's replay buffers; it must come before them in the bases."""

    def __init__(self, *args: Any, sampler_kwargs: Any, **kwargs: Any):
        settings = dict(sampler_kwargs)
        self.settings = Settings.of_node(settings.pop("rstar"))
        super().__init__(*args, sampler_kwargs=sampler_kwargs, **(kwargs | settings))  # type: ignore[call-arg]
        self.last = StepSelection()
        self._evicted: list[RolloutNumbers] = []

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the kept rollouts of `batch_size` groups, and metrics. `dynamic_sampling` rounds replace groups without signal.

        Raises UserError if a rollout raised an exception.
        """
        rollouts: dict[str, RolloutNumbers] = {}
        tags: dict[str, dict[str, Any]] = {}
        all_metrics: dict[str, Any] = {}
        missing, roc_s = batch_size, 0.0
        for rounds_left in range(self.settings.keys.dynamic_sampling, -1, -1):
            batch, metrics = super().sample(  # type: ignore[misc]
                global_steps=global_steps, partition_id=partition_id, batch_size=missing
            )
            # verl continues without a rollout that raised an exception, for example because the sandbox rejected its
            # token.
            if error := ray.get(find_writer(self.settings.run).first_error.remote()):
                raise UserError(f"step {global_steps}: {error}")
            if partition_id == "val":
                return batch, metrics
            all_metrics |= metrics
            started = time.monotonic()
            rollouts |= zip(batch.keys, fetch_rollouts(batch.keys, partition_id), strict=True)
            trajectories = {key: rollout.outline for key, rollout in rollouts.items()}
            tags |= zip(batch.keys, batch.tags, strict=True)
            order = sorted(trajectories, key=lambda key: (trajectories[key].group_id, trajectories[key].sample))
            seed = step_seed(self.settings.recipe.seed, global_steps)
            kept = select_rollouts([trajectories[key] for key in order], self.settings.keys.selection_config, seed)
            roc_s += time.monotonic() - started
            missing = batch_size - kept.groups
            if not missing or not rounds_left:
                break
            self.refill_fn(missing)  # type: ignore[attr-defined]
        started = time.monotonic()
        names = {trajectory.traj_id for trajectory in kept.trajectories}
        # verl rejects an empty batch: without signal, keep one rollout; the trainer skips the update.
        chosen = [key for key in order if trajectories[key].traj_id in names] or order[:1]
        if dropped := sorted(set(trajectories) - set(chosen)):
            tq.kv_clear(partition_id=partition_id, keys=dropped)
        everything = sorted([*rollouts.values(), *self._evicted], key=lambda r: (r.outline.group_id, r.outline.sample))
        keys = {trajectories[key].traj_id: key for key in chosen}
        self.last = StepSelection(everything, kept, keys, roc_s + time.monotonic() - started)
        self._evicted = []
        return KVBatchMeta(partition_id=partition_id, keys=chosen, tags=[tags[key] for key in chosen]), all_metrics

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        """Keep the rollouts of groups that verl removes for staleness or a failure: the run store records them too."""
        if partition_id != "val" and uids:
            keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]  # type: ignore[attr-defined]
            self._evicted += fetch_rollouts(keys, partition_id)
        super()._clear_groups(partition_id, uids)  # type: ignore[misc]


class RocReplayBuffer(_RocMixin, ReplayBuffer):
    """The buffer of the synchronous trainer."""


class RocReplayBufferAsync(_RocMixin, ReplayBufferAsync):
    """The buffer of the asynchronous trainers."""


def fetch_rollouts(keys: list[str], partition_id: str) -> list[Any]:
    """Return what the agent loop put into the transfer queue: RolloutNumbers, in partition "val" trajectories."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
    fields = [getattr(value, "data", value) for value in data["extra_fields"]]
    return [pickle.loads(value["rollout"]) for value in fields]
