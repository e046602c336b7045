"""Run the agent loop inside verl's workers: take verl's server handle, return verl's output."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.environments.mixture import load_environments
from rstar_lab.rl.evaluation import evaluation_task
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.resolved import ResolvedRecipe
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.plan import rollout_task
from rstar_lab.rl.rollout.run import retry_failed, score_groups
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.engine import ScheduledClient, ScheduledEngine
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.transcripts import RolloutNumbers, find_writer, split

Generate = Callable[[RolloutTask], Awaitable[Trajectory]]


class Group:
    """The rollouts of one group.

    Attributes:
        retried: number of further attempts, by traj_id.
    """

    def __init__(self, size: int, context: RolloutContext, retries: bool):
        """size: number of rollouts. context: that of all environments. retries: generate failed rollouts again, see `retry_failed`."""
        self.running, self.context, self.retries = size, context, retries
        self.retried = Counter[str]()
        self._ended: list[tuple[RolloutTask, Trajectory, Generate]] = []
        self._result: asyncio.Future[dict[str, Trajectory]] = asyncio.get_running_loop().create_future()

    async def run(self, task: RolloutTask, generate: Generate) -> Trajectory:
        """Generate a rollout and wait until the group has ended; return the rollout with the group's parts of its reward.

        The group is scored without a rollout that raises an exception.
        """
        try:
            self._ended.append((task, await generate(task), generate))
        finally:
            self.running -= 1
            if not self.running:
                await self._end()
        return (await self._result)[task.traj_id]

    async def _end(self) -> None:
        ended = sorted(self._ended, key=lambda one: one[0].sample)
        tasks, rollouts = [task for task, _, _ in ended], [trajectory for _, trajectory, _ in ended]
        generators = {task.traj_id: generate for task, _, generate in ended}

        async def again(failed: Sequence[RolloutTask]) -> list[Trajectory]:
            self.retried.update(task.traj_id for task in failed)
            return await asyncio.gather(*(generators[task.traj_id](task) for task in failed))

        try:
            if self.retries:
                rollouts, _ = await retry_failed(tasks, rollouts, again)
            found = await score_groups(rollouts, tasks, self.context)
        except BaseException as error:
            self._result.set_exception(error)
            raise
        self._result.set_result({trajectory.traj_id: trajectory for trajectory in found})


class Groups:
    """The groups of one worker that are in progress."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def join(self, task: RolloutTask, context: RolloutContext, size: int, retries: bool) -> Group | None:
        """Return the group of a rollout that starts; None if nothing depends on the group. Arguments: see `Group`."""
        environment = context.of(task.problem).environment
        if not retries and (environment is None or not environment.scores_groups):
            return None
        self._groups = {name: group for name, group in self._groups.items() if group.running}
        return self._groups.setdefault(task.group_id, Group(size, context, retries))


@dataclass(frozen=True)
class WorkerState:
    """State that all rollouts of one worker process share; verl creates a new loop object for every rollout."""

    settings: Settings
    context: RolloutContext
    evaluations: Mapping[str, RolloutContext]  # by the sampling of `OversamplingManager.generate_evaluation`
    transcripts: Any
    groups: Groups = field(default_factory=Groups)

    @classmethod
    async def open(cls, config: Any, tokenizer: Any) -> "WorkerState":
        settings = Settings.of(config.rstar)
        # Without problems: the files of evaluation sets may not be on this node.
        resolved = ResolvedRecipe(settings.recipe, {}, {}, load_environments(settings.recipe.rl))
        session = RunSession(resolved, Reporter())
        top_p = float(config.actor_rollout_ref.rollout.top_p)  # a key of verl, which no recipe key sets
        context = replace(await session.context(tokenizer, settings.rl), top_p=top_p)
        evaluations = {
            "during": await session.context(tokenizer, in_training=True),
            "model": await session.context(tokenizer),
        }
        return cls(settings, context, evaluations, find_writer(settings.run))


_worker_state: asyncio.Future[WorkerState] | None = None


class RstarAgentLoop(AgentLoopBase):
    """One rollout of one problem."""

    server_manager: ScheduledClient

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Roll out `problem` for a step or an evaluation. An exception is reported to the trainer, which stops.

        evaluation, samples: only for an evaluation: id of the run that stores the rollout, and its rollouts per problem.
        For an evaluation `extra_fields["rollout"]` of the result is the pickled trajectory. For a step it is the pickled
        numbers, and the transcript is sent to the writer of the run.
        """
        try:
            return await self._run(**kwargs)
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            writer = find_writer(Settings.of(self.config.rstar).run)
            await writer.add_error.remote(f"rollout of problem {kwargs['problem']['problem_id']}: {text}")
            raise

    async def _run(self, **kwargs: Any) -> AgentLoopOutput:
        global _worker_state
        if _worker_state is None:
            _worker_state = asyncio.ensure_future(WorkerState.open(self.config, self.tokenizer))
        worker = await _worker_state
        problem, sample, seed = Problem(**kwargs["problem"]), int(kwargs["session_id"]), worker.settings.recipe.seed
        if run := kwargs.get("evaluation"):
            context = worker.evaluations.get(kwargs["sampling"], worker.context)
            task, group_size = evaluation_task(problem, run=run, sample=sample, seed=seed), int(kwargs["samples"])
        else:
            step, group = int(kwargs["group_step"]), int(kwargs["group"])
            task = rollout_task(problem, run=worker.settings.run, seed=seed, step=step, group=group, sample=sample)
            context, group_size = worker.context, worker.settings.rl.rollouts_per_group
        versions: list[int] = []

        async def generate(task: RolloutTask) -> Trajectory:
            engine = ScheduledEngine(self.server_manager, task.traj_id, task.problem.problem_id)
            try:
                return await run_rollout(task, engine, context, on_turn=engine.on_turn)
            finally:
                engine.leave()
                versions[:] = engine.versions

        retries = not run and worker.settings.rl.on_infrastructure_failure == "retry"
        siblings = worker.groups.join(task, context, group_size, retries)
        trajectory = await (generate(task) if siblings is None else siblings.run(task, generate))
        rollout: Trajectory | RolloutNumbers = trajectory
        if not run:
            retried = 0 if siblings is None else siblings.retried[trajectory.traj_id]
            rollout, transcript = split(trajectory, with_texts=worker.settings.reads_texts, retried=retried)
            await worker.transcripts.add.remote(trajectory.traj_id, transcript)
        return as_output(trajectory, rollout, versions, end_id=worker.context.codec.end_id)


def as_output(
    trajectory: Trajectory, rollout: Trajectory | RolloutNumbers, versions: list[int], *, end_id: int
) -> AgentLoopOutput:
    """Convert a trajectory to verl's output. rollout: the data for the trainer's process.

    A trajectory without tokens (its engine failed) gets one masked token, because verl puts the reward on the last token.
    """
    empty = not trajectory.response_ids
    return AgentLoopOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=[end_id] if empty else trajectory.response_ids,
        response_mask=[0] if empty else [int(generated) for generated in trajectory.loss_mask],
        response_logprobs=[0.0] if empty else trajectory.log_probs,
        reward_score=trajectory.reward,
        num_turns=len(trajectory.turns),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.generate_s for turn in trajectory.turns),
            tool_calls=sum(turn.tool_s for turn in trajectory.turns),
        ),
        extra_fields={
            # Pickled: TransferQueue would turn a dataclass into a dict.
            "rollout": pickle.dumps(rollout),
            "reward_extra_info": {"acc": trajectory.reward},
            "min_global_steps": min(versions, default=0),
            "max_global_steps": max(versions, default=0),
        },
    )
