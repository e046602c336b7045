"""Where a run stands, and how a checkpoint keeps it: weights, optimizer, place in the stages, place in the data.

No random state is kept: every draw has a seed derived from what it is for.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_model as load_tensors

from rstar_lab.errors import UserError
from rstar_lab.rl.models.model import save_model
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.training.update import Learner
from rstar_lab.runs.writer import RunWriter


@dataclass(slots=True)
class TrainerState:
    """step: of the whole run, counted from 1; stage: its number, from 0; stage_step: steps made in it.

    position: problems drawn in this stage, those passed over included; retired: ids of problems not drawn again;
    finished: no stage is left; carried: (group id, problem id) of the groups that the step's end cut.
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
        """The state in a checkpoint. Raises UserError where there is none that this version reads."""
        try:
            found = json.loads((folder / "trainer.json").read_text())
            own = {name: found[name] for name in cls.__slots__ if name != "carried"}  # type: ignore[attr-defined]
            return cls(**own, carried=[(group, problem) for group, problem in found.get("carried", [])])
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
        save_model(folder, learner.model, tokenizer, own_template=rl.prompt_format == "paper")
        torch.save(learner.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer.json").write_text(json.dumps(asdict(state)))
    writer.keep_checkpoints(rl.keep_checkpoints)


def restore_checkpoint(writer: RunWriter, learner: Learner, rl: RlSection) -> TrainerState:
    """Go back to the newest checkpoint, or to the start without one. Later steps are cut from the run store."""
    found = writer.latest_checkpoint()
    if found is None:
        writer.cut(0)
        return TrainerState()
    step, folder = found
    state = TrainerState.read(folder)
    writer.cut(step)
    load_tensors(learner.model, str(folder / "model.safetensors"), device=str(learner.device))
    learner.load_optimizer(torch.load(folder / "optimizer.pt", weights_only=True), rl)
    return state
