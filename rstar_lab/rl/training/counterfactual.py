"""Selection and first-order gradient of a stored step under changed recipe keys, without sampling.

`analysis.counterfactual` compares the results of several changes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models.model import load_model
from rstar_lab.rl.overrides import parse_recipe, parse_stored_recipe
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.rollout.records import has_tokens, read_trajectories
from rstar_lab.rl.section import merged
from rstar_lab.rl.seeds import derive_seed, step_seed
from rstar_lab.rl.step import select
from rstar_lab.rl.training.log_probs import micro_batches, token_statistics
from rstar_lab.rl.training.update import Batch, autocast, micro_batch_loss, prepare_update, with_cpu_precision
from rstar_lab.runs.reader import RunReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Gradient:
    """loss: loss of the batch. vector: gradient of all parameters, (parameters,), before clipping. stats: statistics of
    `policy_loss`."""

    loss: float
    vector: Tensor
    stats: dict[str, float]


class StoredStep:
    """The rollouts of one stored training step, with the settings it was trained with.

    rollouts: in the stored order. trained: the selection that was trained on, with its stored advantages.
    """

    def __init__(self, run_dir: Path, step: int, functions: Collection[str] = ()):
        """functions: functions in the run's recipe that are yours; others are not imported.

        Raises RunStoreError if the run has no such step, and UserError if the run has no RL stage or its method names other functions.
        """
        self.reader, self.step = RunReader(run_dir), step
        # The other sections are not used, and those of an older version may have keys that no longer exist.
        self.recipe = parse_stored_recipe(
            self.reader.info["recipe"],
            f"run {self.reader.run_id}",
            ("name", "model", "seed", "rl", "stages"),
            functions,
        )
        self.rollouts, advantages = read_trajectories(self.reader, step)
        name = self.reader.steps()[step]
        self.stage = next((stage for stage in self.recipe.stages if stage.name == name), None)
        if self.stage is None:
            raise UserError(f"run {self.reader.run_id}: its recipe has no RL stage {name!r}")
        self.rl = self.recipe.settings(self.stage)
        kept = [t for t in self.rollouts if t.traj_id in advantages]
        self.trained = Selection.of(kept, [advantages[t.traj_id] for t in kept])
        self.seed = step_seed(self.recipe.seed, step)

    def settings(self, changes: Mapping[str, Any]) -> RlSection:
        """Return the `rl` section of the step with changed keys, such as `method.clip_high`. Raises RecipeError for an unknown key
        or a wrong value."""
        assert self.stage is not None
        data = self.recipe.model_dump(mode="json")
        stage = self.stage.model_dump(mode="json")
        nested: dict[str, Any] = {}
        for key, value in changes.items():
            *sections, last = key.split(".")
            here = nested
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        data["stages"] = [stage | {"rl": merged(stage["rl"], nested)}]
        recipe = parse_recipe(data, f"of run {self.reader.run_id} with {dict(changes)}")
        return recipe.settings(recipe.stages[0])

    def select(self, rl: RlSection, draw: int = 0) -> Selection:
        """Return the rollouts that these settings select. draw: 0 uses the seed of the training; every other number is
        a different seed."""
        seed = self.seed if draw == 0 else derive_seed(self.seed, "counterfactual", draw)
        return select(self.rollouts, rl, seed)

    def penalties(self, rl: RlSection) -> dict[str, float]:
        """Return the penalty by which these settings rank each rollout, by traj_id."""
        roc = rl.method.roc.bound(rl)
        return {t.traj_id: roc.penalty(t) for t in self.rollouts}

    def checkpoint(self) -> tuple[int, Path] | None:
        """Return (step, folder) of the stored checkpoint whose weights are nearest to those that generated the step."""
        stored = self.reader.checkpoints()
        if not stored:
            return None
        nearest = min(stored, key=lambda number: (abs(number - (self.step - 1)), number))
        return nearest, stored[nearest]


def open_model(folder: Path) -> "PreTrainedModel":
    """Load a checkpoint for `batch_gradient`."""
    return load_model(folder, torch.float32, attn_implementation="sdpa").eval()


def missing_tokens(selection: Selection) -> int:
    """Return the number of selected rollouts without stored token arrays."""
    return sum(not has_tokens(t) for t in selection.trajectories)


NO_EFFECT = ("method.clip_low", "method.clip_high", "method.loss")  # while the ratio is 1


def keys_without_effect(rl: RlSection, changes: Mapping[str, Any]) -> list[str]:
    """Return the changed keys that cannot change the gradient of `batch_gradient`, because the ratio is 1 there."""
    return [key for key in changes if key in NO_EFFECT] if rl.old_log_probs == "trainer" else []


def gradient_notes(rl: RlSection) -> list[str]:
    """Return what the gradient of `batch_gradient` leaves out."""
    notes = []
    if rl.method.kl_coefficient:
        notes.append("without the KL to the reference model, which is not stored")
    for method in rl.method.add:
        if method.forward_phase is not None:
            notes.append(f"without {method.type}, whose log-probs are not stored")
        if method.reads_outputs:
            notes.append(f"without the cross-entropy of {method.type}: which tokens are outputs is not stored")
    return notes


def batch_gradient(model: "PreTrainedModel", selection: Selection, rl: RlSection, seed: int) -> Gradient:
    """Return the loss and gradient of a selection as one batch, at the weights of `model`.

    With several mini-batches, training takes one optimizer step on each part; this is the gradient of their union at the
    weights before the first. The KL term is left out, because the reference model is not stored with the run. Raises
    UserError for a method with forward passes of its own, such as `otb`.
    """
    if rl.method.forward_phase is not None:
        raise UserError(
            f"the gradient of a stored step cannot be computed with the method {rl.method.type}, only with one per rollout"
        )
    model.zero_grad()
    device = next(model.parameters()).device
    rl = with_cpu_precision(rl, device)
    prepare_update(model, rl)
    config = rl.loss_config
    batch = Batch.of(selection, range(len(selection.trajectories)), config.aggregation)
    generator = torch.Generator().manual_seed(derive_seed(seed, "clip_cov"))
    loss_sum, tokens, sums = 0.0, 0.0, dict[str, float]()
    for micro in micro_batches(batch.trajectories, rl.micro_batch_tokens, device, also_scored=batch.also_scored):
        with autocast(rl, device):
            log_probs, _ = token_statistics(model, micro, rl.temperature, fp32_head=rl.fp32_head)
        loss, stats = micro_batch_loss(log_probs, micro, batch, rl.old_log_probs, config, generator=generator)
        loss.backward()
        loss_sum += float(loss.detach())
        tokens += stats["tokens"]
        for name in ("clip_share", "corrected_share"):
            if name in stats:
                sums[name] = sums.get(name, 0.0) + stats[name] * stats["tokens"]
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    vector = torch.cat([gradient.flatten() for gradient in gradients]).clone()
    model.zero_grad()
    return Gradient(loss_sum, vector, {name: value / max(1.0, tokens) for name, value in sums.items()})


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two gradients; NaN if one is zero. Sums of millions of products in float32 would exceed 1."""

    def dot(a: Tensor, b: Tensor) -> float:
        return sum(float(x.double() @ y.double()) for x, y in zip(a.split(2**22), b.split(2**22), strict=True))

    norms = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / norms if norms else float("nan")
