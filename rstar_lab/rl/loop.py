"""A training loop of your own: engines, sandbox, policy and run store behind blocking calls, for a notebook or a script.

with TrainingLoop("tiny_fast", "runs/tiny_fast-sft/sft/model", name="mine") as loop:
    for batch in batches:
        rollouts = loop.sample(batch, n=16)
        kept = loop.resample(rollouts)
        print(loop.update(kept, group_advantages([t.reward for t in kept], [t.group_id for t in kept])))

`loop.run_step(batch)` is the whole step with the methods of the recipe. What is stored of a step is the same in both cases.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rstar_lab.common.blocking import LoopThread
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import trained_tokens
from rstar_lab.rl.evaluation import local_rollouts, store_evaluation
from rstar_lab.rl.methods.user import as_streams
from rstar_lab.rl.models.model import load_tokenizer, save_model
from rstar_lab.rl.models.sources import get_model
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import load_policy
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.rollout.plan import rollout_task
from rstar_lab.rl.rollout.run import run_rollouts, score_groups
from rstar_lab.rl.seeds import group_seed, step_seed
from rstar_lab.rl.session import RunSession, open_run, vocabulary
from rstar_lab.rl.step import PhaseTimer, Sampled, Update, run_step, select
from rstar_lab.rl.training.driver import LocalDriver
from rstar_lab.rl.training.rollout_source import wrapped_slots
from rstar_lab.rl.training.teacher import open_servers
from rstar_lab.rl.training.trainer import frozen_copy
from rstar_lab.rl.training.update import Learner, with_cpu_precision
from rstar_lab.rl.trajectory import Trajectory, by_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OwnUpdate = Callable[[Selection], Mapping[str, float]]


class LoopStep(LocalDriver):
    """The driver of one step of the loop: rollouts that are sampled already."""

    def __init__(
        self, loop: "TrainingLoop", select: Callable[[list[Trajectory]], Selection], own: OwnUpdate | None = None
    ):
        """select: chooses among all rollouts that were sampled for the step. own: see `TrainingLoop.update`."""
        rl = with_cpu_precision(loop.rl, loop.learner.device)
        super().__init__(
            loop.learner, rl, loop._training, loop._servers, seed=step_seed(loop.recipe.seed, loop.step + 1),
            mismatch_limit=loop.recipe.engine.mismatch_limit_of(), stage_step=loop.step,
        )  # fmt: skip
        self.loop, self.select, self.own = loop, select, own

    async def sample(self) -> Sampled:
        rollouts = self.loop._sampled
        return Sampled(rollouts, self.select(rollouts), self.loop._groups)

    async def update(self, selection: Selection) -> Update:
        if self.own is None or not selection.trajectories:
            return await super().update(selection)
        statistics = dict(await asyncio.to_thread(self.own, selection))
        tokens = sum(trained_tokens(selection.trajectories, selection.streams))
        return Update(statistics, tokens, statistics.pop("grad_norm"))

    async def sync(self) -> None:
        self.loop.step += 1
        await self.loop._engines.load(self.learner.model, self.loop.step)


class TrainingLoop:
    """The parts of a training run, used one call at a time. Every call blocks and shows its progress.

    Ctrl-C, or the interrupt of a notebook's kernel, ends a call, and the loop can be used again: the rollouts of an interrupted
    `sample` are dropped, and a started update is completed and stored first, as half an update would leave trainer and engines
    with different weights. A second Ctrl-C does not wait for it; close the loop then.

    Attributes:
        recipe: the recipe; its `rl` section has the defaults of all calls.
        step: number of updates so far.
        run_dir: folder of the run, which the inspector can follow while the loop runs.
        problems: problems of the stage, without those of the evaluation sets.
        held_out: problems of the recipe's evaluation sets, by the name of the set.
    """

    def __init__(
        self,
        recipe: str | Path | Recipe,
        model: str | Path,
        *,
        name: str | None = None,
        runs_dir: str | Path = "runs",
        overrides: dict[str, Any] | None = None,
        stage: int = 0,
        reporter: Reporter | None = None,
    ):
        """Args:
            recipe: name or file of a recipe, or a recipe.
            model: folder or name of the model to start with.
            name: the run is called `<name>-loop`. Default: the name of the recipe.
            runs_dir: folder of the runs.
            overrides: recipe values by dotted key, such as `{"rl.lr": 1e-4}`.
            stage: stage of the recipe whose settings are used, from 0.
            reporter: shows the progress. Default: on the standard output.
        """  # fmt: skip
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(recipe, overrides)
        changes = {"runs": Path(runs_dir)} | ({"name": name} if name else {})
        self.recipe = recipe.model_copy(update=changes)
        self._stage = self.recipe.stages[stage] if self.recipe.stages else None
        self.rl = self.recipe.settings(self._stage) if self._stage else self.recipe.rl
        self.model_dir, self.step = get_model(str(model)), 0
        self._reporter = reporter or Reporter()
        self._sampled: list[Trajectory] = []
        self._groups = 0  # groups sampled since the last update

    def open(self) -> Self:
        """Start engines and sandbox and create the run. Called at the start of a `with` block."""
        self._thread = LoopThread("training loop")
        try:
            self._thread.call(self._open())
        except BaseException:
            self.close()
            raise
        return self

    __enter__ = open

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop engines and sandbox and close the run. Called at the end of a `with` block."""
        if stack := self.__dict__.pop("_stack", None):
            self._thread.call(stack.aclose())
        if thread := self.__dict__.pop("_thread", None):
            thread.stop()

    async def _open(self) -> None:
        recipe, self._stack = self.recipe, AsyncExitStack()
        stages = [self._stage] if self._stage else []
        resolved = resolve(recipe, stages=stages)
        self._session = session = await self._stack.enter_async_context(RunSession.open(resolved, self._reporter))
        bf16 = self.rl.precision != "fp32"
        self.learner = Learner(load_policy(self.model_dir, recipe.rl.lora, seed=recipe.seed, bf16=bf16))
        reference = frozen_copy(self.learner.model) if self.rl.method.kl_coefficient else None
        self.learner.begin_stage(with_cpu_precision(self.rl, self.learner.device), reset=False, reference=reference)
        self.tokenizer, self.held_out = load_tokenizer(self.model_dir), session.held_out
        self.problems = resolved.problems[self._stage.name] if self._stage else []
        self._engines = await session.engines(self.model_dir)
        opened = open_servers([self.rl] if stages else [], recipe.engine, self.tokenizer, self._engines.context)
        self._servers = await self._stack.enter_async_context(opened)
        self._training = await session.context(self.tokenizer, self.rl)
        self._evaluation = await session.context(self.tokenizer)
        self._writer = self._stack.enter_context(open_run(session, "loop", "train", ()))
        if self._writer.last_step:
            # A loop has no position in the data from which it could continue.
            raise UserError(
                f"run {self._writer.run_dir} has {self._writer.last_step} steps already: choose another name"
            )
        self._writer.write_vocabulary(vocabulary(self.tokenizer))
        self.run_dir = self._writer.run_dir
        await self._engines.load(self.learner.model, 0)

    @property
    def model(self) -> "PreTrainedModel":
        """The policy."""
        return self.learner.model

    def sample(self, problems: Sequence[Problem], n: int) -> list[Trajectory]:
        """Generate rollouts with the current weights. Their rewards are those of `rl.reward`.

        Args:
            problems: The problems.
            n: Rollouts of each problem.

        Returns:
            The rollouts, group by group. `trajectory.group_id` is new for every problem and call.
        """
        return self._thread.call(self._sample(problems, n))

    async def _sample(self, problems: Sequence[Problem], n: int) -> list[Trajectory]:
        tasks = [
            rollout_task(
                problem, run=self.run_dir.name, seed=self.recipe.seed, step=self.step + 1, group=number, sample=sample
            )
            for number, problem in enumerate(problems, start=self._groups)
            for sample in range(n)
        ]
        self._groups += len(problems)
        with self._reporter.work("sample", len(tasks)) as work:
            done = itertools.count(1)
            slots = self._engines.slots(tasks, self.rl.rollout_mode, self.rl.limits.max_response_tokens)
            rollouts = await run_rollouts(
                tasks, self._training, slots=wrapped_slots(slots, tasks, self.rl, self._servers),
                on_rollout=lambda _: work.update(min(next(done), len(tasks) - 1), every_s=5),
            )  # fmt: skip
            rollouts = await score_groups(rollouts, tasks, self._training)
            work.update(len(tasks), f"reward {np.mean([t.reward for t in rollouts]):.2f}")
        self._sampled += rollouts
        return rollouts

    def score(self, rollouts: Sequence[Trajectory], reward: Callable[[Trajectory], float]) -> list[Trajectory]:
        """Return the rollouts with the rewards of your own function, also in the run store.

        Args:
            rollouts: Rollouts of `sample`.
            reward: Function of a trajectory.
        """
        scored = {t.traj_id: replace(t, reward=float(reward(t))) for t in rollouts}
        self._sampled = [scored.get(t.traj_id, t) for t in self._sampled]
        return [scored[t.traj_id] for t in rollouts]

    def resample(self, rollouts: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the rollouts that the rule of the recipe keeps of each group (RoC), without those that failed
        through no fault of the model.

        Args:
            rollouts: Rollouts of `sample`. Groups with equal rewards stay; their group advantages are 0.
        """
        roc, groups = self.rl.method.roc.bound(self.rl), by_group(t for t in rollouts if t.usable)
        seed = step_seed(self.recipe.seed, self.step + 1)
        return [
            t
            for name, group in groups.items()
            for t in roc.select(group, np.random.default_rng(group_seed(seed, name)))
        ]

    def run_step(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """Run one step of the recipe: sample rollouts of the problems, select and score them with its methods, and update.

        Args:
            problems: The problems. Each gets as many rollouts as the recipe says.

        Returns:
            The metrics of the step, as in metrics.jsonl.
        """
        self.sample(problems, self.rl.rollouts_per_group)
        seed = step_seed(self.recipe.seed, self.step + 1)
        return self._thread.call(self._update(lambda rollouts: select(rollouts, self.rl, seed)), completes=True)

    def update(
        self, rollouts: Sequence[Trajectory], advantages: Sequence[Any] | np.ndarray, own: OwnUpdate | None = None
    ) -> dict[str, Any]:
        """Update the policy, send its weights to the engines, and store the step with all rollouts sampled for it.

        The settings are those of `loop.rl`; assign a changed section to it, for example for another learning rate.

        Args:
            rollouts: those to train on.
            advantages: one per rollout: a number, one number per turn, one per token of the response, or `Streams`.
            own: your own update of `loop.model` on a `Selection`, in place of that of the recipe. It returns `grad_norm` and
                statistics of its loss.

        Returns:
            The metrics of the step, as in metrics.jsonl.
        """
        streams = as_streams(advantages, rollouts, "advantages")
        return self._thread.call(
            self._update(lambda sampled: Selection.chosen(sampled, rollouts, streams), own), completes=True
        )

    async def _update(
        self, select: Callable[[list[Trajectory]], Selection], own: OwnUpdate | None = None
    ) -> dict[str, Any]:
        step = await run_step(LoopStep(self, select, own), PhaseTimer())
        metrics = step.metrics
        self._writer.write_step("loop", self.step, **step.rows(), metrics=metrics)
        self._sampled, self._groups = [], 0
        reward, loss = metrics["reward"] or 0.0, metrics.get("loss", 0.0)
        self._reporter.print_line(f"step {self.step}: reward {reward:.2f}, loss {loss:.3f}")
        return {"step": self.step} | metrics

    def evaluate(self, problems: Sequence[Problem], samples: int = 1) -> dict[str, Any]:
        """Return pass@1 of the current weights and its 95% interval ([mean, low, high] under `pass1`), and other results.

        Args:
            problems: Held-out problems.
            samples: Rollouts of each problem. They are stored as a run of their own.
        """
        return self._thread.call(self._evaluate(problems, samples))

    async def _evaluate(self, problems: Sequence[Problem], samples: int) -> dict[str, Any]:
        suffix, parent = f"loop-eval-{self.step:06d}", {"run": self.run_dir.name, "step": self.step}
        engines, mode = self._engines, self.rl.rollout_mode
        generate = local_rollouts(
            problems, self._evaluation, engines=engines, mode=mode, context_length=engines.context
        )
        with (
            open_run(self._session, suffix, "evaluate", (), parent=parent) as writer,
            self._reporter.work("evaluate", len(problems)) as work,
        ):
            writer.cut(0)
            result = await store_evaluation(
                problems, generate, samples=samples, writer=writer, seed=self.recipe.seed,
                progress=lambda done, total: work.update(done, "problems", every_s=5),
            )  # fmt: skip
        # Clears the prefix cache, so that the next rollouts do not depend on the evaluation.
        await self._engines.load(self.learner.model, self.step)
        return result

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer to a folder that transformers and vLLM can load.

        Args:
            folder: The new folder.
        """
        save_model(folder, self.learner.model, self.tokenizer, prompt_format=self.recipe.rl.prompt.format)
        return Path(folder)
