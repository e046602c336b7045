"""GRPO-RoC on one machine: the steps of `rl.step` in stages, with checkpoints and evaluations.

In the modes one_step_off and async, rollouts are generated in the background
(`group_stream`).

Source: rStar2-Agent, sections 2 and 4. No draw uses global random state: each has a seed derived from what it is for, so
a run that is resumed from a checkpoint continues exactly as if it had not been interrupted.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engine import Engine
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.environments.mixture import RunEnvironment, restricted
from rstar_lab.rl.evaluation import local_rollouts
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.rollout.checks import check_template, check_tools
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.rollout.words import nothing_learnt
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.step import PhaseTimer, Sampled, Update, run_step
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.training.checkpoint import TrainerState, restore_checkpoint, save_checkpoint
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.driver import LocalDriver
from rstar_lab.rl.training.group_stream import CorrectionLimit
from rstar_lab.rl.training.rollout_source import RolloutSource
from rstar_lab.rl.training.stages import filter_problems, keep_stage_model, stage_end_reason, stage_model, stage_table
from rstar_lab.rl.training.update import Learner, with_cpu_precision
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeldOut = Mapping[str, Mapping[str, float]]  # results by the name of the set
Evaluate = Callable[[int], Awaitable[HeldOut]]  # evaluates the weights of the engines after a step


class TrainerStep(LocalDriver):
    """The driver of one step of the trainer."""

    def __init__(self, trainer: "Trainer", stage: str, rl: RlSection, pool: Sequence[Problem], number: int):
        """stage, pool: name and problems of the stage. number: of the step in the run."""
        super().__init__(
            trainer.learner, rl, trainer.context(rl), trainer.servers,
            seed=step_seed(trainer.recipe.seed, number), mismatch_limit=trainer.recipe.engine.mismatch_limit_of(),
            stage_step=trainer.state.stage_step, in_thread=trainer.rollouts.stream is not None,
        )  # fmt: skip
        self.trainer, self.stage, self.pool, self.number = trainer, stage, pool, number

    async def sample(self) -> Sampled:
        await check_tools(self.trainer.tools, self.seed)
        source = self.trainer.rollouts
        sampled = await source.next_step(self.stage, self.rl, self.pool, self.number, self.seed)
        newest = source.versions[-1]
        older = (version < newest for t in sampled.trajectories for turn in t.turns for version, _ in turn.versions)
        if source.stream is not None or any(older):
            self.version = newest
        return sampled

    async def update(self, selection: Selection) -> Update:
        update, trainer = await super().update(selection), self.trainer
        trainer.correction_limit.check(update.statistics.get("corrected_share"), self.rl)
        if selection.trajectories:
            trainer.rollouts.versions.append(self.number)
        return update

    async def sync(self) -> None:
        source = self.trainer.rollouts
        if source.stream is None:
            await self.trainer.load_weights(self.number)
        elif self.rl.schedule.type == "async":
            await source.load_newest(source.stream)


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
        evaluate: Evaluate | None = None,
        environments: Mapping[str, RunEnvironment] | None = None,
        servers: Mapping[str, Engine] | None = None,
    ):
        """model: the model with which the first stage starts, on its device. problems: problems of each stage, by its name.
        helpers: processes that share the updates. evaluate: called every `evaluate.during.every` steps. environments: entries
        of `rl.environments`, by name. servers: engines of the servers that the methods need, by name."""
        self.recipe, self.tokenizer, self.engines = recipe, tokenizer, engines
        self.tools, self.reward, self.writer, self.problems, self.on_step = tools, reward, writer, problems, on_step
        self.codec = Codec(tokenizer, tools, recipe.rl.prompt_style)
        check_template(self.codec)
        self.environments = environments or {}
        self.learner = Learner(model)
        self.helpers, self.evaluate, self.servers = helpers, evaluate, servers or {}
        self.state = TrainerState()
        self.rollouts = RolloutSource(
            recipe.seed, writer.run_dir.name, engines, self.context, self.load_weights, self.servers
        )
        self.correction_limit = CorrectionLimit()
        self.first = True  # whether the next step is the first of this process

    # The algorithm

    async def step(self, stage: str, rl: RlSection, pool: Sequence[Problem]) -> dict[str, Any]:
        """Run one step of GRPO-RoC and return its metrics."""
        number, source = self.state.step + 1, self.rollouts
        timer, self.first = PhaseTimer(memory=self.first), False
        busy_s = self.engines.clock.seconds()
        driver = TrainerStep(self, stage, rl, pool, number)
        step = await run_step(driver, timer)
        every = self.recipe.evaluate.during.every
        if self.evaluate and every and number % every == 0:
            with timer("evaluate_s"):
                step = replace(step, held_out=await self.evaluate_weights(self.evaluate, number))
        self.state.add_rollouts(step.sampled.trajectories, rl)
        with timer("store_s"):
            rows = step.rows()
        step = replace(
            step,
            seconds=timer.seconds,
            total_s=timer.total(),
            retired=len(self.state.retired),
            # The busy time of an engine is known with the scheduler only.
            busy_s=None if rl.sync.lockstep else (self.engines.clock.seconds() - busy_s) / len(self.engines.engines),
        )
        metrics = step.metrics
        self.writer.write_step(stage, number, **rows, metrics=metrics)
        self.state.step, self.state.stage_step = number, self.state.stage_step + 1
        if source.stream is not None:
            first = [group.tasks[0] for group in source.stream.open]
            self.state.carried = [(task.group_id, task.problem_id) for task in first]
        return {"stage": stage, "step": number} | metrics | timer.memory_gb

    async def load_weights(self, version: int) -> None:
        """Send the weights of the policy to the engines."""
        await self.engines.load(self.learner.model, version)

    async def evaluate_weights(self, evaluate: Evaluate, step: int) -> HeldOut:
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
            await self.run_stage(stages[number], base if number == 0 else None)
        self.learner.dismiss()
        result: dict[str, Any] = {"stages": stage_table(self.recipe.stages, self.writer.run_dir)}
        if reason := nothing_learnt(RunReader(self.writer.run_dir).metrics(), tools=bool(self.tools)):
            result["nothing_learnt"] = reason
        self.writer.finish("finished", result=result)

    async def run_stage(self, stage: Stage, base: "PreTrainedModel | None") -> None:
        """Train the remaining steps of a stage. base: reference model of the first stage, if it has a KL term."""
        rl, state = with_cpu_precision(self.recipe.settings(stage), self.learner.device), self.state
        pool = await self.problem_pool(stage, rl)
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


def frozen_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of the model without gradients, in evaluation mode."""
    return copy.deepcopy(model).requires_grad_(False).eval()
