"""Checkpoints of RL: weights, optimizer, and the position in the stages and in the data.

No random state is stored, because every draw has a seed derived from its purpose.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_model as load_tensors

from rstar_lab.errors import UserError
from rstar_lab.rl.models.lora import ADAPTER, has_lora, load_adapter
from rstar_lab.rl.models.model import save_model
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.training.update import Learner
from rstar_lab.runs.writer import RunWriter


@dataclass(slots=True)
class TrainerState:
    """Progress of a run.

    step: last finished step of the run, from 1. stage: index of the stage, from 0. stage_step: finished steps of the stage.
    position: problems drawn in the stage, including skipped ones. retired: ids of problems that are not drawn again.
    finished: whether all stages are finished. carried: (group id, problem id) of groups cut off at the end of the step.
    """

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    position: int = 0
    retired: list[str] = field(default_factory=list)
    finished: bool = False
    carried: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the state of a checkpoint. Raises UserError if it is missing or of another version."""
        try:
            saved = json.loads((folder / "trainer.json").read_text())
            fields = {name: saved[name] for name in cls.__slots__ if name != "carried"}  # type: ignore[attr-defined]
            return cls(**fields, carried=[(group, problem) for group, problem in saved.get("carried", [])])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"checkpoint {folder}: trainer.json cannot be read ({error}); remove the checkpoint"
            ) from None

    def enter_stage(self, number: int) -> None:
        self.stage, self.stage_step, self.position = number, 0, 0


def save_checkpoint(writer: RunWriter, state: TrainerState, learner: Learner, tokenizer: Any, rl: RlSection) -> None:
    """Write the checkpoint of `state.step` and delete all but the newest `rl.keep_checkpoints`."""
    assert learner.optimizer is not None
    with writer.checkpoint(state.step) as folder:
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
    writer.cut(step)
    if has_lora(learner.model):  # the checkpoint's merged weights are rounded; the base weights in memory never change
        load_adapter(folder / ADAPTER, learner.model)
    else:
        load_tensors(learner.model, str(folder / "model.safetensors"), device=str(learner.device))
    learner.load_optimizer(torch.load(folder / "optimizer.pt", weights_only=True), rl)
    return state
