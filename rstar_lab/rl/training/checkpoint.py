"""Checkpoints of RL: weights, optimizer, and the position in the stages and in the data.

No random state is stored, because every draw has a seed derived from its purpose.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model as load_tensors

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import problems_to_retire
from rstar_lab.rl.methods.samplers import History, add_results
from rstar_lab.rl.models.lora import ADAPTER, has_lora, load_adapter
from rstar_lab.rl.models.model import save_model
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.plan import draw_problems
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.writer import RunWriter
from rstar_lab.untrusted.files import read_json, reading


@dataclass(slots=True)
class TrainerState:
    """Progress of a run.

    step: last finished step of the run, from 1. stage: index of the stage, from 0. stage_step: finished steps of the stage.
    position: problems drawn in the stage, including skipped ones. retired: ids of problems that are not drawn again.
    finished: whether all stages are finished. carried: (group id, problem id) of the groups in flight.
    history: results of each problem, with a sampler.
    """

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    position: int = 0
    retired: list[str] = field(default_factory=list)
    finished: bool = False
    carried: list[tuple[str, str]] = field(default_factory=list)
    history: History = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the state of a checkpoint. Raises UserError if it is missing or of another version."""
        return read_json(folder / "trainer.json", cls, hint="; remove the checkpoint")

    def enter_stage(self, number: int) -> None:
        self.stage, self.stage_step, self.position, self.carried = number, 0, 0, []
        self.history = {name: results._replace(drawn=0) for name, results in self.history.items()}

    def draw(self, pool: Sequence[Problem], count: int, rl: RlSection, *, seed: int, stage: str) -> list[Problem]:
        """Return the next `count` problems of a stage and advance the position."""
        problems, self.position = draw_problems(
            pool, self.position, count,
            seed=seed, stage=stage, retired=set(self.retired), sampler=rl.sampler, history=self.history,
        )  # fmt: skip
        return problems

    def add_rollouts(self, rollouts: Sequence[Trajectory], rl: RlSection) -> None:
        """Record the results of a step's rollouts for the draws that follow."""
        if rl.retire_from is not None:
            self.retired += problems_to_retire(rollouts, rl.retire_from)
        if rl.sampler is not None:
            add_results(self.history, rollouts, rl.sampler.kept_share)


def save_checkpoint(writer: RunWriter, state: TrainerState, learner: Learner, tokenizer: Any, rl: RlSection) -> None:
    """Write the checkpoint of `state.step` and delete all but the newest `rl.keep_checkpoints`."""
    assert learner.optimizer is not None
    needed = 3 * sum(parameter.nbytes for parameter in learner.model.parameters())  # with two moments of each parameter
    with writer.checkpoint(state.step, needed) as folder:
        save_model(folder, learner.model, tokenizer, prompt_format=rl.prompt.format)
        torch.save(learner.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer.json").write_text(json.dumps(asdict(state)))
    writer.keep_checkpoints(rl.keep_checkpoints)


def restore_checkpoint(writer: RunWriter, learner: Learner, rl: RlSection) -> TrainerState:
    """Load the newest checkpoint, if there is one, and remove later steps from the run store."""
    checkpoint = writer.latest_checkpoint()
    if checkpoint is None:
        writer.cut(0)
        return TrainerState()
    step, folder = checkpoint
    state = TrainerState.read(folder)
    if state.step != step:
        raise UserError(f"{folder / 'trainer.json'} is of step {state.step}; remove this checkpoint")
    writer.check_steps(step)
    damaged = (SafetensorError, RuntimeError, UnpicklingError)
    with reading(folder, "; remove this checkpoint, then run the same command again", errors=damaged):
        if has_lora(learner.model):  # the merged weights are rounded; the base weights in memory never change
            load_adapter(folder / ADAPTER, learner.model)
        else:
            load_tensors(learner.model, str(folder / "model.safetensors"), device=str(learner.device))
        optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    writer.cut(step)
    learner.load_optimizer(optimizer, rl)
    return state
