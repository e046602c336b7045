"""GRPO-RoC on one machine. Each step: generate rollouts, resample them (RoC), update the policy, send its weights to the
engines. Start reading at `Trainer.step`.

Source: rStar2-Agent, sections 2 and 4. No draw uses global random state: each has a seed derived from what it is for, so
a run that is resumed from a checkpoint continues exactly as if it had not been interrupted.
"""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.rl.algorithm.selection import Selection, problems_to_retire, select_rollouts, solved_groups
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.driver import run_rollouts
from rstar_lab.rl.rollout.metrics import rollout_metrics
from rstar_lab.rl.rollout.plan import draw_problems, rollout_task
from rstar_lab.rl.rollout.records import TrainingLabels, step_rows
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.training.checkpoint import TrainerState, restore_checkpoint, save_checkpoint
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.stages import filter_problems, keep_stage_model, stage_end_reason, stage_model, stage_table
from rstar_lab.rl.training.update import Learner, MismatchError, UpdateResult
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FAR_STEPS = 5  # updates in a row with too large a corrected_share that stop a run


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
    ):
        """model: the model that the first stage starts from, on its device. problems: of each stage, by its name.
        helpers: processes that share the updates. evaluate: evaluates the weights of the engines after a step and returns
        metrics; called every `evaluate.every` steps."""
        self.recipe, self.tokenizer, self.engines = recipe, tokenizer, engines
        self.tools, self.reward, self.writer, self.problems, self.on_step = tools, reward, writer, problems, on_step
        self.codec = Codec(tokenizer, tools, prompt_format=recipe.rl.prompt_format)
        self.learner = Learner(model)
        self.helpers, self.evaluate = helpers, evaluate
        self.state = TrainerState()
        self.weights_version = (
            0  # oldest policy version with the current weights: a step without update does not change them
        )
        self.far_steps = 0  # consecutive updates whose corrected_share exceeds rl.max_corrected_share
        self.step_ended = asyncio.Event()  # set when the time of the current step is up
        self.carried: list[RolloutTask] = []  # all rollouts of the groups that the end of the last step cut off

    # The algorithm

    async def step(self, stage: str, rl: RlSection, pool: Sequence[Problem]) -> dict[str, Any]:
        """Run one step of GRPO-RoC and return its metrics."""
        step = self.state.step + 1
        seed, timer = step_seed(self.recipe.seed, step), PhaseTimer()
        self._start_step_clock(rl)
        with timer("generate_s"):
            trajectories, selection, groups = await self.collect(stage, rl, pool, step, seed)
        with timer("update_s"):
            lr_scale = min(1.0, (self.state.stage_step + 1) / max(1, rl.warmup_steps))
            update = self.learner.update(selection, rl, lr_scale=lr_scale, seed=seed)
            update.check_mismatch(
                selection, self.recipe.engine.resolved_mismatch_limit, self.weights_version if rl.carry_over else None
            )
            self._check_corrected_share(update.metrics.get("corrected_share"), rl)
            stale = stale_tokens(selection, self.weights_version)
            if selection.trajectories:
                self.weights_version = step
        with timer("weights_s"):
            await self.engines.load(self.learner.model, step)
        held_out: dict[str, float] = {}
        if self.evaluate and self.recipe.evaluate.every and step % self.recipe.evaluate.every == 0:
            with timer("evaluate_s"):
                held_out = await self.evaluate(step)
                await self.engines.load(self.learner.model, step)  # clears the prefix cache, as a resumed run finds it
        if rl.retire_from is not None:
            self.state.retired += problems_to_retire(trajectories, rl.retire_from)
        metrics = rollout_metrics(trajectories) | selection.metrics | update.metrics | held_out
        metrics |= {"groups": groups, "solved_groups": solved_groups(trajectories), "retired": len(self.state.retired)}
        if rl.carry_over:
            metrics |= {"carried": len(self.carried), "stale_tokens": stale}
        with timer("store_s"):
            rows = step_rows(trajectories, training_labels(selection, update), rl.token_arrays)
        metrics |= timer.seconds | {"step_s": timer.total()}
        self.writer.write_step(stage, step, **rows, metrics=metrics)
        self.state.step, self.state.stage_step = step, self.state.stage_step + 1
        return {"stage": stage, "step": step} | metrics

    def _check_corrected_share(self, share: float | None, rl: RlSection) -> None:
        """Raise MismatchError if the correction has changed too many tokens for FAR_STEPS updates in a row."""
        if share is None:  # a step without an update
            return
        self.far_steps = self.far_steps + 1 if share > rl.max_corrected_share else 0
        if self.far_steps == FAR_STEPS:
            raise MismatchError(
                f"rl.correction: {rl.resolved_correction[0]} changed more than {rl.max_corrected_share:.0%} of the tokens in "
                f"{FAR_STEPS} updates in a row, last {share:.0%}: the engine samples from another policy than the trainer "
                "trains. Check engine.dtype and the weight sync, or use newer rollouts"
            )

    async def collect(
        self, stage: str, rl: RlSection, pool: Sequence[Problem], step: int, seed: int
    ) -> tuple[list[Trajectory], Selection, int]:
        """Generate and select the rollouts of a step; return (all rollouts, selection, number of groups started).

        With dynamic_sampling, groups without signal are replaced by further problems, for that many rounds.
        """
        carried_groups = len({task.group_id for task in self.carried})
        problems = self.draw(stage, max(rl.problems_per_step - carried_groups, 0), pool)
        trajectories = await self.generate(problems, rl, step)
        selection = select_rollouts(trajectories, rl.selection_config, seed)
        groups = rl.problems_per_step
        for _ in range(rl.dynamic_sampling):
            missing = rl.problems_per_step - selection.groups
            if not missing or self.step_ended.is_set():
                break
            trajectories += await self.generate(self.draw(stage, missing, pool), rl, step, first_group=groups)
            selection = select_rollouts(trajectories, rl.selection_config, seed)
            groups += missing
        return trajectories, selection, groups

    async def generate(
        self, problems: Sequence[Problem], rl: RlSection, step: int, first_group: int = 0
    ) -> list[Trajectory]:
        """Generate the rollouts of carried groups and of new problems; return those of the groups that are complete.

        Groups that the end of the step cuts off are kept in `carried` for the next step.
        """
        new_tasks = [
            task
            for number, problem in enumerate(problems, start=first_group)
            for task in self.group_tasks(problem, rl, step, number)
        ]
        tasks, self.carried = self.carried + new_tasks, []
        trajectories = await run_rollouts(
            tasks,
            RolloutContext.for_training(self.codec, self.tools, self.reward, rl),
            slots=self.engines.slots(tasks, rl.rollout, rl.max_response_tokens),
            step_ended=self.step_ended if rl.step_time_s is not None else None,
            carry_over=rl.carry_over,
        )
        unfinished = {t.group_id for t in trajectories if t.stop_reason is StopReason.UNFINISHED}
        self.carried = [
            replace(task, partial=t) for task, t in zip(tasks, trajectories, strict=True) if t.group_id in unfinished
        ]
        self.state.carried = list(dict.fromkeys((task.group_id, task.problem.problem_id) for task in self.carried))
        return [t for t in trajectories if t.group_id not in unfinished]

    def draw(self, stage: str, count: int, pool: Sequence[Problem]) -> list[Problem]:
        """Return the next problems of the stage and advance its position."""
        state = self.state
        problems, state.position = draw_problems(
            pool, state.position, count, seed=self.recipe.seed, stage=stage, retired=set(state.retired)
        )
        return problems

    def group_tasks(self, problem: Problem, rl: RlSection, step: int, number: int) -> list[RolloutTask]:
        """Return the rollouts of one group, before selection."""
        run, seed = self.writer.run_dir.name, self.recipe.seed
        return [
            rollout_task(problem, run=run, seed=seed, step=step, group=number, sample=sample)
            for sample in range(rl.rollouts_per_group)
        ]

    def _start_step_clock(self, rl: RlSection) -> None:
        self.step_ended = asyncio.Event()
        if rl.step_time_s is not None:
            asyncio.get_running_loop().call_later(rl.step_time_s, self.step_ended.set)

    # Stages

    async def run(self) -> None:
        """Train all stages, starting at the last checkpoint."""
        stages = self.recipe.stages
        base = frozen_copy(self.learner.model) if self.recipe.settings(stages[0]).kl_coefficient else None
        self.state = restore_checkpoint(self.writer, self.learner, self.recipe.rl)
        await self.engines.load(self.learner.model, self.state.step)
        self.weights_version = self.state.step
        if self.helpers is not None:
            ranks = await asyncio.to_thread(self.helpers.lead, "rstar_lab.rl.training.update:run_update_helper")
            self.learner.lead(ranks, self.recipe.rl)
        for number in range(self.state.stage, len(stages)):
            if number > self.state.stage:
                self.state.enter_stage(number)
                await self.drop_carried()
            await self.run_stage(stages[number], base if number == 0 else None)
        self.learner.dismiss()
        self.writer.finish("finished", result={"stages": stage_table(self.recipe, self.writer.run_dir)})

    async def run_stage(self, stage: Stage, base: "PreTrainedModel | None") -> None:
        """Train the remaining steps of a stage. base: reference model of the first stage, if it has a KL term."""
        rl, state = self.recipe.settings(stage), self.state
        pool = await self.problem_pool(stage, rl)
        if state.carried and not self.carried:
            self.carried = self.restart_carried(stage, rl)
        lines = [line for line in RunReader(self.writer.run_dir).metrics() if line["stage"] == stage.name]
        if not self.stage_has_ended(stage, lines, pool):
            reference = base
            if rl.kl_coefficient and base is None:
                folder = stage_model(self.writer.run_dir, self.recipe.stages[state.stage - 1].name)
                reference = frozen_copy(load_model(folder, torch.float32).to(self.learner.device))  # type: ignore[arg-type]
            reset = stage.reset_optimizer and state.stage_step == 0
            self.learner.begin_stage(rl, reset=reset, reference=reference)
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
        return await filter_problems(
            problems,
            stage.filter,
            RolloutContext.for_training(self.codec, self.tools, self.reward, rl),
            engines=self.engines,
            mode=rl.rollout,
            stage=stage.name,
            step=self.state.step - self.state.stage_step,
            recipe=self.recipe,
            run_dir=self.writer.run_dir,
        )

    def stage_has_ended(self, stage: Stage, lines: Sequence[Mapping[str, Any]], pool: Sequence[Problem]) -> bool:
        retired = set(self.state.retired)
        return stage_end_reason(stage, lines) is not None or all(problem.problem_id in retired for problem in pool)

    # Carry-over

    def restart_carried(self, stage: Stage, rl: RlSection) -> list[RolloutTask]:
        """Return the groups that were in progress at the checkpoint. Their tokens are not stored, so they start again."""
        problems = {problem.problem_id: problem for problem in self.problems[stage.name]}
        tasks = []
        for group_id, problem_id in self.state.carried:
            step, number = map(int, group_id.split("-"))
            tasks += self.group_tasks(problems[problem_id], rl, step, number)
        return tasks

    async def drop_carried(self) -> None:
        """Drop the carried groups at the end of a stage: the next stage has other limits and problems."""
        for task in self.carried:
            for tool in self.tools.values():
                await tool.close(task.traj_id)
        self.carried, self.state.carried = [], []


def training_labels(selection: Selection, update: UpdateResult) -> dict[str, TrainingLabels]:
    """Return what training adds to the rows of the selected rollouts, by traj_id."""
    columns = (selection.trajectories, selection.advantages, update.log_probs, update.entropies)
    return {
        t.traj_id: TrainingLabels(True, advantage, log_probs, entropy)
        for t, advantage, log_probs, entropy in zip(*columns, strict=True)
    }


def stale_tokens(selection: Selection, version: int) -> float | None:
    """Return the share of the model's tokens in the selected rollouts that older weights than those of `version`
    generated."""
    versions = [
        token_version
        for t in selection.trajectories
        for token_version, own in zip(t.token_versions, t.loss_mask, strict=True)
        if own
    ]
    return sum(v < version for v in versions) / len(versions) if versions else None


def frozen_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of the model without gradients, in evaluation mode."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class PhaseTimer:
    """Measures the seconds of the phases of a step: `with timer("name"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def __call__(self, name: str) -> "PhaseTimer":
        self._name, self._since = name, time.monotonic()
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.seconds[self._name] = time.monotonic() - self._since

    def total(self) -> float:
        return time.monotonic() - self._start
