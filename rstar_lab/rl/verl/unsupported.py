"""Recipe options that the verl trainer does not support. Checked at start-up, so that no key is ignored silently."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.methods import UserMethod
from rstar_lab.rl.recipe import OneStepOff, Recipe, RlSection
from rstar_lab.rl.rollout.agent_loop import make_trajectory
from rstar_lab.rl.training.teacher import NeedsPolicy, TeacherPasses
from rstar_lab.rl.trajectory import StopReason, Trajectory, Turn


def unsupported_options(recipe: Recipe) -> list[str]:
    """Return one line per unsupported key: the stage, the key, the reason and the alternative."""
    lines = []
    if recipe.log_to:
        lines.append("log_to: verl has its own loggers; set verl.trainer.logger=[console, wandb]")
    for number, stage in enumerate(recipe.stages):
        rl = recipe.settings(stage)
        own = policy_pass(rl) if isinstance(rl.method, UserMethod) else None
        methods = {f"method.add: {method.type}": method.not_with_verl for method in rl.method.add}
        methods[f"method.type: {rl.method.type}"] = rl.method.not_with_verl
        reasons = {
            "method.kl_coefficient with rl.lora: verl's reference is the model without adapters, that of the first stage; use 0 in "
            "later stages": rl.lora is not None and rl.method.kl_coefficient and number,
            "fp32_head: verl does not support it; precision: fp32 keeps everything in fp32": rl.fp32_head,
            f"method.type: {rl.method.type}: the hook `forward`: {own}": own,  # type: ignore[attr-defined]
            **{f"{key}: {reason}": reason for key, reason in methods.items()},
            "schedule.type: one_step_off: with verl a request in flight continues under the new weights; use schedule: {type: async, "
            "max_staleness: 1}": isinstance(rl.schedule, OneStepOff),
            "schedule.when_stale: trim: the verl adapter leaves out whole groups; use wait or drop": (
                rl.asynchronous.when_stale == "trim"
            ),
            f"mini_batches: {rl.problems_per_step} problems_per_step cannot be cut into {rl.mini_batches} equal parts, which verl "
            "requires": rl.problems_per_step % rl.mini_batches,
        }
        lines += [f"stages.{stage.name}: {reason}" for reason, applies in reasons.items() if applies]
    return lines


class _Passes(TeacherPasses):
    """Passes of a teacher to which every token has the probability 1."""

    async def teacher_log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        return [np.zeros(len(t.response_ids), np.float32) for t in rollouts]


def policy_pass(rl: RlSection) -> str | None:
    """Return the error of a method whose hook `forward` requests a pass of the policy; None if it does not.

    Calls the hook with two invented rollouts of one group, a right and a wrong one.
    """
    turn = Turn(0, 3, "<answer>1</answer>", 0.0, 0.0, 0.0)
    rollouts = [
        make_trajectory(
            [turn], [], traj_id=f"t{sample}", problem_id="p", group_id="g", sample=sample, question="1 + 0?", truth="1",
            prompt_ids=[1, 2], response_ids=[3, 4, 5], loss_mask=[True] * 3, log_probs=[-1.0] * 3,
            stop_reason=StopReason.ANSWERED, reward=1.0 - sample, engine="", policy_version=0,
        )
        for sample in range(2)
    ]  # fmt: skip
    for method in rl.hooks:
        if method.forward_phase is None:
            continue
        # The passes never wait, so that the hook runs to its end without an event loop.
        hook = method.forward(Selection.of(rollouts, [1.0, -1.0]), rollouts, _Passes(None))
        try:
            hook.send(None)
        except NeedsPolicy as error:
            return str(error)
        except (StopIteration, UserError):  # it has ended; invented rollouts may lack what it needs
            continue
        hook.close()
    return None


def unsupported_sft_options(recipe: Recipe) -> list[str]:
    """Return one line per unsupported key of the SFT section."""
    sft, lines = recipe.sft, []
    if sft is not None and sft.optimizer != "adamw":
        lines.append(f"sft.optimizer: {sft.optimizer}: verl supports AdamW only")
    if sft is not None and sft.schedule != "cosine":
        lines.append(f"sft.schedule: {sft.schedule}: verl supports cosine only")
    return [f"{line}; `rstar-lab sft` trains without verl" for line in lines]


def check(recipe: Recipe) -> None:
    """Raise UserError if the recipe uses an option that verl does not support."""
    if not recipe.stages:
        raise UserError("stages: the recipe has no stages")
    if unsupported := unsupported_options(recipe):
        raise UserError(f"verl does not support: {'; '.join(unsupported)}")


def check_architecture(folder: Path) -> None:
    """Raise UserError if the model in `folder` has layers with a recurrent state or a convolution over tokens.

    verl concatenates the sequences of a micro-batch, and such layers would mix them.
    """
    from transformers import AutoConfig

    from rstar_lab.rl.models.forward_path import mixes_tokens_by_attention_only

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not mixes_tokens_by_attention_only(config):
        raise UserError(
            f"model {folder}: {config.model_type} has layers with a state, whose sequences verl would mix; train it with "
            "the local trainer: `rstar-lab run`"
        )
