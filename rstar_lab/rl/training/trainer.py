"""GRPO-RoC on one machine: roll out, verify, resample, update, push the weights back. Read `Trainer.step` first.

Source: rStar2-Agent, sections 2 and 4. Nothing here draws from a global random state: every draw has a seed that is derived from
what it is for, so a run resumed from a checkpoint goes on as if it had never stopped.
"""

import asyncio
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.rl.algorithm.selection import Selection, select_rollouts, solved_groups
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.rollout.agent_loop import Codec, RolloutLimits
from rstar_lab.rl.rollout.driver import RolloutTask, run_rollouts
from rstar_lab.rl.rollout.metrics import rollout_metrics
from rstar_lab.rl.rollout.plan import draw_problems, rollout_task
from rstar_lab.rl.rollout.records import TrainingLabels, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.seeds import step_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.training.checkpoint import TrainerState, restore_checkpoint, save_checkpoint
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.stages import filter_problems, keep_stage_model, stage_end_reason, stage_model, stage_table
from rstar_lab.rl.training.update import FP32_MISMATCH, Learner, Update
from rstar_lab.rl.trajectory import StopReason, Trajectory
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Trainer:
    """Steps of one run; `run` makes them all. Interrupted, the same call goes on from the last checkpoint."""

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
    ):
        """model: the one the first stage starts from, on its device; problems: of each stage, by its name; helpers: that
        share its updates."""
        self.recipe, self.tokenizer, self.engines = recipe, tokenizer, engines
        self.tools, self.reward, self.writer, self.problems, self.on_step = tools, reward, writer, problems, on_step
        self.codec = Codec(tokenizer, tools)
        self.learner = Learner(model)
        self.helpers = helpers
        self.state = TrainerState()
        self.over = asyncio.Event()  # set when the time of the step under way is over
        # Groups that the last step's end cut: all their rollouts, with what there is of each.
        self.carried: list[RolloutTask] = []

    # The run

    async def run(self) -> None:
        """All stages, from the last checkpoint on."""
        stages = self.recipe.stages
        start = frozen_copy(self.learner.model) if self.recipe.settings(stages[0]).kl_coefficient else None
        self.state = restore_checkpoint(self.writer, self.learner, self.recipe.rl)
        await self.engines.load(self.learner.model, self.state.step)
        if self.helpers is not None:
            self.learner.lead(
                await asyncio.to_thread(self.helpers.lead, "rstar_lab.rl.training.update:follow"), self.recipe.rl
            )
        for number in range(self.state.stage, len(stages)):
            if number > self.state.stage:
                self.state.enter_stage(number)
                await self.give_up_carried()
            await self.run_stage(stages[number], start if number == 0 else None)
        self.learner.dismiss()
        self.writer.finish("finished", result={"stages": stage_table(self.recipe, self.writer.run_dir)})

    async def run_stage(self, stage: Stage, start: "PreTrainedModel | None") -> None:
        """What is left of a stage. start: the model before it, where this is the first and one is asked for."""
        rl, state = self.recipe.settings(stage), self.state
        pool = await self.pool(stage, rl)
        if state.carried and not self.carried:
            self.carried = self.begin_again(stage, rl)
        lines = [line for line in RunReader(self.writer.run_dir).metrics() if line["stage"] == stage.name]
        if not self.stage_has_ended(stage, lines, pool):
            reference = start
            if rl.kl_coefficient and start is None:
                before = self.recipe.stages[state.stage - 1].name
                folder = stage_model(self.writer.run_dir, before)
                reference = frozen_copy(load_model(folder, torch.float32).to(self.learner.device))  # type: ignore[arg-type]
            reset = stage.reset_optimizer and state.stage_step == 0
            self.learner.begin_stage(rl, reset=reset, reference=reference)
        while not self.stage_has_ended(stage, lines, pool):
            metrics = await self.step(stage.name, rl, pool)
            lines.append(metrics)
            over = self.stage_has_ended(stage, lines, pool)
            state.finished = over and stage is self.recipe.stages[-1]
            if over or state.step % rl.checkpoint_every == 0:
                save_checkpoint(self.writer, state, self.learner, self.tokenizer, rl.keep_checkpoints)
            self.on_step(metrics)
        if found := self.writer.latest_checkpoint():
            keep_stage_model(found[1], self.writer.run_dir, stage.name)

    async def pool(self, stage: Stage, rl: RlSection) -> Sequence[Problem]:
        """The problems of a stage, without those that its filter leaves out."""
        problems = self.problems[stage.name]
        if stage.filter is None:
            return problems
        return await filter_problems(
            problems, stage.filter, rl, stage=stage.name, step=self.state.step - self.state.stage_step,
            recipe=self.recipe, run_dir=self.writer.run_dir, engines=self.engines, codec=self.codec, tools=self.tools,
            reward=self.reward,
        )  # fmt: skip

    def stage_has_ended(self, stage: Stage, lines: Sequence[Mapping[str, Any]], pool: Sequence[Problem]) -> bool:
        retired = set(self.state.retired)
        return stage_end_reason(stage, lines) is not None or all(problem.problem_id in retired for problem in pool)

    async def step(self, stage: str, rl: RlSection, pool: Sequence[Problem]) -> dict[str, Any]:
        """One step of GRPO-RoC; returns its metrics."""
        step = self.state.step + 1
        seed, clock = step_seed(self.recipe.seed, step), PhaseTimer()
        self.over = asyncio.Event()
        if rl.step_time_s is not None:
            asyncio.get_running_loop().call_later(rl.step_time_s, self.over.set)
        with clock("generate_s"):
            going_on = len({task.group_id for task in self.carried})
            fresh = self.draw(stage, max(rl.problems_per_step - going_on, 0), pool)
            trajectories = await self.run_rollouts(fresh, rl, step)
            kept = select_rollouts(trajectories, rl, seed)
            groups = rl.problems_per_step
            for _ in range(rl.dynamic_sampling):
                if not (missing := rl.problems_per_step - kept.groups) or self.over.is_set():
                    break
                trajectories += await self.run_rollouts(self.draw(stage, missing, pool), rl, step, first_group=groups)
                kept = select_rollouts(trajectories, rl, seed)
                groups += missing
        with clock("update_s"):
            lr_scale = min(1.0, (self.state.stage_step + 1) / max(1, rl.warmup_steps))
            update = self.learner.update(kept, rl, lr_scale=lr_scale, seed=seed)
            update.check_mismatch(kept, self.mismatch_limit, version=step - 1 if rl.carry_over else None)
        with clock("weights_s"):
            await self.engines.load(self.learner.model, step)
        if rl.retire_from is not None:
            self.state.retired += problems_to_retire(trajectories, rl.retire_from)
        metrics = (
            rollout_metrics(trajectories)
            | {"groups": groups, "solved_groups": solved_groups(trajectories), "equal_groups": kept.equal_groups}
            | {"kept": len(kept.trajectories), "void": kept.void, "retired": len(self.state.retired)}
            | ({"carried": len(self.carried), "stale_tokens": stale_tokens(kept, step - 1)} if rl.carry_over else {})
            | update.metrics
        )
        with clock("store_s"):
            rows = self.rows(trajectories, kept, update, rl)
        metrics |= clock.seconds | {"step_s": clock.total()}
        self.writer.write_step(stage, step, **rows, metrics=metrics)
        self.state.step, self.state.stage_step = step, self.state.stage_step + 1
        return {"stage": stage, "step": step} | metrics

    def draw(self, stage: str, count: int, pool: Sequence[Problem]) -> list[Problem]:
        """The next problems: an order of the whole pool for each pass through it; retired ones are passed over."""
        state = self.state
        drawn, state.position = draw_problems(
            pool, state.position, count, seed=self.recipe.seed, stage=stage, retired=set(state.retired)
        )
        return drawn

    def group(self, problem: Problem, rl: RlSection, step: int, number: int) -> list[RolloutTask]:
        count = rl.group_size * (1 if rl.roc == "none" else rl.oversample)
        run, seed = self.writer.run_dir.name, self.recipe.seed
        return [
            rollout_task(problem, run=run, seed=seed, step=step, group=number, sample=sample) for sample in range(count)
        ]

    async def run_rollouts(
        self, problems: Sequence[Problem], rl: RlSection, step: int, first_group: int = 0
    ) -> list[Trajectory]:
        """The groups carried over and those of new problems; what the end of the step's time cuts is carried over."""
        fresh = [task for i, one in enumerate(problems, start=first_group) for task in self.group(one, rl, step, i)]
        tasks, self.carried = self.carried + fresh, []
        done = await run_rollouts(
            tasks,
            slots=self.engines.slots(tasks, rl.rollout, rl.max_response_tokens),
            codec=self.codec,
            tools=self.tools,
            reward=self.reward,
            limits=RolloutLimits(rl.max_response_tokens, rl.max_turns, rl.max_tool_chars, rl.time_limit_s),
            temperature=rl.temperature,
            step_ended=self.over if rl.step_time_s is not None else None,
            carry_over=rl.carry_over,
        )
        cut = {t.group_id for t in done if t.stop_reason is StopReason.UNFINISHED}
        self.carried = [replace(task, partial=t) for task, t in zip(tasks, done, strict=True) if t.group_id in cut]
        self.state.carried = list(dict.fromkeys((task.group_id, task.problem.problem_id) for task in self.carried))
        return [t for t in done if t.group_id not in cut]

    def begin_again(self, stage: Stage, rl: RlSection) -> list[RolloutTask]:
        """The groups that a checkpoint says were under way: their tokens are not kept, so they start anew."""
        problems = {problem.problem_id: problem for problem in self.problems[stage.name]}
        tasks = []
        for group_id, problem_id in self.state.carried:
            step, number = map(int, group_id.split("-"))
            tasks += self.group(problems[problem_id], rl, step, number)
        return tasks

    async def give_up_carried(self) -> None:
        """A stage's end: the next has other limits and problems."""
        for task in self.carried:
            for tool in self.tools.values():
                await tool.close(task.traj_id)
        self.carried, self.state.carried = [], []

    @property
    def mismatch_limit(self) -> float | None:
        limit = self.recipe.engine.mismatch_limit
        return FP32_MISMATCH if limit is None and self.recipe.engine.dtype == "float32" else limit

    def rows(
        self, trajectories: Sequence[Trajectory], kept: Selection, update: Update, rl: RlSection
    ) -> dict[str, list]:
        """What the run store keeps of a step."""
        places = {t.traj_id: i for i, t in enumerate(kept.trajectories)}
        rows: dict[str, list[Any]] = {"trajectories": [], "calls": [], "transcripts": []}
        for trajectory in trajectories:
            i = places.get(trajectory.traj_id)
            labels = TrainingLabels(False)
            if i is not None:
                labels = TrainingLabels(True, kept.advantages[i], update.log_probs[i], update.entropies[i])
            arrays = rl.token_arrays == "all" or i is not None
            if rl.token_arrays == "sampled":
                arrays = trajectory.sample == 0
            rows["trajectories"].append(trajectory_row(trajectory, labels))
            rows["calls"] += call_rows(trajectory)
            rows["transcripts"].append(transcript_row(trajectory, labels, arrays=arrays))
        return rows


def stale_tokens(kept: Selection, version: int) -> float | None:
    """Share of the kept rollouts' own tokens that an older policy than `version` wrote."""
    own = [v for t in kept.trajectories for v, mine in zip(t.token_versions, t.loss_mask, strict=True) if mine]
    return sum(v < version for v in own) / len(own) if own else None


def frozen_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy that stays as it is: the reference of the KL term."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def problems_to_retire(trajectories: Sequence[Trajectory], threshold: float) -> list[str]:
    """Ids of the problems whose share of right rollouts in this step is at least `threshold`."""
    rewards: dict[str, list[bool]] = defaultdict(list)
    for t in trajectories:
        if t.usable:
            rewards[t.problem_id].append(t.reward > 0)
    return [name for name, right in rewards.items() if sum(right) >= threshold * len(right)]


class PhaseTimer:
    """Seconds by what they were spent on."""

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
