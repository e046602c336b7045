"""GRPO-RoC on one machine. Each step: generate rollouts, resample them (RoC), update the policy, send its weights to the
engines. Start reading at `Trainer.step`. In the modes one_step_off and async, rollouts are generated in the background
(`group_stream`).

Source: rStar2-Agent, sections 2 and 4. No draw uses global random state: each has a seed derived from what it is for, so
a run that is resumed from a checkpoint continues exactly as if it had not been interrupted.
"""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rstar_lab.hardware.processes import PeakMemory
from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.algorithm.selection import Selection, solved_groups
from rstar_lab.rl.engine import Engine
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.environments.mixture import RunEnvironment, restricted
from rstar_lab.rl.evaluation import local_rollouts
from rstar_lab.rl.models.gpu import peak_memory
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.rollout.checks import check_rollouts, check_template, check_tools
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.rollout.metrics import nothing_learnt, rollout_metrics
from rstar_lab.rl.rollout.records import TrainingLabels, step_rows
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.training.checkpoint import TrainerState, restore_checkpoint, save_checkpoint
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.group_stream import CorrectionLimit, stale_tokens
from rstar_lab.rl.training.rollout_source import RolloutSource
from rstar_lab.rl.training.stages import filter_problems, keep_stage_model, stage_end_reason, stage_model, stage_table
from rstar_lab.rl.training.teacher import Teacher, TeacherPasses
from rstar_lab.rl.training.update import Learner, UpdateResult, with_cpu_precision
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalPasses(TeacherPasses):
    """Implements `hooks.ForwardPasses` with the learner of this process."""

    def __init__(self, learner: Learner, rl: RlSection, context: RolloutContext, teacher: Teacher | None):
        super().__init__(teacher)
        self.learner, self.rl, self.context = learner, rl, context
        self.max_tokens: int = learner.model.config.max_position_embeddings

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        return await asyncio.to_thread(self.learner.statistics, rollouts, self.rl, squares=True)

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        return (await asyncio.to_thread(self.learner.statistics, rollouts, self.rl)).log_probs

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        context = self.context.others[rollout.environment] if rollout.environment else self.context
        return context.codec.prompt_ids(question)


class Trainer:
    """Trains all stages of a run with `run`. If interrupted, the same call continues from the last checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: "PreTrainedModel",
        tokenizer: Any,
        engines: EngineGroup,
        tools: Mapping[str, Tool],
        reward: Callable[[str, str], float],
        writer: RunWriter,
        problems: Mapping[str, Sequence[Problem]],
        on_step: Callable[[dict[str, Any]], None],
        helpers: HelperProcesses | None = None,
        evaluate: Callable[[int], Awaitable[dict[str, float]]] | None = None,
        environments: Mapping[str, RunEnvironment] | None = None,
        teacher: Teacher | None = None,
        older: Engine | None = None,
    ):
        """model: the model with which the first stage starts, on its device. problems: problems of each stage, by its
        name.
        helpers: processes that share the updates. evaluate: evaluates the weights of the engines after a step and returns
        metrics; called every `evaluate.every` steps. environments: entries of `rl.environments`, by name. teacher: scores
        the rollouts of methods that need one. older: engine with an older policy, see `MethodHooks.slots`."""
        self.recipe, self.tokenizer, self.engines = recipe, tokenizer, engines
        self.tools, self.reward, self.writer, self.problems, self.on_step = tools, reward, writer, problems, on_step
        self.codec = Codec(tokenizer, tools, recipe.rl.prompt_style)
        check_template(self.codec)
        self.environments = environments or {}
        self.learner = Learner(model)
        self.helpers, self.evaluate, self.teacher = helpers, evaluate, teacher
        self.state = TrainerState()
        self.rollouts = RolloutSource(recipe, writer.run_dir.name, engines, self.context, self.load_weights, older)
        self.correction_limit = CorrectionLimit()
        self.first = True  # whether the next step is the first of this process

    # The algorithm

    async def step(self, stage: str, rl: RlSection, pool: Sequence[Problem]) -> dict[str, Any]:
        """Run one step of GRPO-RoC and return its metrics."""
        step = self.state.step + 1
        seed, source = step_seed(self.recipe.seed, step), self.rollouts
        timer, self.first = PhaseTimer(memory=self.first), False
        busy_s = self.engines.clock.seconds()
        with timer("generate_s"):
            await check_tools(self.tools, seed)
            rollouts = await source.next_step(stage, rl, pool, step, seed)
            check_rollouts(rollouts.trajectories)
        selection, version = rollouts.selection, source.versions[-1]
        passes = LocalPasses(self.learner, rl, self.context(rl), self.teacher)
        for method in rl.hooks:
            if method.forward_phase is not None and selection.trajectories:
                with timer(method.forward_phase):
                    selection = await method.forward(selection, rollouts.trajectories, passes)
        with timer("update_s"), peak_memory(self.learner.device) as peak:
            lr_scale = min(1.0, (self.state.stage_step + 1) / max(1, rl.warmup_steps))
            update = await self.update(selection, rl, lr_scale, seed)
            # Whether the tokens have different versions.
            two_policies = any(method.older_policy_url is not None for method in rl.method.parts)
            mixed = rl.sync.carry_over or source.stream is not None or two_policies
            update.check_mismatch(selection, self.recipe.engine.resolved_mismatch_limit, version if mixed else None)
            self.correction_limit.check(update.metrics.get("corrected_share"), rl)
            if selection.trajectories:
                source.versions.append(step)
        with timer("weights_s"):
            if source.stream is None:
                await self.load_weights(step)
            elif rl.schedule.type == "async":
                await source.load_newest(source.stream)
        held_out: dict[str, float] = {}
        if self.evaluate and self.recipe.evaluate.every and step % self.recipe.evaluate.every == 0:
            with timer("evaluate_s"):
                held_out = await self.evaluate_weights(self.evaluate, step)
        self.state.add_rollouts(rollouts.trajectories, rl)
        generated = rollouts.trajectories
        metrics = (
            rollout_metrics(generated, rl.metrics) | selection.metrics | update.metrics | held_out | rollouts.metrics
        )
        for method in rl.hooks:
            metrics |= method.metrics(generated)
        metrics |= {"solved_groups": solved_groups(generated), "retired": len(self.state.retired)}
        if mixed:
            metrics["stale_tokens"] = stale_tokens(selection, version)
        if rl.sync.carry_over:
            metrics["carried"] = len(source.carried)
        with timer("store_s"):
            rows = step_rows(generated + rollouts.dropped, training_labels(selection, update), rl.token_arrays)
        metrics |= peak | timer.seconds | {"step_s": timer.total()}
        # Streams generate during the whole step.
        generating_s = timer.total() if source.stream is not None else timer.seconds["generate_s"]
        metrics["generated_tokens_per_s"] = sum(t.model_tokens for t in generated) / generating_s
        if not rl.sync.lockstep:  # per engine; the rest of step_s is the idle time of the generator
            metrics["engine_busy_s"] = (self.engines.clock.seconds() - busy_s) / len(self.engines.engines)
        self.writer.write_step(stage, step, **rows, metrics=metrics)
        self.state.step, self.state.stage_step = step, self.state.stage_step + 1
        if source.stream is not None:
            self.state.carried = [group.ledger_entry for group in source.stream.open]
        return {"stage": stage, "step": step} | metrics | timer.memory_gb

    async def update(self, selection: Selection, rl: RlSection, lr_scale: float, seed: int) -> UpdateResult:
        """Update the policy. In the modes one_step_off and async, the rollouts in flight continue meanwhile."""
        if self.rollouts.stream is None:
            return self.learner.update(selection, rl, lr_scale=lr_scale, seed=seed)
        return await asyncio.to_thread(self.learner.update, selection, rl, lr_scale=lr_scale, seed=seed)

    async def load_weights(self, version: int) -> None:
        """Send the weights of the policy to the engines."""
        await self.engines.load(self.learner.model, version)

    async def evaluate_weights(
        self, evaluate: Callable[[int], Awaitable[dict[str, float]]], step: int
    ) -> dict[str, float]:
        """Evaluate the newest weights with the engines."""
        if self.rollouts.stream is not None:
            await self.rollouts.newest_in_engines(self.rollouts.stream)
            return await evaluate(step)
        held_out = await evaluate(step)
        await self.load_weights(step)  # clears the prefix cache, so that the state equals that of a resumed run
        return held_out

    def context(self, rl: RlSection) -> RolloutContext:
        """Return the context of the rollouts of a stage."""
        context = RolloutContext.for_training(self.codec, self.tools, self.reward, rl)
        return context.with_environments(self.environments)

    # Stages

    async def run(self) -> None:
        """Train all stages, starting at the last checkpoint."""
        stages = self.recipe.stages
        base = frozen_copy(self.learner.model) if self.recipe.settings(stages[0]).method.kl_coefficient else None
        self.state = restore_checkpoint(self.writer, self.learner, self.recipe.rl)
        await self.load_weights(self.state.step)
        self.rollouts.state, self.rollouts.versions = self.state, [self.state.step]
        if self.helpers is not None:
            ranks = await asyncio.to_thread(self.helpers.lead, "rstar_lab.rl.training.update:run_update_helper")
            self.learner.lead(ranks, self.recipe.rl)
        for number in range(self.state.stage, len(stages)):
            if number > self.state.stage:
                self.state.enter_stage(number)
                await self.rollouts.drop_carried()
            await self.run_stage(stages[number], base if number == 0 else None)
        self.learner.dismiss()
        result: dict[str, Any] = {"stages": stage_table(self.recipe, self.writer.run_dir)}
        if reason := nothing_learnt(RunReader(self.writer.run_dir).metrics(), tools=bool(self.tools)):
            result["nothing_learnt"] = reason
        self.writer.finish("finished", result=result)

    async def run_stage(self, stage: Stage, base: "PreTrainedModel | None") -> None:
        """Train the remaining steps of a stage. base: reference model of the first stage, if it has a KL term."""
        rl, state = with_cpu_precision(self.recipe.settings(stage), self.learner.device), self.state
        pool = await self.problem_pool(stage, rl)
        if state.carried and not self.rollouts.carried:
            self.rollouts.carried = self.rollouts.restart_carried(self.problems[stage.name], rl)
        lines = [line for line in RunReader(self.writer.run_dir).metrics() if line["stage"] == stage.name]
        if not self.stage_has_ended(stage, lines, pool):
            reference = base
            if rl.method.kl_coefficient and base is None:
                folder = stage_model(self.writer.run_dir, self.recipe.stages[state.stage - 1].name)
                reference = frozen_copy(load_model(folder, torch.float32).to(self.learner.device))  # type: ignore[arg-type]
            reset = stage.reset_optimizer and state.stage_step == 0
            self.learner.begin_stage(rl, reset=reset, reference=reference)
        async with self.rollouts.background(stage, rl, pool):
            while not self.stage_has_ended(stage, lines, pool):
                metrics = await self.step(stage.name, rl, pool)
                lines.append(metrics)
                ended = self.stage_has_ended(stage, lines, pool)
                state.finished = ended and stage is self.recipe.stages[-1]
                if ended or state.step % rl.checkpoint_every == 0:
                    save_checkpoint(self.writer, state, self.learner, self.tokenizer, rl)
                self.on_step(metrics)
        if checkpoint := self.writer.latest_checkpoint():
            keep_stage_model(checkpoint[1], self.writer.run_dir, stage.name)

    async def problem_pool(self, stage: Stage, rl: RlSection) -> Sequence[Problem]:
        """Return the problems of a stage, without those that its filter removes."""
        problems = self.problems[stage.name]
        if stage.filter is None:
            return problems
        filtered = await filter_problems(
            problems,
            stage.filter,
            local_rollouts(problems, self.context(rl), engines=self.engines, mode=rl.rollout_mode),
            stage=stage.name,
            step=self.state.step - self.state.stage_step,
            recipe=self.recipe,
            run_dir=self.writer.run_dir,
        )
        return restricted(problems, filtered)

    def stage_has_ended(self, stage: Stage, lines: Sequence[Mapping[str, Any]], pool: Sequence[Problem]) -> bool:
        retired = set(self.state.retired)
        return stage_end_reason(stage, lines) is not None or all(problem.problem_id in retired for problem in pool)


def training_labels(selection: Selection, update: UpdateResult) -> dict[str, TrainingLabels]:
    """Return what training adds to the rows of the selected rollouts, by traj_id."""
    columns = (selection.trajectories, selection.advantages, update.log_probs, update.entropies)
    return {
        t.traj_id: TrainingLabels(True, advantage, log_probs, entropy)
        for t, advantage, log_probs, entropy in zip(*columns, strict=True)
    }


def frozen_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of the model without gradients, in evaluation mode."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class PhaseTimer:
    """Measures the seconds of the phases of a step, `with timer("name_s"): ...`, and with `memory` the peak memory of this
    process and its descendants in each, as `name_gb` in 10^9 bytes."""

    def __init__(self, *, memory: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}
        self._measure_memory, self._start = memory, time.monotonic()

    def __call__(self, name: str) -> "PhaseTimer":
        self._name, self._since = name, time.monotonic()
        return self

    def __enter__(self) -> None:
        if self._measure_memory:
            self._memory = PeakMemory().__enter__()

    def __exit__(self, *error: object) -> None:
        self.seconds[self._name] = time.monotonic() - self._since
        if self._measure_memory:
            self._memory.__exit__(None, None, None)
            self.memory_gb[self._name.removesuffix("_s") + "_gb"] = self._memory.gb

    def total(self) -> float:
        return time.monotonic() - self._start
