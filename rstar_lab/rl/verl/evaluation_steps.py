"""Rollouts of a verl job outside of its training steps: the evaluations and the difficulty filter of a stage."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from rstar_lab.rl.evaluation import Generate
from rstar_lab.rl.pipeline import evaluate_sets
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.verl.generation import ServerRollouts, filter_stage
from rstar_lab.rl.verl.manager import OversamplingManager
from rstar_lab.rl.verl.sampler import RocReplayBuffer, RocReplayBufferAsync
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.watchdog import Watchdog
from rstar_lab.runs.writer import RunWriter


class EvaluationSteps:
    """Mixin of `trainer.RecipeTrainer` that evaluates and filters the problems of a stage."""

    settings: Settings
    session: RunSession
    watchdog: Watchdog
    writer: RunWriter
    agent_loop_manager: OversamplingManager
    replay_buffer: RocReplayBuffer | RocReplayBufferAsync
    global_steps: int

    @abstractmethod
    def _begin_evaluation(self) -> None:
        """Make the servers generate with the weights after this step."""

    @abstractmethod
    def _end_evaluation(self) -> None:
        """Restore the state that the servers have between the rollouts and the end of a step."""

    @property
    def other_rollouts(self) -> ServerRollouts:
        """The generator of rollouts outside of steps. It keeps as many rollouts in flight as one step has."""
        window = self.settings.rl.problems_per_step * self.settings.rollouts_per_group
        return ServerRollouts(self.agent_loop_manager, self.replay_buffer, window)

    def _filter_stage(self) -> None:
        """Run the filter of the stage. The servers hold the weights before its first step."""
        step = self.settings.first_step - 1
        self.watchdog.enter("filter", step)
        filter_stage(self.settings, self.other_rollouts, on_progress=partial(self.watchdog.enter, "filter", step))
        self.watchdog.leave()

    def _evaluate(self, *, final: bool) -> dict[str, float]:
        """Evaluate the recipe's sets with the weights after this step; see `evaluate_sets`.

        final: whether these are the weights at the end of the training.
        """
        if not self.session.held_out:
            return {}
        self.watchdog.enter("evaluation", self.global_steps)
        self._begin_evaluation()

        def rollouts_of(problems: Sequence[Problem], run: str) -> Generate:
            on_progress = partial(self.watchdog.enter, "evaluation", self.global_steps)
            return self.other_rollouts.generator(run, step=self.global_steps, training=False, on_progress=on_progress)

        metrics = asyncio.run(
            evaluate_sets(
                self.session, rollouts_of, parent=self.writer.run_dir.name, step=self.global_steps, final=final
            )
        )
        self._end_evaluation()
        self.watchdog.enter("update", self.global_steps)
        return metrics
