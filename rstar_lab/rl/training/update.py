"""The policy update: from the selected rollouts and their advantages to new weights, and the metrics of the update."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rstar_lab.errors import UserError
from rstar_lab.hardware.memory import release_free_heap
from rstar_lab.rl.algorithm.advantages import optimal_token_advantages
from rstar_lab.rl.algorithm.objective import group_normaliser, training_loss
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.models.forward_path import forward_path
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.training.data_parallel import SINGLE_RANK, Ranks
from rstar_lab.rl.training.log_probs import (
    SHARED_WIDTH,
    MicroBatch,
    log_probs_and_entropy,
    micro_batches,
    token_statistics,
)
from rstar_lab.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MismatchError(UserError):
    """Engine and trainer compute different log-probs for the same tokens, so the update would train on the wrong policy."""


class Learner:
    """The trained model, its optimizer, and the reference model of the KL term.

    With helper processes, every rank holds a copy of all three and computes its part of each mini-batch. The helpers
    repeat the calls that rank 0 receives (`run_update_helper`).
    """

    def __init__(self, model: "PreTrainedModel", ranks: Ranks = SINGLE_RANK):
        self.model = model
        self.ranks = ranks
        self.device = next(model.parameters()).device
        self.optimizer: torch.optim.AdamW | None = None
        self.reference: PreTrainedModel | None = None

    def begin_stage(self, rl: RlSection, *, reset: bool, reference: "PreTrainedModel | None") -> None:
        """Prepare for a stage. reset: clear the moments of AdamW. reference: model of the KL term; None: no KL term."""
        self._call_helpers("begin_stage", rl, reset=reset, reference=reference)
        if self.optimizer is None or reset:
            self.optimizer = make_optimizer(self.model, rl)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = rl.weight_decay
        self.reference = reference
        if rl.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        self.model.train()
        with autocast(rl, self.device):
            forward_path(
                self.model
            )  # compares the trainer's log-probs with those of the model before the first rollout

    def lead(self, ranks: Ranks, rl: RlSection) -> None:
        """Send model and optimizer to the other ranks, which take part in the updates from here on."""
        self.ranks = ranks
        optimizer = self.optimizer.state_dict() if self.optimizer else None
        ranks.share((type(self.model), self.model.config, optimizer, rl))
        ranks.share_weights(self.model)

    def dismiss(self) -> None:
        """Let the other ranks leave `run_update_helper`."""
        self.ranks.share(None)

    def _call_helpers(self, name: str, *arguments: Any, **keywords: Any) -> None:
        if self.ranks.rank == 0:
            self.ranks.share((name, arguments, keywords))

    def load_optimizer(self, state: dict[str, Any], rl: RlSection) -> None:
        self.optimizer = make_optimizer(self.model, rl)
        self.optimizer.load_state_dict(state)

    def update(self, selection: Selection, rl: RlSection, *, lr_scale: float, seed: int) -> "UpdateResult":
        """Update the model on mini-batches of the selected rollouts, in their order. Nothing changes if there are none.

        lr_scale: factor of the learning rate. seed: seed of the step, used by clip_cov.
        """
        assert self.optimizer is not None
        self._call_helpers("update", selection, rl, lr_scale=lr_scale, seed=seed)
        count = len(selection.trajectories)
        result = UpdateResult(count)
        if not count:
            return result
        for group in self.optimizer.param_groups:
            group["lr"] = rl.lr * lr_scale
        # With one mini-batch the weights are unchanged when it is scored: its own forward pass gives the old log-probs.
        measure_first = rl.old_log_probs == "trainer" and (rl.mini_batches > 1 or rl.advantage == "otb")
        if measure_first:
            self.measure(selection, rl, result)
        token_advantages = result.token_advantages(selection) if rl.advantage == "otb" else None
        generator = torch.Generator().manual_seed(derive_seed(seed, "clip_cov"))
        bounds = np.linspace(0, count, min(rl.mini_batches, count) + 1).astype(int)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            batch = selection.trajectories[start:end]
            advantages = torch.tensor(selection.advantages[start:end], device=self.device, dtype=torch.float32)
            prompts = [len(t.prompt_ids) for t in batch]
            normaliser = batch_normaliser(batch, rl)
            for micro in self.micro_batches(batch, rl, tool_tokens=rl.tool_output_loss > 0):
                log_probs, entropy = self.forward(self.model, micro, rl)
                engine_log_probs = micro.scatter([t.log_probs for t in batch], prompts).to(self.device)
                if not measure_first:
                    # After the first mini-batch the weights are no longer those that generated the rollouts.
                    result.record(micro, prompts, batch, log_probs if number == 0 else None, entropy, start)
                if measure_first:
                    measured = [result.log_probs[start + i] for i in range(len(batch))]
                    old_log_probs = micro.scatter(measured, prompts).to(self.device)
                elif rl.old_log_probs == "trainer":
                    old_log_probs = log_probs.detach()
                else:
                    old_log_probs = engine_log_probs
                if token_advantages is None:
                    advantages_BT = advantages[micro.index][:, None].expand_as(log_probs)
                else:
                    advantages_BT = micro.scatter(token_advantages[start:end], prompts).to(self.device)
                if selection.teacher_log_probs is not None:
                    of_teacher = micro.scatter(selection.teacher_log_probs[start:end], prompts).to(self.device)
                    gap_BT = (of_teacher - old_log_probs).masked_fill(~micro.mask_BT, 0.0).nan_to_num(0.0)
                    advantages_BT = advantages_BT + (rl.teacher_weight or rl.self_distillation) * gap_BT
                    result.sums["teacher_kl"] -= float(gap_BT.sum()) / sum(t.model_tokens for t in batch)
                reference_log_probs = None
                if self.reference is not None:
                    with torch.no_grad():
                        reference_log_probs, _ = self.forward(self.reference, micro, rl)
                loss, stats = training_loss(
                    log_probs,
                    old_log_probs,
                    advantages_BT,
                    micro.mask_BT,
                    rl.loss_config,
                    engine_log_probs=engine_log_probs,
                    reference_log_probs=reference_log_probs,
                    normaliser=normaliser[micro.index] if isinstance(normaliser, Tensor) else normaliser,
                    generator=generator,
                )
                if rl.tool_output_loss:
                    predicted = tool_output_loss(log_probs, micro, batch)
                    loss = loss + rl.tool_output_loss * predicted
                    result.sums["tool_output_loss"] += float(predicted.detach())
                loss.backward()
                result.add(stats, float(loss.detach()))
            self._reduce_gradients()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), rl.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            result.grad_norms.append(float(norm))
        if self.device.type == "cpu":
            release_free_heap()
        return result.merge(self.ranks.gather(result))

    def _reduce_gradients(self) -> None:
        if self.ranks.size == 1:
            return
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # this rank has no rows of the mini-batch
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum([parameter.grad for parameter in parameters if parameter.grad is not None])

    def micro_batches(
        self, batch: Sequence[Trajectory], rl: RlSection, tool_tokens: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank. tool_tokens: also score the tokens of tool responses."""
        return micro_batches(
            batch,
            rl.micro_batch_tokens,
            self.device,
            share=forward_path(self.model).shared_width >= SHARED_WIDTH,
            tool_tokens=tool_tokens,
            ranks=self.ranks,
        )

    def forward(self, model: "PreTrainedModel", micro: MicroBatch, rl: RlSection) -> tuple[Tensor, Tensor]:
        """Return log_probs_BT and entropy_BT, float32, computed in the precision of the recipe."""
        with autocast(rl, self.device):
            return log_probs_and_entropy(model, micro, rl.temperature, fp32_head=rl.fp32_head)

    @torch.no_grad()
    def measure(self, selection: Selection, rl: RlSection, result: "UpdateResult") -> None:
        """Record log-probs and entropy of all selected rollouts under the weights that generated them."""
        merged = self._measured(selection.trajectories, rl, result)
        result.log_probs, result.entropies, result.squares = self.ranks.share(
            (merged.log_probs, merged.entropies, merged.squares)
        )

    def score(self, trajectories: Sequence[Trajectory], rl: RlSection) -> list[np.ndarray]:
        """Return the log-probs of the responses, (response length,) per rollout, NaN outside of the loss mask."""
        self._call_helpers("score", trajectories, rl)
        return self._measured(trajectories, rl, UpdateResult(len(trajectories))).log_probs

    @torch.no_grad()
    def _measured(self, trajectories: Sequence[Trajectory], rl: RlSection, result: "UpdateResult") -> "UpdateResult":
        """Record log-probs and entropy of rollouts in `result`; return it with the parts of all ranks."""
        prompts = [len(t.prompt_ids) for t in trajectories]
        for micro in self.micro_batches(trajectories, rl):
            with autocast(rl, self.device):
                log_probs, entropy, *squares = token_statistics(
                    self.model, micro, rl.temperature, fp32_head=rl.fp32_head, squares=rl.advantage == "otb"
                )
            result.record(micro, prompts, trajectories, log_probs, entropy, 0, *squares)
        return result.merge(self.ranks.gather(result))


def run_update_helper(ranks: Ranks) -> None:
    """Entry point of a helper process: repeat the calls of rank 0's learner until it calls `dismiss`."""
    model_class, config, optimizer, rl = ranks.share(None)
    model = model_class(config).float()
    if rl.lora:
        attach_lora(model, rl.lora, seed=0)  # rank 0 sends the values
    ranks.share_weights(model)
    learner = Learner(model, ranks)
    if optimizer is not None:
        learner.load_optimizer(optimizer, rl)
    while (call := ranks.share(None)) is not None:
        name, arguments, keywords = call
        getattr(learner, name)(*arguments, **keywords)


def make_optimizer(model: "PreTrainedModel", rl: RlSection) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rl.lr, weight_decay=rl.weight_decay)


def autocast(rl: RlSection, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of the update: bf16 or disabled. Master weights are fp32 in both cases."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(rl, device))


def uses_bf16(rl: RlSection, device: torch.device) -> bool:
    """Return whether the matrix products of the update run in bf16. rl: settings of a stage (`Recipe.settings`)."""
    return rl.precision == "bf16" or (rl.precision == "auto" and device.type == "cuda")


def batch_normaliser(batch: Sequence[Trajectory], rl: RlSection) -> float | Tensor:
    """Return the normaliser of `training_loss` for the micro-batches of a mini-batch."""
    if rl.aggregation == "token-mean":
        return sum(t.model_tokens for t in batch)
    if rl.aggregation == "group-token-mean":
        return group_normaliser([t.model_tokens for t in batch], [t.group_id for t in batch])
    return len(batch)


def tool_output_loss(log_probs: Tensor, micro: MicroBatch, batch: Sequence[Trajectory]) -> Tensor:
    """Return the cross-entropy of the tool-response tokens of a micro-batch over those of its mini-batch (ECHO, arXiv
    2605.24517): the model learns to predict what its code prints. log_probs: log-probs of the scored tokens, (batch,
    tokens)."""
    tokens = sum(len(t.response_ids) - t.model_tokens for t in batch)
    return -log_probs[micro.scored_BT & ~micro.mask_BT].sum() / max(1, tokens)


class UpdateResult:
    """Measurements of an update. log_probs, entropies, squares (sums of the squared probabilities of the vocabulary): arrays
    (response length,) per selected rollout, NaN outside of the mask; None if not computed.

    With `old_log_probs: engine` and several mini-batches, log_probs exist for the first mini-batch only. The entropies of
    a later mini-batch are those of its own forward pass, after the optimizer steps of the mini-batches before it.
    """

    def __init__(self, count: int):
        self.log_probs: list[Any] = [None] * count
        self.entropies: list[Any] = [None] * count
        self.squares: list[Any] = [None] * count
        self.grad_norms: list[float] = []
        self.sums: dict[str, float] = defaultdict(
            float
        )  # summed over micro-batches; reported as the mean over mini-batches
        self.extra: dict[str, float] = {}
        self._means: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._ratio_max = 0.0

    def record(
        self,
        micro: MicroBatch,
        prompts: Sequence[int],
        batch: Sequence[Trajectory],
        log_probs: Tensor | None,
        entropy: Tensor,
        offset: int,
        squares: Tensor | None = None,
    ) -> None:
        """Store log-probs, entropy and squares (unless None) of a micro-batch by rollout. offset: index in the selection of
        the first rollout of `batch`."""
        for row, i in enumerate(micro.index):
            span = slice(prompts[i], prompts[i] + len(batch[i].response_ids))
            outside = ~micro.mask_BT[row, span]
            for kind, values in ((self.log_probs, log_probs), (self.entropies, entropy), (self.squares, squares)):
                if values is not None:
                    kind[offset + i] = values[row, span].detach().masked_fill(outside, torch.nan).cpu().numpy()

    @property
    def _arrays(self) -> tuple[list[Any], ...]:
        return self.log_probs, self.entropies, self.squares

    def token_advantages(self, selection: Selection) -> list[np.ndarray]:
        """Return the advantages of OTB, (response length,) per selected rollout, 0 outside of the mask."""
        batch = selection.trajectories
        masks = [np.asarray(t.loss_mask, dtype=bool) for t in batch]
        energies = [
            (1 - 2 * np.exp(log_probs) + squares)[own]
            for log_probs, squares, own in zip(self.log_probs, self.squares, masks, strict=True)
        ]
        of_tokens = optimal_token_advantages(selection.advantages, [t.group_id for t in batch], energies)
        found = [np.zeros(len(own)) for own in masks]
        for row, own, values in zip(found, masks, of_tokens, strict=True):
            row[own] = values
        return found

    def add(self, stats: Mapping[str, float], loss: float) -> None:
        """Add the statistics and the loss of a micro-batch."""
        tokens = int(stats["tokens"])
        if "reference_kl" in stats:
            self.sums["reference_kl"] += stats["reference_kl"]
        for name in stats.keys() - {"tokens", "ratio_max", "reference_kl"}:
            self._means[name] += stats[name] * tokens
        self._ratio_max = max(self._ratio_max, stats["ratio_max"])
        self._tokens += tokens
        self.sums["loss"] += loss

    def merge(self, parts: Sequence["UpdateResult"]) -> "UpdateResult":
        """Add the results of the other ranks. parts: results of all ranks, this one first; empty on other ranks."""
        for part in parts[1:]:
            for mine, theirs in zip(self._arrays, part._arrays, strict=True):
                for i, values in enumerate(theirs):
                    if values is not None:
                        mine[i] = values
            for name, value in part.sums.items():
                self.sums[name] += value
            for name, value in part._means.items():
                self._means[name] += value
            self._tokens += part._tokens
            self._ratio_max = max(self._ratio_max, part._ratio_max)
        return self

    @property
    def metrics(self) -> dict[str, float]:
        if not self.grad_norms:
            return {}
        return (
            self.extra
            | {name: value / max(1, self._tokens) for name, value in sorted(self._means.items())}
            | {name: value / len(self.grad_norms) for name, value in self.sums.items()}
            | {"ratio_max": self._ratio_max, "tokens": self._tokens, "update_tokens": self._tokens}
            | {"grad_norm": float(np.mean(self.grad_norms))}
        )

    def check_mismatch(self, selection: Selection, limit: float | None, version: int | None = None) -> None:
        """Compare the log-probs of engine and trainer. Raises MismatchError if their mean difference exceeds the limit.

        version: compare only tokens of this policy version or later, whose weights the trainer scored with; None: all.
        With a version, the metric policy_gap is the mean difference over all tokens: how far the policy has moved since
        they were generated.
        """
        gaps, all_gaps = [], []
        for t, measured in zip(selection.trajectories, self.log_probs, strict=True):
            if measured is not None:
                own = np.asarray(t.loss_mask)
                difference = np.abs(np.asarray(measured) - np.asarray(t.log_probs))
                compared = own if version is None else own & (np.asarray(t.token_versions) >= version)
                gaps.append(difference[compared])
                all_gaps.append(difference[own])
        if version is not None and all_gaps:
            self.extra["policy_gap"] = float(np.concatenate(all_gaps).mean())
        gap = np.concatenate(gaps) if gaps else np.empty(0)
        if not len(gap):
            return
        self.extra |= {"mismatch": float(gap.mean()), "mismatch_max": float(gap.max())}
        check_mismatch_limit(float(gap.mean()), limit)


def check_mismatch_limit(mismatch: float, limit: float | None) -> None:
    """Raise MismatchError if the mean difference of the log-probs of engine and trainer exceeds the limit; None: no limit."""
    if limit is not None and not mismatch <= limit:
        raise MismatchError(
            f"log-probs of engine and trainer differ by {mismatch:.2g} per token on average, the limit is {limit:g}: "
            "the engine has stale weights or another precision; engine.mismatch_limit sets the limit"
        )
