"""verl's trainers, with the run store and the watchdog. The training loop is verl's."""

import asyncio
import json
import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload

from rstar_lab.common.progress import Reporter
from rstar_lab.rl.algorithm.selection import Selection, cut_mini_batches
from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.models.model import export_chat_template
from rstar_lab.rl.pipeline import RL_KEYS, evaluate_sets, is_evaluated
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.session import RunSession, open_run, vocabulary
from rstar_lab.rl.step import BufferedGroups, Sampled, Step, check_mismatch_limit
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.group_stream import CorrectionLimit
from rstar_lab.rl.training.stages import (
    difficulty_file,
    filter_problems,
    filter_run,
    keep_stage_model,
    link_or_copy,
    stage_table,
)
from rstar_lab.rl.training.teacher import TeacherPasses, open_servers
from rstar_lab.rl.training.trainer import HeldOut
from rstar_lab.rl.training.update import check_finite
from rstar_lab.rl.trajectory import Trajectory, by_group
from rstar_lab.rl.verl.adapters import export_merged
from rstar_lab.rl.verl.checkpoints import write_stored_dtype
from rstar_lab.rl.verl.engine import ScheduledClient, start_scheduler
from rstar_lab.rl.verl.hooks import ENGINE, assert_registered
from rstar_lab.rl.verl.manager import OversamplingManager, ServerRollouts
from rstar_lab.rl.verl.objective import (
    CE_WEIGHTS,
    CORRECTION,
    POLICY_WEIGHTS,
    StreamLoss,
    correct_rows,
    measured_update,
    order_rows,
    rows_of_mini_batches,
    stream_tensors,
    teacher_advantages,
)
from rstar_lab.rl.verl.sampler import RocReplayBuffer, RocReplayBufferAsync, StepSelection
from rstar_lab.rl.verl.settings import Settings, checkpoint_folder, stage_has_ended
from rstar_lab.rl.verl.transcripts import TrainerValues, start_writer
from rstar_lab.rl.verl.watchdog import Watchdog
from rstar_lab.runs.files import name_disk_errors
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.schema import step_file


class RecipeTrainer(PPOTrainer):
    """Trains one stage of a recipe. `replay_buffer` selects the rollouts; this class writes the run store.

    Use it as the first base class of a trainer, before one of verl's.
    """

    replay_buffer: RocReplayBuffer | RocReplayBufferAsync
    agent_loop_manager: OversamplingManager

    def __init__(self, config: Any):
        assert_registered()
        with open_dict(config):
            # In another mode verl would save the transfer queue with its checkpoints. It contains rollouts that the run store does
            # not have; a resumed run starts the groups in flight again instead.
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        self.settings = Settings.of(config.rstar)
        session = self.session = RunSession(self.settings.resolved, Reporter())
        extra = {"trainer": "verl", "job": os.environ.get("RSTAR_LAB_JOB")}
        self.parent = {"run": session.run_id("sft"), "step": None} if self.settings.recipe.sft else None
        self.writer = open_run(session, "rl", "train", RL_KEYS, parent=self.parent, extra=extra)
        self.watchdog = Watchdog(self.settings.watchdog_s, self.writer, self._pending_operations)
        self.state = TrainerState()
        self.lines: list[dict[str, Any]] = []  # metrics of the finished steps of this stage
        self.transcripts = start_writer(self.settings.run)
        self.values = TrainerValues()
        self.writing: Any = None  # Ray reference to the number of transcripts, ready when their file is written
        self.mini_batches: list[list[str]] = []
        self.saved = 0  # step of the newest checkpoint
        # Versions of the weights since the start or the resume, oldest first. A step without an update adds none.
        self.versions = [0]
        self.correction_limit = CorrectionLimit()
        self.ce_weight = 1.0
        self.statistics: dict[str, float] = {}  # of the loss of this step, as far as this process computes them
        self.scored_version = 0  # policy version at the start of the update

    def fit(self, agent_loop_manager: Any) -> None:
        agent_loop_manager.resume(self.state)
        with self.writer:
            if self.settings.base:
                self.agent_loop_manager = agent_loop_manager
                self._evaluate_served(0, "base")
                return
            super().fit(agent_loop_manager)
            if self.state.finished:
                result = {"stages": stage_table(self.settings.recipe.stages, self.writer.run_dir)}
                self.writer.finish("finished", result=result)

    def get_llm_client(self) -> ScheduledClient:
        """Return a client of the inference servers that follows `engine.scheduler` instead of verl's router."""
        rollout, engine = self.config.actor_rollout_ref.rollout, self.settings.recipe.engine
        manager = self.llm_server_manager
        servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        self.scheduler = start_scheduler(
            servers,
            policy=engine.scheduler,
            max_tokens=rollout.max_model_len,
            max_response_tokens=rollout.response_length,
            max_running=engine.max_num_seqs if rollout.name == ENGINE else rollout.max_num_seqs,
        )
        return ScheduledClient(self.config, scheduler=self.scheduler, servers=servers)

    # Checkpoints

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        step, number = self.global_steps, self.settings.number
        self.writer.check_steps(step)
        self.writer.cut(step)
        self.writer.write_vocabulary(vocabulary(self.tokenizer))
        if step:
            self.state = TrainerState.read(checkpoint_folder(self.writer.run_dir, step))
            self._export(self.settings.recipe.stages[self.state.stage].name, over=self.state.stage < number)
        if self.state.stage != number:
            self.state.enter_stage(number)
        self.versions = [step]
        stage = self.settings.stage.name
        self.lines = [line for line in RunReader(self.writer.run_dir).metrics() if line["stage"] == stage]

    def _save_checkpoint(self) -> None:
        self.watchdog.enter("checkpoint", self.global_steps)
        folder = checkpoint_folder(self.writer.run_dir, self.global_steps)
        folder.mkdir(parents=True, exist_ok=True)
        self.state.carried = [] if self.over else self.agent_loop_manager.unused()
        with name_disk_errors(folder, part=folder):
            (folder / "trainer.json").write_text(json.dumps(asdict(self.state)))  # before verl marks it as the newest
            super()._save_checkpoint()
        self.saved = self.global_steps
        self._export(self.settings.stage.name, over=self.over)

    def _export(self, stage: str, *, over: bool) -> None:
        """Copy the checkpoint's model to the models of the run, and keep it if a stage ends with it. Does nothing if it exists."""
        model = checkpoint_folder(self.writer.run_dir, self.global_steps) / "actor" / "huggingface"
        write_stored_dtype(model)
        if lora := self.settings.rl.lora:
            export_merged(model, model.with_name("merged"), lora)
            model = model.with_name("merged")
        export_chat_template(model, self.settings.rl.prompt_style.prompt_format)
        checkpoint = self.writer.latest_checkpoint()
        if checkpoint is None or checkpoint[0] < self.global_steps:
            with self.writer.checkpoint(self.global_steps) as folder:
                shutil.copytree(model, folder, copy_function=link_or_copy, dirs_exist_ok=True)
            self.writer.keep_checkpoints(self.settings.rl.keep_checkpoints)
        if over:
            keep_stage_model(model, self.writer.run_dir, stage)

    @property
    def over(self) -> bool:
        """Whether the stage has no steps left."""
        return stage_has_ended(self.settings, self.lines, self.state.retired)

    # Phases of the step

    def on_init_end(self) -> None:
        self.actor_rollout_wg.set_loss_fn(StreamLoss(self.settings.rl))
        self.watchdog.enter("first weight sync", self.global_steps)
        super().on_init_end()
        self.watchdog.leave()

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self.watchdog.enter("generation, tools and reward", self.global_steps)

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.watchdog.enter("update", self.global_steps)

    def on_step_end(self) -> None:
        if self.over:
            if self.saved < self.global_steps:  # a hand-off can end the stage before the last step that verl planned
                self._save_checkpoint()
            self.total_training_steps = self.global_steps
        self.watchdog.enter("weight sync", self.global_steps)
        super().on_step_end()
        self.watchdog.leave()

    def _pending_operations(self) -> list[dict[str, Any]]:
        """Ask every agent-loop worker what its rollouts wait for."""
        workers: list[Any] = self.agent_loop_manager.agent_loop_workers
        answers = [worker.__ray_call__.remote(_report_pending) for worker in workers]
        ready, late = ray.wait(answers, num_returns=len(answers), timeout=10)
        return [*ray.get(ready), *({"host": "no answer", "waits": {}} for _ in late)]

    # The step

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return the size of the full batch, so that the number of mini-batches does not depend on what is selected."""
        return int(self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n)

    def _balance_batch(self, batch: KVBatchMeta, *arguments: Any, **keywords: Any) -> KVBatchMeta:
        batch = super()._balance_batch(batch, *arguments, **keywords)
        ranks, parts = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1, self.settings.rl.mini_batches
        selection, queue_keys = self.replay_buffer.last.kept, self.replay_buffer.last.keys
        kept = selection.trajectories
        cut = cut_mini_batches(selection, parts) if kept else []
        number_of = {queue_keys[kept[i].traj_id]: number for number, indices in enumerate(cut) for i in indices}
        # verl has reordered the rows by length: restore the order of the selection, which the mini-batches follow.
        place = {queue_keys[t.traj_id]: i for i, t in enumerate(kept)}
        batch.reorder(sorted(range(len(batch)), key=lambda i: place.get(batch.keys[i], len(place))))
        workloads = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags])).tolist()
        batch.reorder(order_rows([number_of.get(key) for key in batch.keys], ranks, parts, workloads))
        self.mini_batches = [[batch.keys[i] for i in rows] for rows in rows_of_mini_batches(len(batch), ranks, parts)]
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        step, self.values, self.statistics = self.replay_buffer.last, TrainerValues(), {}
        self.scored_version = self.versions[-1]
        if step.kept.trajectories and self.settings.rl.old_log_probs != "engine":
            queue_keys = {t.traj_id: step.keys[t.traj_id] for t in step.kept.trajectories}
            self.values = ray.get(self.transcripts.add_trainer_values.remote(queue_keys, self.scored_version))
        dtype = self.config.actor_rollout_ref.rollout.dtype  # of the profile, not of the recipe
        check_mismatch_limit(self.values.mismatch.mean, self.settings.recipe.engine.mismatch_limit_of(dtype))
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Put the streams of the selection into the batch, as tensors; see `objective.stream_tensors`."""
        batch = super()._compute_advantage(batch, metrics)
        step, rl = self.replay_buffer.last, self.settings.rl
        config = rl.loss_config
        if step.kept.trajectories:
            step.kept = asyncio.run(self._forward(step.kept, step.trajectories))
        streams_of = {
            step.keys[t.traj_id]: stream for t, stream in zip(step.kept.trajectories, step.kept.streams, strict=True)
        }
        teacher = any(stream.reference_log_prob_T is not None for stream in step.kept.streams)
        corrected = bool(step.kept.trajectories) and config.correction != "none"
        fields = ["response_mask"] + ["old_log_probs"] * (teacher or corrected) + ["rollout_log_probs"] * corrected
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        row_of = {key: row for row, key in enumerate(batch.keys)}
        masks = [mask.float() for mask in data["response_mask"]]
        tensors: dict[str, list[torch.Tensor]] = {}
        ce_weights: list[float] = []  # mean weight of the cross-entropy in each mini-batch
        for keys in self.mini_batches:
            rows = [row_of[key] for key in keys]
            own_streams = [streams_of.get(key) for key in keys]
            groups = [key.split("_")[0] for key in keys]
            made = stream_tensors(own_streams, [masks[row] for row in rows], groups, rl)
            ce_weights.append(sum(float(row.sum()) for row in made[CE_WEIGHTS]))
            for name, values in made.items():
                column = tensors.setdefault(name, [torch.zeros(0)] * len(batch.keys))
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
        of_row = [streams_of.get(key) for key in batch.keys]
        trained = [(row != 0).float() for row in tensors[POLICY_WEIGHTS]]
        if teacher:
            found = teacher_advantages(tensors["advantages"], of_row, [*data["old_log_probs"]], trained, config)
            tensors["advantages"], stats = found
            self.statistics |= stats
        if corrected:
            columns = [*data["old_log_probs"]], [*data["rollout_log_probs"]], trained
            tensors[CORRECTION], stats = correct_rows(*columns, rl)
            self.statistics |= stats
            self.correction_limit.check(stats["corrected_share"], rl)
        self.ce_weight = float(np.mean([weight for weight in ce_weights if weight] or [1.0]))
        if not any(stream.ce_weight_T is not None for stream in step.kept.streams):
            del tensors[CE_WEIGHTS]
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in tensors.items()}
        put = tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch))
        )
        batch.fields = put.fields  # fields that are not listed here do not reach the loss
        return batch

    async def _forward(self, selection: Selection, rollouts: Sequence[Trajectory]) -> Selection:
        """Return the selection with the streams that need further forward passes."""
        settings = self.settings
        longest = int(self.config.actor_rollout_ref.rollout.max_model_len)
        async with open_servers([settings.rl], settings.recipe.engine, self.tokenizer, longest) as servers:
            for method in settings.rl.hooks:
                if method.forward_phase is not None:
                    selection = await method.forward(selection, rollouts, TeacherPasses(servers.get("teacher")))
        return selection

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Update the model while the transcripts are written. Skip the update without signal, as the local trainer does:
        weight decay alone would change the weights."""
        step, run_dir, stage = self.replay_buffer.last, self.writer.run_dir, self.settings.stage.name
        self.writing = self.transcripts.write.remote(
            step_file(run_dir, "transcripts", stage, self.global_steps),
            {"run_id": run_dir.name, "stage": stage, "step": self.global_steps},
            [t.traj_id for t in step.trajectories + step.dropped_trajectories],
            [t.traj_id for t in step.kept.trajectories],
            self.settings.rl.token_arrays,
        )
        if not step.kept.trajectories:
            return batch
        batch = super()._update_actor(batch, metrics)
        check_finite(float(metrics["actor/grad_norm"]))  # verl skips the update and would go on
        self.versions.append(self.global_steps)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        step, state, rl = self.replay_buffer.last, self.state, self.settings.rl
        self.agent_loop_manager.close_groups(step.trajectories + step.dropped_trajectories)
        state.add_rollouts(step.trajectories, rl)
        every = self.settings.recipe.evaluate.during.every
        held_out: HeldOut = self._evaluate() if every and self.global_steps % every == 0 else {}
        # Before verl writes the checkpoint: a run resumed from it must find the step in the store.
        self._write_step(step, metrics, timing_raw, held_out)
        state.step, state.stage_step = self.global_steps, state.stage_step + 1
        state.finished = self.over and self.settings.is_last
        if self.over:
            self._evaluate("rl" if state.finished else f"rl-{self.settings.stage.name}")
        return batch

    def _buffered(self, step: StepSelection) -> BufferedGroups | None:
        """Return the groups of a step that were in flight during updates; None in mode sync."""
        return None

    def _write_step(
        self, step: StepSelection, metrics: dict[str, Any], timing: dict[str, float], held_out: HeldOut
    ) -> None:
        """Commit the step in the run store, and add its numbers to those that verl logs."""
        rl, kept = self.settings.rl, step.kept
        stored = [*step.rollouts, *step.dropped]
        started = time.monotonic()
        transcripts = ray.get(self.writing)
        waited_s = time.monotonic() - started
        scheduler = ray.get(self.scheduler.stats.remote())
        numbers = {name: found for name, value in metrics.items() if (found := _number(value)) is not None}
        update = measured_update(numbers, self.statistics, kept, self.ce_weight, rl.loss_config)
        buffered, mismatch = self._buffered(step), self.values.mismatch
        if buffered is None:
            mismatch = replace(mismatch, policy_gap=None)
        finished = Step(
            rl,
            Sampled(step.trajectories, kept, step.groups, sum(rollout.retried for rollout in stored), buffered),
            kept,
            replace(update, mismatch=mismatch, gpu_gb=_peak_memory(numbers)),
            {f"{name}_s": seconds for name, seconds in timing.items()}
            | {"select_s": step.select_s, "transcripts_s": waited_s},
            sum(timing.values()),
            version=None if buffered is None else self.scored_version,
            retired=len(self.state.retired),
            held_out=held_out,
            backend={f"scheduler_{name}": scheduler[name] for name in ("decisions", "decision_ms", "alive")},
        )
        row = finished.metrics
        rows, labels = [dict(rollout.row) for rollout in stored], finished.labels
        for table_row in rows:
            if label := labels.get(name := table_row["traj_id"]):
                log_prob, entropy = self.values.means.get(name, (None, None))
                table_row |= {"kept": True, "advantage": label.advantage}
                table_row |= {"trainer_log_prob": log_prob, "entropy": entropy}
        self.writer.write_step(
            self.settings.stage.name,
            self.global_steps,
            trajectories=rows,
            calls=[call for rollout in stored for call in rollout.calls],
            transcripts=transcripts,
            metrics=row | {f"verl/{name}": value for name, value in numbers.items()},
        )
        metrics |= {name: value for name, value in row.items() if value is not None}
        self.lines.append({"stage": self.settings.stage.name, "step": self.global_steps} | row)

    # Rollouts outside of the steps

    @abstractmethod
    def _begin_evaluation(self) -> None:
        """Make the servers generate with the weights after this step."""

    @abstractmethod
    def _end_evaluation(self) -> None:
        """Restore the state that the servers have between the rollouts and the end of a step."""

    @property
    def other_rollouts(self) -> ServerRollouts:
        """The generator of rollouts outside of steps. It keeps as many rollouts in flight as one step has."""
        window = self.settings.rl.problems_per_step * self.settings.rl.rollouts_per_group
        return ServerRollouts(self.agent_loop_manager, self.replay_buffer, window)

    def _begin_stage(self) -> None:
        """Evaluate the model that RL starts from before the first step, and write the difficulty table of the stage's filter.

        Raises UserError if a rollout fails; a resumed run generates only the rollouts that are not stored.
        """
        settings, step = self.settings, self.settings.first_step - 1
        if not self.state.step:
            self._evaluate_served(0, "sft" if settings.recipe.sft else "base")
        stage = settings.stage
        if stage.filter is None or difficulty_file(settings.run_dir, stage.name).exists():
            return
        self.watchdog.enter("filter", step)
        run, on_progress = filter_run(settings.run, stage.name), partial(self.watchdog.enter, "filter", step)
        generate = self.other_rollouts.generator(run, step=step, sampling="stage", on_progress=on_progress)
        asyncio.run(
            filter_problems(
                settings.problems, stage.filter, generate,
                stage=stage.name, step=step, recipe=settings.recipe, run_dir=settings.run_dir,
            )
        )  # fmt: skip
        self.watchdog.leave()

    def _evaluate(self, model: str | None = None) -> HeldOut:
        """Evaluate the recipe's sets with the weights after this step. model: see `evaluate_sets`."""
        if not self.session.held_out:
            return {}
        self.watchdog.enter("evaluation", self.global_steps)
        self._begin_evaluation()
        held_out = self._evaluate_served(self.global_steps, model)
        self._end_evaluation()
        self.watchdog.enter("update", self.global_steps)
        return held_out

    def _evaluate_served(self, step: int, model: str | None) -> HeldOut:
        """Evaluate the weights that the servers hold after `step`. A model that has already been evaluated is skipped."""
        session = self.session
        if model and is_evaluated(session.recipe, model):
            return {}
        parent = {"run": self.writer.run_dir.name, "step": step} if step else self.parent if model == "sft" else None

        def rollouts_of(problems: Sequence[Problem], run: str) -> Generate:
            report, sampling = partial(self.watchdog.enter, "evaluation", step), "model" if model else "during"
            return self.other_rollouts.generator(run, step=step, sampling=sampling, on_progress=report)

        return asyncio.run(evaluate_sets(session, rollouts_of, parent, model))


@register_trainer("rstar")
class RstarTrainer(RecipeTrainer, PPOTrainerSync):
    """The trainer of mode sync."""

    def on_train_begin(self) -> None:
        self._begin_stage()

    def _begin_evaluation(self) -> None:
        self.checkpoint_manager.update_weights(self.global_steps)  # wakes the servers

    def _end_evaluation(self) -> None:
        self.checkpoint_manager.sleep_replicas()


def _report_pending(_: Any) -> dict[str, Any]:
    from rstar_lab.rl.verl.watchdog import PENDING

    return PENDING.report()


def _peak_memory(metrics: Mapping[str, float]) -> float | None:
    """Return the largest memory that the trainer has allocated on a GPU, in 10^9 bytes."""
    found = metrics.get("actor/perf/max_memory_allocated_gb")  # verl counts 2^30 bytes; 0 on a CPU
    return found * 2**30 / 1e9 if found else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@register_trainer("rstar_colocate_async")
class AsyncTrainer(RecipeTrainer, PPOTrainerColocateAsync):
    """Trains while groups stay in flight over several updates. Trainer and engines share the GPUs: requests are interrupted before
    an update and continue after it, under the new weights."""

    replay_buffer: RocReplayBufferAsync

    def on_train_begin(self) -> None:
        self._begin_stage()
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

    def _buffered(self, step: StepSelection) -> BufferedGroups:
        used, dropped = by_group(step.trajectories), by_group(step.dropped_trajectories)
        staleness, ages_s = [step.staleness[name] for name in used], [step.ages_s[name] for name in used]
        return BufferedGroups([*used.values()], [*dropped.values()], staleness, ages_s)

    def _begin_evaluation(self) -> None:
        # The interrupted training requests continue too. After the step they would continue with the same weights.
        self.checkpoint_manager.update_weights(self.global_steps)
        self.checkpoint_manager.resume_generation_replicas()

    def _end_evaluation(self) -> None:
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()
