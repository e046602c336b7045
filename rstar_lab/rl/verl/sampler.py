"""verl's replay buffer with RoC: dropped rollouts are removed before any computation and kept for the run store."""

import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.step import select
from rstar_lab.rl.training.group_stream import rest_in_time, updates_since
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.transcripts import RolloutNumbers, find_writer


@dataclass
class StepSelection:
    """The rollouts of a step and the selection. keys: traj_id -> key in the transfer queue, for kept rollouts.

    dropped: rollouts of groups that verl removed. staleness, ages_s: in mode async, by group id: updates
    since the weights that started the group, and seconds from its end to its use.
    """

    rollouts: list[RolloutNumbers] = field(default_factory=list)
    kept: Selection = field(default_factory=Selection)
    keys: dict[str, str] = field(default_factory=dict)
    select_s: float = 0.0
    dropped: list[RolloutNumbers] = field(default_factory=list)
    staleness: dict[str, int] = field(default_factory=dict)
    ages_s: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Outlines of all rollouts of the step's groups; see `transcripts.outline`."""
        return [rollout.outline for rollout in self.rollouts]

    @property
    def dropped_trajectories(self) -> list[Trajectory]:
        return [rollout.outline for rollout in self.dropped]

    @property
    def groups(self) -> int:
        return len({rollout.outline.group_id for rollout in self.rollouts})


class _RocMixin:
    """Mixin for verl's replay buffers; it must come before them in the bases."""

    def __init__(self, *args: Any, sampler_kwargs: Any, **kwargs: Any):
        settings = dict(sampler_kwargs)
        self.settings = Settings.of(settings.pop("rstar"))
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
        missing, select_s = batch_size, 0.0
        for rounds_left in range(self.settings.rl.sync.dynamic_sampling, -1, -1):
            batch, metrics = super().sample(  # type: ignore[misc]
                global_steps=global_steps, partition_id=partition_id, batch_size=missing
            )
            self._check_errors(global_steps)
            if partition_id == "val":
                return batch, metrics
            all_metrics |= metrics
            started = time.monotonic()
            rollouts |= zip(batch.keys, fetch_rollouts(batch.keys, partition_id), strict=True)
            trajectories = {key: rollout.outline for key, rollout in rollouts.items()}
            tags |= zip(batch.keys, batch.tags, strict=True)
            order = sorted(trajectories, key=lambda key: (trajectories[key].group_id, trajectories[key].sample))
            seed = step_seed(self.settings.recipe.seed, global_steps)
            kept = select([trajectories[key] for key in order], self.settings.rl, seed)
            select_s += time.monotonic() - started
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
        keys = {trajectories[key].traj_id: key for key in chosen}
        seconds = select_s + time.monotonic() - started
        self.last = StepSelection(_in_order(rollouts.values()), kept, keys, seconds, _in_order(self._evicted))
        self._evicted = []
        for key, rollout in rollouts.items():
            self._note_age(key.split("_")[0], rollout)
        return KVBatchMeta(partition_id=partition_id, keys=chosen, tags=[tags[key] for key in chosen]), all_metrics

    def _check_errors(self, step: int) -> None:
        """Raise UserError if a rollout raised an exception, for example because the sandbox rejected its token. verl would
        continue without the rollout."""
        if error := ray.get(find_writer(self.settings.run).first_error.remote()):
            raise UserError(f"step {step}: {error}")

    def _note_age(self, uid: str, rollout: RolloutNumbers) -> None:
        """Record the staleness and the age of a rollout's group; in mode sync both are always 0."""

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        """Keep the rollouts of groups that verl removes for staleness or a failure: the run store records them too."""
        if partition_id != "val" and uids:
            keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]  # type: ignore[attr-defined]
            self._evicted += fetch_rollouts(keys, partition_id)
        super()._clear_groups(partition_id, uids)  # type: ignore[misc]


class RocReplayBuffer(_RocMixin, ReplayBuffer):
    """The buffer of the synchronous trainer."""


class RocReplayBufferAsync(_RocMixin, ReplayBufferAsync):
    """The buffer of mode async: `rl.schedule.max_staleness` and `rl.schedule.when_stale` as in the local trainer.

    verl's own limit is off. It counts steps instead of updates, and its `wait` lets groups become too old: it waits only for
    groups that must be used now, and there can be more of these than one update uses.

    versions: versions of the weights since the start or the resume, oldest first; set by the trainer.
    """

    versions: Sequence[int] = (0,)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        self._started = dict[str, int]()  # by uid; verl forgets a group when it samples it
        return super().sample(global_steps, partition_id, batch_size)

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        self._started |= self.prompt_global_steps[partition_id]
        return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)

    def _staleness(self, started: int) -> int:
        """Return the number of updates since the weights that started a group. started: its step, whose rollouts start with
        the weights after the step before."""
        return updates_since(started - 1, self.versions)

    def _note_age(self, uid: str, rollout: RolloutNumbers) -> None:
        name = rollout.outline.group_id
        self.last.staleness[name] = self._staleness(self._started[uid])
        age_s = time.time() - rollout.ended_at
        self.last.ages_s[name] = min(age_s, self.last.ages_s.get(name, age_s))

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        keys = self.settings.rl
        if partition_id == "val" or keys.asynchronous.when_stale != "drop":
            return set()
        started = self.prompt_global_steps[partition_id]
        return {
            uid
            for uid in self.finished_keys[partition_id]
            if self._staleness(started[uid]) > keys.asynchronous.max_staleness
        }

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        if self.failure_keys[partition_id]:  # verl would replace a group whose rollouts raised an exception
            self._check_errors(global_steps)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if (
            len(sampleable_keys) < batch_size
            or partition_id == "val"
            or self.settings.rl.asynchronous.when_stale != "wait"
        ):
            return len(sampleable_keys) >= batch_size
        started = self.prompt_global_steps[partition_id]
        chosen = ReplayBufferAsync._select_prompt_uids(self, partition_id, sampleable_keys, batch_size)[0]
        rest = sorted(started[uid] for uid in started.keys() - set(chosen))
        return rest_in_time(
            [self._staleness(step) for step in rest], batch_size, self.settings.rl.asynchronous.max_staleness
        )


def _in_order(rollouts: Iterable[RolloutNumbers]) -> list[RolloutNumbers]:
    return sorted(rollouts, key=lambda rollout: (rollout.outline.group_id, rollout.outline.sample))


def fetch_rollouts(keys: list[str], partition_id: str) -> list[Any]:
    """Return what the agent loop put into the transfer queue: RolloutNumbers, in partition "val" trajectories."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
    fields = [getattr(value, "data", value) for value in data["extra_fields"]]
    return [pickle.loads(value["rollout"]) for value in fields]
