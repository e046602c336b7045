"""The package's agent loop inside verl's workers: verl's server handle in, verl's output out, nothing decided here."""

import asyncio
import pickle
from dataclasses import dataclass, replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from rstar_lab.rl.problems import Problem
from rstar_lab.rl.reward import make_reward, warm_up
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.rollout.plan import rollout_task
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.rl.verl.engine import ServerEngine
from rstar_lab.rl.verl.pending import WAITS, WatchedTool
from rstar_lab.rl.verl.settings import Settings


@dataclass(frozen=True)
class Workshop:
    """What all rollouts of one worker process share; verl makes a new loop object for every rollout."""

    settings: Settings
    context: RolloutContext

    @classmethod
    async def open(cls, config: Any, tokenizer: Any) -> "Workshop":
        settings = Settings.of(config)
        keys = settings.keys
        section = settings.recipe.sandbox
        sandbox = await settings.open_sandbox()
        tools = make_tools(
            keys.tools,
            sandbox,
            section.timeout_s,
            section.memory_mb,
            own_timeout_s=keys.tool_timeout_s,
            prompt_format=keys.prompt_format,
        )
        watched = {name: WatchedTool(tool) for name, tool in tools.items()}
        if keys.reward == "verify":
            await asyncio.to_thread(warm_up)  # an answer that waited for it to start could be counted wrong
        context = RolloutContext.for_training(
            Codec(tokenizer, tools, prompt_format=keys.prompt_format),
            watched,
            make_reward(keys.reward, keys.answer),
            keys,
        )
        return cls(settings, context)


_opening: asyncio.Future[Workshop] | None = None


class RstarAgentLoop(AgentLoopBase):
    """One rollout of one problem."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Roll out `problem`; the whole trajectory travels on in `extra_fields["trajectory"]`."""
        global _opening
        if _opening is None:
            _opening = asyncio.ensure_future(Workshop.open(self.config, self.tokenizer))
        shop = await _opening
        task = rollout_task(
            Problem(**kwargs["problem"]),
            run=shop.settings.run,
            seed=shop.settings.recipe.seed,
            step=int(kwargs["global_steps"]),
            group=int(kwargs["group"]),
            sample=int(kwargs["session_id"]),
        )

        def watched_reward(text: str, truth: str) -> float:
            with WAITS.of(task.traj_id, "reward"):
                return shop.context.reward(text, truth)

        engine = ServerEngine(self.server_manager, task.traj_id)
        context = replace(
            shop.context,
            reward=watched_reward,
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
        )
        trajectory = await run_rollout(task, engine, context)
        return as_output(trajectory, engine.versions, end_id=shop.context.codec.end_id)


def as_output(trajectory: Trajectory, versions: list[int], *, end_id: int) -> AgentLoopOutput:
    """A trajectory as verl stores it.

    One whose engine failed before its first token gets a masked token: verl puts the reward on the last one.
    """
    empty = not trajectory.response_ids
    return AgentLoopOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=[end_id] if empty else trajectory.response_ids,
        response_mask=[0] if empty else [int(own) for own in trajectory.loss_mask],
        response_logprobs=[0.0] if empty else trajectory.log_probs,
        reward_score=trajectory.reward,
        num_turns=len(trajectory.turns),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.generate_s for turn in trajectory.turns),
            tool_calls=sum(turn.tool_s for turn in trajectory.turns),
        ),
        extra_fields={
            # Whole: TransferQueue would turn a dataclass into a dict.
            "trajectory": pickle.dumps(trajectory),
            "reward_extra_info": {"acc": trajectory.reward},
            "min_global_steps": min(versions, default=0),
            "max_global_steps": max(versions, default=0),
        },
    )
