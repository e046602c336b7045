"""verl's agent-loop manager, with the problems and the number of rollouts of the recipe."""

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils

from rstar_lab.rl.rollout.plan import draw_problems
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.verl.scheduler import ScheduledClient
from rstar_lab.rl.verl.settings import Settings


class OversamplingManager(AgentLoopManagerTQ):
    """Assigns a problem to each prompt of a step and rolls it out `oversample * rollout.n` times.

    verl's data set contains placeholder rows. The problems of a step are a function of the recipe and of `state`, which the
    trainer sets and stores in its checkpoints, as the local trainer does. `rollout.n` stays the number of kept rollouts,
    because verl derives the size of mini-batches from it.
    """

    llm_client: ScheduledClient

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = Settings.of(self.config)
        self.state = TrainerState()
        self.step, self.sent = -1, 0

    def generate_sequences(self, prompts: Any) -> None:
        settings, state = self.settings, self.state
        step = int(prompts["global_steps"])
        if step != self.step:
            self.step, self.sent = step, 0
            rollouts = settings.keys.problems_per_step * settings.rollouts_per_group
            ray.get(self.llm_client.scheduler.begin_step.remote(rollouts))
        groups = list(range(self.sent, self.sent + len(prompts)))
        self.sent += len(prompts)
        problems, state.position = draw_problems(
            settings.pool, state.position, len(prompts),
            seed=settings.recipe.seed, stage=settings.stage.name, retired=set(state.retired),
        )  # fmt: skip
        tensordict_utils.assign_non_tensor_stack(prompts, "group", groups)
        tensordict_utils.assign_non_tensor_stack(prompts, "problem", [problem.model_dump() for problem in problems])
        tensordict_utils.assign_non_tensor_data(prompts, "__rollout_n__", settings.rollouts_per_group)
        super().generate_sequences(prompts)
