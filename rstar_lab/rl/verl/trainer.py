"""verl's synchronous trainer, reporting to the run store and to the watchdog. Its training loop is verl's own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rstar_lab.rl.records import Verdict, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.step_metrics import rollout_metrics
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.hooks import assert_registered
from rstar_lab.rl.verl.objective import row_weights
from rstar_lab.rl.verl.sampler import RocReplayBuffer, StepRollouts
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.watchdog import Watchdog
from rstar_lab.runs.writer import RunWriter

MODE = "rstar"
# verl's names for what the local trainer writes under these.
METRICS = {
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "clip_share": "actor/clip_share",
    "kl": "actor/kl",
    "mismatch": "training/rollout_probs_diff_mean",
    "mismatch_max": "training/rollout_probs_diff_max",
}


@register_trainer(MODE)
class RstarTrainer(PPOTrainerSync):
    """One stage of a recipe. `replay_buffer` keeps G of 2G by RoC; this class writes down what happened."""

    replay_buffer: RocReplayBuffer

    def __init__(self, config: Any):
        assert_registered()
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # what verl's base class compares with
        super().__init__(config)
        self.settings = Settings.of(config)
        recipe = self.settings.recipe
        self.writer = RunWriter.open(
            self.settings.runs_dir,
            self.settings.run,
            kind="train",
            recipe=recipe.model_dump(mode="json"),
            seed=recipe.seed,
            extra={"trainer": "verl", "job": os.environ.get("RSTAR_LAB_JOB")},
        )
        self.watchdog = Watchdog(self.settings.watchdog_s, self.writer, self._who_waits)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.writer.cut(self.global_steps)

    def fit(self, agent_loop_manager: Any) -> None:
        with self.writer:
            super().fit(agent_loop_manager)
            if self.settings.is_last:
                self.writer.finish("finished")

    # What the step is at

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.watchdog.enter("generation, tools and reward", self.global_steps)

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.watchdog.enter("update", self.global_steps)

    def on_step_end(self) -> None:
        self.watchdog.enter("weights to the engines", self.global_steps)
        super().on_step_end()
        self.watchdog.leave()

    def _who_waits(self) -> list[dict[str, Any]]:
        """Asked of every agent-loop worker: what its rollouts wait for."""
        import ray

        workers: list[Any] = self.agent_loop_manager.agent_loop_workers
        answers = [worker.__ray_call__.remote(_report_waits) for worker in workers]
        ready, late = ray.wait(answers, num_returns=len(answers), timeout=10)
        return [*ray.get(ready), *({"host": "no answer", "waits": {}} for _ in late)]

    # The step

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        self._put_advantages(batch)
        rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        masks = tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=["response_mask"])
        own = [int(mask.sum()) for mask in masks["response_mask"]]
        actor = self.config.actor_rollout_ref
        size = actor.actor.ppo_mini_batch_size * actor.rollout.n
        weights = row_weights([key.split("_")[0] for key in rows], own, self.settings.keys.aggregation, size)
        if weights is not None:
            by_key = dict(zip(rows, weights, strict=True))
            self._put_rows(batch, "rollout_is_weights", [by_key.get(key, 1.0) for key in batch.keys])
        return batch

    def _put_advantages(self, batch: KVBatchMeta) -> None:
        """Those of the selection, which knows of shaping; verl's estimator sees rewards only."""
        step = self.replay_buffer.last
        of_key = {step.keys[t.traj_id]: a for t, a in zip(step.kept.trajectories, step.kept.advantages, strict=True)}
        self._put_rows(batch, "advantages", [of_key.get(key, 0.0) for key in batch.keys])

    def _put_rows(self, batch: KVBatchMeta, field: str, values: list[float]) -> None:
        """One number a rollout, on each of its own tokens."""
        masks = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        filled = [value * mask.float() for value, mask in zip(values, masks["response_mask"], strict=True)]
        nested = torch.nested.as_nested_tensor(filled, layout=torch.jagged)
        fields = TensorDict({field: nested}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Without signal there is no update, as in the local trainer: weight decay alone would move the weights."""
        return super()._update_actor(batch, metrics) if self.replay_buffer.last.kept.trajectories else batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        # Before verl writes the checkpoint: a run resumed from it must find the step in the store.
        self._write_step(self.replay_buffer.last, batch, metrics, timing_raw)
        return batch

    def _write_step(
        self, step: StepRollouts, batch: KVBatchMeta, metrics: dict[str, Any], timing: dict[str, float]
    ) -> None:
        keys, kept = self.settings.keys, step.kept
        arrays = self._trainer_arrays(step)
        advantages = {t.traj_id: a for t, a in zip(kept.trajectories, kept.advantages, strict=True)}
        rows: dict[str, list[dict[str, Any]]] = {"trajectories": [], "calls": [], "transcripts": []}
        for trajectory in step.trajectories:
            name = trajectory.traj_id
            verdict = Verdict(False)
            if name in advantages:
                verdict = Verdict(True, advantages[name], *arrays.get(name, (None, None)))
            full = {"all": True, "kept": verdict.kept, "sampled": trajectory.sample == 0}[keys.token_arrays]
            rows["trajectories"].append(trajectory_row(trajectory, verdict))
            rows["calls"] += call_rows(trajectory)
            rows["transcripts"].append(transcript_row(trajectory, verdict, arrays=full))
        informative = {t.group_id for t in kept.trajectories}
        told = (
            rollout_metrics(step.trajectories)
            | {"kept": len(kept.trajectories), "equal_groups": kept.equal_groups}
            | {"update_tokens": sum(t.model_tokens for t in kept.trajectories)}
            # What goes through forward and backward, and what would without RoC: all rollouts of the same groups.
            | {"sequence_tokens_kept": _sequence_tokens(kept.trajectories)}
            | {
                "sequence_tokens_informative": _sequence_tokens(
                    [t for t in step.trajectories if t.group_id in informative]
                )
            }
            | {"roc_s": step.roc_s, "step_s": sum(timing.values())}
            | {ours: _number(metrics[theirs]) for ours, theirs in METRICS.items() if theirs in metrics}
            | {f"{name}_s": seconds for name, seconds in timing.items()}
            | {f"verl/{name}": _number(value) for name, value in metrics.items() if _number(value) is not None}
        )
        self.writer.write_step(self.settings.stage.name, self.global_steps, **rows, metrics=told)

    def _trainer_arrays(self, step: StepRollouts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """traj_id -> (log-probs, entropy) of the kept under the trainer; empty where verl did not compute them."""
        names = [t.traj_id for t in step.kept.trajectories]
        if not names or self.settings.keys.old_log_probs == "engine":
            return {}
        data = tq.kv_batch_get(
            keys=[step.keys[name] for name in names],
            partition_id="train",
            select_fields=["old_log_probs", "entropy", "response_mask"],
        )
        found = {}
        for name, mask, *both in zip(
            names, *(data[f] for f in ("response_mask", "old_log_probs", "entropy")), strict=True
        ):
            outside = ~mask.bool()
            log_probs, entropy = (values.float().masked_fill(outside, torch.nan).numpy() for values in both)
            found[name] = (log_probs, entropy)
        return found

    def _save_checkpoint(self) -> None:
        self.watchdog.enter("checkpoint", self.global_steps)
        super()._save_checkpoint()
        saved = (
            Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor" / "huggingface"
        )
        with self.writer.checkpoint(self.global_steps) as folder:
            for path in saved.iterdir():
                os.link(path, folder / path.name)
        self.writer.keep_checkpoints(self.settings.keys.keep_checkpoints)


def _report_waits(_: Any) -> dict[str, Any]:
    from rstar_lab.rl.verl.waits import WAITS

    return WAITS.report()


def _sequence_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
