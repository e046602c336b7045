"""The policy update: from the selected rollouts and their advantages to new weights, and the metrics of the update."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import release_free_heap
from rstar_lab.rl.algorithm.config import Aggregation, LossConfig
from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.algorithm.objective import Terms, floats, group_normaliser, training_loss
from rstar_lab.rl.algorithm.selection import Selection, cut_mini_batches
from rstar_lab.rl.algorithm.streams import Streams, trained_tokens
from rstar_lab.rl.models import gpu, packed_attention
from rstar_lab.rl.models.forward_path import forward_path
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.models.model import has_bf16
from rstar_lab.rl.models.update_mode import without_noise
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.step import Update
from rstar_lab.rl.training.data_parallel import SINGLE_RANK, Ranks
from rstar_lab.rl.training.log_probs import MicroBatch, micro_batches, token_statistics, worthwhile_width
from rstar_lab.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        without_noise(self.model)
        for model in filter(None, (self.model, reference)):
            prepare_update(model, rl)

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

    def update(self, selection: Selection, rl: RlSection, *, lr_scale: float, seed: int) -> Update:
        """Update the model on mini-batches of the selected rollouts, in their order. Nothing changes if there are none.

        lr_scale: factor of the learning rate. seed: seed of the step, used by clip_cov.
        """
        assert self.optimizer is not None
        self._call_helpers("update", selection, rl, lr_scale=lr_scale, seed=seed)
        count = len(selection.trajectories)
        result = UpdateResult(count)
        if not count:
            return Update()
        for group in self.optimizer.param_groups:
            group["lr"] = rl.lr * lr_scale
        if selection.measured is not None:
            result.log_probs, result.entropies = ([*values] for values in selection.measured)
        elif rl.old_log_probs == "trainer" and rl.mini_batches > 1:
            # The policy at the start of the update changes with the first mini-batch: score all of them before.
            self.measure(selection, rl, result)
        measured = result.log_probs if result.log_probs[0] is not None and rl.old_log_probs == "trainer" else None
        config = rl.loss_config
        generator = torch.Generator().manual_seed(derive_seed(seed, "clip_cov"))
        for number, indices in enumerate(cut_mini_batches(selection, rl.mini_batches)):
            batch = Batch.of(selection, indices, config.aggregation)
            with gpu.bf16_weights(self.model):
                for micro in self.micro_batches(batch.trajectories, rl, batch.also_scored):
                    log_probs, entropy = self.forward(self.model, micro, rl)
                    if measured is None:
                        # After the first mini-batch the weights are no longer those that generated the rollouts, so its
                        # log-probs are not those of the policy at the start of the update.
                        result.record(micro, batch.trajectories, log_probs if number == 0 else None, entropy, indices)
                    reference = None
                    if self.reference is not None:
                        with torch.no_grad():
                            reference, _ = self.forward(self.reference, micro, rl)
                    old_log_probs = None if measured is None else [measured[i] for i in indices]
                    loss, stats = micro_batch_loss(
                        log_probs, micro, batch, rl.old_log_probs, config, old_log_probs, reference, generator
                    )
                    loss.backward()
                    result.add(stats | {"loss": loss.detach()}, ("loss", config.kl_metric, config.ce_metric))
            result.read()
            if self.ranks.size > 1:
                self.ranks.sum_gradients(parameter for parameter in self.model.parameters() if parameter.requires_grad)
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), rl.max_grad_norm))
            check_finite(norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            result.grad_norms.append(norm)
        if self.device.type == "cpu":
            release_free_heap()
        return result.merge(self.ranks.gather(result)).finished

    def micro_batches(
        self, batch: Sequence[Trajectory], rl: RlSection, also_scored: Sequence[np.ndarray] | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank. also_scored: see `micro_batches`."""
        return micro_batches(
            batch,
            rl.micro_batch_tokens,
            self.device,
            shared_width=min(forward_path(self.model).shared_width, worthwhile_width(self.model)),
            also_scored=also_scored,
            ranks=self.ranks,
        )

    def forward(self, model: "PreTrainedModel", micro: MicroBatch, rl: RlSection) -> tuple[Tensor, Tensor]:
        """Return log_probs_BT and entropy_BT, float32, computed in the precision of the recipe."""
        with autocast(rl, self.device):
            log_probs, entropy = token_statistics(model, micro, rl.temperature, fp32_head=rl.fp32_head)
        return log_probs, entropy

    def measure(self, selection: Selection, rl: RlSection, result: "UpdateResult") -> None:
        """Record log-probs and entropy of all selected rollouts under the weights that generated them."""
        merged = self._measured(selection.trajectories, rl, result)
        result.log_probs, result.entropies = self.ranks.share((merged.log_probs, merged.entropies))

    def statistics(
        self, trajectories: Sequence[Trajectory], rl: RlSection, *, squares: bool = False
    ) -> TokenStatistics:
        """Return log-probs, entropies and, with `squares`, the squared probabilities of rollouts under the policy."""
        self._call_helpers("statistics", trajectories, rl, squares=squares)
        found = self._measured(trajectories, rl, UpdateResult(len(trajectories)), squares=squares)
        return TokenStatistics(found.log_probs, found.entropies, found.squares)

    @torch.no_grad()
    def _measured(
        self, trajectories: Sequence[Trajectory], rl: RlSection, result: "UpdateResult", *, squares: bool = False
    ) -> "UpdateResult":
        """Record log-probs and entropy of rollouts in `result`; return it with the parts of all ranks."""
        with gpu.bf16_weights(self.model):
            for micro in self.micro_batches(trajectories, rl):
                with autocast(rl, self.device):
                    found = token_statistics(self.model, micro, rl.temperature, fp32_head=rl.fp32_head, squares=squares)
                result.record(micro, trajectories, found[0], found[1], range(len(trajectories)), *found[2:])
        result.read()
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
    # On a GPU, the default takes 4 bytes per parameter while it steps; on a CPU, ten times as long.
    return torch.optim.AdamW(trained, lr=rl.lr, weight_decay=rl.weight_decay, fused=True)


def prepare_update(model: "PreTrainedModel", rl: RlSection) -> None:
    """Prepare a model for updates in the precision of `rl`, and compare its log-probs with those of the plain model."""
    device = next(model.parameters()).device
    gpu.use_fast_layers(model)
    with autocast(rl, device):
        path = forward_path(model)
        if device.type == "cpu" and torch.is_autocast_enabled("cpu") and path.splits:
            packed_attention.use_products(model)


def autocast(rl: RlSection, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of the update: bf16 or disabled. Master weights are fp32 in both cases."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(rl, device))


def uses_bf16(rl: RlSection, device: torch.device) -> bool:
    """Return whether the matrix products of the update run in bf16. rl: settings of a stage (`Recipe.settings`)."""
    return rl.precision == "bf16" or (rl.precision == "auto" and device.type == "cuda")


def with_cpu_precision(rl: RlSection, device: torch.device) -> RlSection:
    """Return the settings of a stage with `precision: auto` resolved for a CPU: bf16 if it is measured to be faster.

    rl: settings of a stage (`Recipe.settings`), in which `auto` is left for engines in bfloat16 only.
    """
    if rl.precision != "auto" or gpu.is_gpu(device):
        return rl
    return rl.model_copy(update={"precision": "bf16" if has_bf16(device) else "fp32"})


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of a mini-batch, what each contributes to the loss, and the normalisers of the terms.

    Attributes:
        trajectories, streams: the rollouts and their streams.
        normaliser: that of the policy loss and the KL, see `objective.aggregate`.
        tokens: number of tokens in the policy loss.
        also_scored: tokens with a weight of the cross-entropy, per rollout; None if no rollout has such a weight.
        ce_tokens: number of tokens with a weight of the cross-entropy.
    """

    trajectories: list[Trajectory]
    streams: list[Streams]
    normaliser: float | Tensor
    tokens: int
    also_scored: list[np.ndarray] | None
    ce_tokens: int

    @classmethod
    def of(cls, selection: Selection, indices: Sequence[int], aggregation: Aggregation) -> "Batch":
        """Return the rollouts of a selection with these indices."""
        trajectories, streams = [selection.trajectories[i] for i in indices], [selection.streams[i] for i in indices]
        tokens = trained_tokens(trajectories, streams)
        normaliser: float | Tensor = sum(tokens)
        if aggregation == "group-token-mean":
            normaliser = group_normaliser(tokens, [t.group_id for t in trajectories])
        elif aggregation != "token-mean":
            normaliser = sum(count > 0 for count in tokens)
        weighted = None
        if any(stream.ce_weight_T is not None for stream in streams):
            weighted = [
                np.broadcast_to(0.0 if stream.ce_weight_T is None else stream.ce_weight_T, len(t.response_ids)) != 0
                for t, stream in zip(trajectories, streams, strict=True)
            ]
        ce_tokens = sum(int(row.sum()) for row in weighted or ())
        return cls(trajectories, streams, normaliser, sum(tokens), weighted, ce_tokens)

    def terms(self, micro: MicroBatch, reference_log_probs: Tensor | None) -> Terms:
        """Return the streams of a micro-batch. reference_log_probs: those of the reference model, if there is one."""

        def scattered(name: str, missing: float) -> Tensor | None:
            rows = [getattr(stream, name) for stream in self.streams]
            if all(row is None for row in rows):
                return None
            return micro.scatter([missing if row is None else row for row in rows], self.trajectories)

        weights = scattered("loss_weight_T", 1.0)
        normaliser = self.normaliser
        return Terms(
            advantages=micro.scatter([stream.advantage_T for stream in self.streams], self.trajectories),
            mask=micro.mask_BT if weights is None else micro.mask_BT & (weights != 0),
            loss_weights=weights,
            ce_weights=scattered("ce_weight_T", 0.0),
            reference_log_probs=scattered("reference_log_prob_T", np.nan)
            if reference_log_probs is None
            else reference_log_probs,
            normaliser=normaliser[micro.index] if isinstance(normaliser, Tensor) else normaliser,
            tokens=self.tokens,
            ce_tokens=self.ce_tokens,
        )


def micro_batch_loss(
    log_probs: Tensor,
    micro: MicroBatch,
    batch: Batch,
    old_log_probs: Literal["trainer", "engine"],
    config: LossConfig,
    measured: Sequence[np.ndarray] | None = None,
    reference_log_probs: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of a micro-batch and its statistics, see `training_loss`.

    Args:
        log_probs: of the trained policy, with gradient, (B, T).
        micro: a micro-batch of `batch`.
        batch: the mini-batch.
        old_log_probs: source of the log-probs of the policy at the start of the update.
        config: options of the loss.
        measured: log-probs of the rollouts of `batch` at the start of the update, (response length,) each. None:
            `log_probs` are those.
        reference_log_probs: log-probs under the reference model, (B, T).
        generator: draws the tokens of clip_cov.
    """
    engine = micro.scatter([t.log_probs for t in batch.trajectories], batch.trajectories)
    if old_log_probs == "engine":
        old = engine
    else:
        old = log_probs.detach() if measured is None else micro.scatter(measured, batch.trajectories)
    terms = batch.terms(micro, reference_log_probs)
    return training_loss(log_probs, old, terms, config, engine_log_probs=engine, generator=generator)


def check_finite(norm: float) -> None:
    """Raise UserError for the norm of a gradient that is NaN or infinite: the update would destroy the weights."""
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient of the update is {norm}: a loss, an advantage or a log-prob is not finite. It was not applied, and "
            "nothing was written; the run continues from its last checkpoint when the same command is started again"
        )


class UpdateResult:
    """Measurements of an update, log_probs, entropies, squares (sums of the squared probabilities of the vocabulary): arrays
    (response length,) per selected rollout, NaN outside of the mask; None if not computed.

    Measurements stay on the device until `read`: to read one, the host waits for all work before it.
    With `old_log_probs: engine` and several mini-batches, log_probs exist for the first mini-batch only. The entropies of
    a later mini-batch are those of its own forward pass, after the optimizer steps of the mini-batches before it.
    """

    def __init__(self, count: int):
        self.log_probs: list[Any] = [None] * count
        self.entropies: list[Any] = [None] * count
        self.squares: list[Any] = [None] * count
        self.grad_norms: list[float] = []
        self.sums: dict[str, float] = defaultdict(float)  # over micro-batches; reported as the mean over mini-batches
        self._means: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._ratio_max = 0.0
        self._unread_arrays: list[tuple[list[Any], list[int], list[slice], Tensor]] = []
        self._unread_stats: list[tuple[Mapping[str, Any], Collection[str]]] = []

    def record(
        self,
        micro: MicroBatch,
        batch: Sequence[Trajectory],
        log_probs: Tensor | None,
        entropy: Tensor,
        indices: Sequence[int],
        squares: Tensor | None = None,
    ) -> None:
        """Store log-probs, entropy and squares (unless None) of a micro-batch by rollout. indices: those of the rollouts of
        `batch` in the selection."""
        members = [batch[i] for i in micro.index]
        spans = [slice(len(t.prompt_ids), len(t.prompt_ids) + len(t.response_ids)) for t in members]
        places = [indices[i] for i in micro.index]
        for kind, values_BT in zip(self._arrays, (log_probs, entropy, squares), strict=True):
            if values_BT is not None:
                self._unread_arrays.append(
                    (kind, places, spans, values_BT.detach().masked_fill(~micro.mask_BT, torch.nan))
                )

    def add(self, stats: Mapping[str, Any], sums: Collection[str]) -> None:
        """Add the statistics of a micro-batch. sums: names of those that are parts of a sum over the batch; the others are
        means over tokens."""
        self._unread_stats.append((stats, sums))

    def read(self) -> None:
        """Read everything that was recorded and added."""
        for kind, places, spans, values_BT in self._unread_arrays:
            for place, span, row in zip(places, spans, values_BT.cpu().numpy(), strict=True):
                kind[place] = row[span]
        for stats, sums in self._unread_stats:
            numbers = floats(stats)
            tokens = int(numbers.pop("tokens"))
            self._ratio_max = max(self._ratio_max, numbers.pop("ratio_max"))
            self._tokens += tokens
            for name, value in numbers.items():
                if name in sums:
                    self.sums[name] += value
                else:
                    self._means[name] += value * tokens
        self._unread_arrays, self._unread_stats = [], []

    @property
    def _arrays(self) -> tuple[list[Any], ...]:
        return self.log_probs, self.entropies, self.squares

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
    def finished(self) -> Update:
        """The measurements of the whole update."""
        means = {name: value / max(1, self._tokens) for name, value in sorted(self._means.items())}
        sums = {name: value / max(1, len(self.grad_norms)) for name, value in self.sums.items()}
        grad_norm = float(np.mean(self.grad_norms)) if self.grad_norms else None
        return Update(means | sums, self._tokens, grad_norm, self._ratio_max, self.log_probs, self.entropies)
