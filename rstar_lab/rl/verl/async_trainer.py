"""`rl.schedule.type: async` under verl: its trainer `colocate_async`, with the bounds on staleness of the local trainer.

At each step verl starts as many groups as a step uses, so the number of groups that no update has used stays constant. The first
step starts additional groups, up to `rl.schedule.buffer_groups` in total, and with `when_stale: wait` at most (max_staleness + 1) *
problems_per_step, the rule of `group_stream`.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from rstar_lab.rl.training.group_stream import staleness_metrics
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.sampler import RocReplayBufferAsync, StepSelection
from rstar_lab.rl.verl.trainer import RecipeTrainer


@register_trainer("rstar_colocate_async")
class AsyncTrainer(RecipeTrainer, PPOTrainerColocateAsync):
    """Trains while groups stay in flight over several updates. Trainer and engines share the GPUs: requests are interrupted before
    an update and continue after it, under the new weights."""

    replay_buffer: RocReplayBufferAsync

    def on_train_begin(self) -> None:
        self._filter_stage()
        keys = self.settings.rl
        self.groups_left = (self.settings.stage.steps - self.state.stage_step) * keys.problems_per_step
        self.replay_buffer.versions = self.versions
        in_flight = keys.asynchronous.groups(keys.problems_per_step)
        if keys.asynchronous.when_stale == "wait":
            in_flight = min(in_flight, (keys.asynchronous.max_staleness + 1) * keys.problems_per_step)
        self._start_groups(in_flight - keys.problems_per_step)

    def prepare_step(self) -> dict[str, Any]:
        self._start_groups(self.settings.rl.problems_per_step)
        return {}

    def _start_groups(self, count: int) -> None:
        """Start groups, at most as many as the remaining steps of the stage use."""
        count = min(count, self.groups_left)
        self.groups_left -= count
        if count:
            self._add_prompts_to_generate(count)

    def _mode_metrics(self, step: StepSelection) -> dict[str, Any]:
        used, dropped = _by_group(step.trajectories), _by_group(step.dropped_trajectories)
        staleness = [step.staleness[name] for name in used]
        ages_s = [step.ages_s[name] for name in used]
        return staleness_metrics([*used.values()], [*dropped.values()], staleness, ages_s) | {
            "policy_gap": self.values.policy_gap, "stale_tokens": self.values.stale_tokens,
        }  # fmt: skip

    def _begin_evaluation(self) -> None:
        # The interrupted training requests continue too. After the step they would continue with the same weights.
        self.checkpoint_manager.update_weights(self.global_steps)
        self.checkpoint_manager.resume_generation_replicas()

    def _end_evaluation(self) -> None:
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()


def _by_group(rollouts: Collection[Trajectory]) -> dict[str, Sequence[Trajectory]]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    return {**groups}
