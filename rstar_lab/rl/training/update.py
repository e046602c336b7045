"""The optimisation step: from kept rollouts and their advantages to new weights, and what was measured on the way."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rstar_lab.errors import UserError
from rstar_lab.memory import release_free_heap
from rstar_lab.rl.algorithm.objective import group_normaliser, kl_loss, policy_loss, truncated_weights
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.training.data_parallel import SINGLE_RANK, Ranks
from rstar_lab.rl.training.log_probs import MicroBatch, log_probs_and_entropy, micro_batches
from rstar_lab.rl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP32_MISMATCH = 1e-3


class MismatchError(UserError):
    """Engine and trainer disagree on the log-probs of the same tokens: what would be trained is not what was sampled."""


class Learner:
    """The model that is trained, its optimizer, and the reference it may be held to.

    With helper processes every rank has all of these and computes its part of each mini-batch; what rank 0 is asked for,
    the others do too (`follow`).
    """

    def __init__(self, model: "PreTrainedModel", ranks: Ranks = SINGLE_RANK):
        self.model = model
        self.ranks = ranks
        self.device = next(model.parameters()).device
        # A mask of its own is understood as meant by torch's attention alone.
        self.shares_prompts = model.config._attn_implementation == "sdpa"
        self.optimizer: torch.optim.AdamW | None = None
        self.reference: PreTrainedModel | None = None

    def begin_stage(self, rl: RlSection, *, reset: bool, reference: "PreTrainedModel | None") -> None:
        """reset: AdamW forgets its moments; reference: what `kl_coefficient` measures from."""
        self._tell("begin_stage", rl, reset=reset, reference=reference)
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

    def lead(self, ranks: Ranks, rl: RlSection) -> None:
        """From here on the other ranks help; they get what this one has."""
        self.ranks = ranks
        optimizer = self.optimizer.state_dict() if self.optimizer else None
        ranks.share((type(self.model), self.model.config, optimizer, rl))
        ranks.share_weights(self.model)

    def dismiss(self) -> None:
        """The others' work is done."""
        self.ranks.share(None)

    def _tell(self, name: str, *arguments: Any, **keywords: Any) -> None:
        if self.ranks.rank == 0:
            self.ranks.share((name, arguments, keywords))

    def load_optimizer(self, state: dict[str, Any], rl: RlSection) -> None:
        self.optimizer = make_optimizer(self.model, rl)
        self.optimizer.load_state_dict(state)

    def update(self, kept: Selection, rl: RlSection, *, lr_scale: float, seed: int) -> "Update":
        """Mini-batches of the kept rollouts, in their order. An empty batch changes nothing."""
        assert self.optimizer is not None
        self._tell("update", kept, rl, lr_scale=lr_scale, seed=seed)
        count = len(kept.trajectories)
        update = Update(count)
        if not count:
            return update
        for group in self.optimizer.param_groups:
            group["lr"] = rl.lr * lr_scale
        ahead = rl.old_log_probs == "trainer" and rl.mini_batches > 1
        if ahead:
            self.measure(kept, rl, update)
        generator = torch.Generator().manual_seed(derive_seed(seed, "clip_cov"))
        bounds = np.linspace(0, count, min(rl.mini_batches, count) + 1).astype(int)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            batch = kept.trajectories[start:end]
            advantages = torch.tensor(kept.advantages[start:end], device=self.device, dtype=torch.float32)
            prompts = [len(t.prompt_ids) for t in batch]
            normaliser = batch_normaliser(batch, rl)
            for micro in self.cut(batch, rl):
                log_probs, entropy = self.forward(self.model, micro, rl)
                engine = micro.scatter([t.log_probs for t in batch], prompts).to(self.device)
                if not ahead and number == 0:  # the weights are still those that rolled out
                    update.note(micro, prompts, batch, log_probs, entropy, start)
                if ahead:
                    old = micro.scatter([update.log_probs[start + i] for i in range(len(batch))], prompts)
                elif rl.old_log_probs == "trainer":
                    old = log_probs.detach()
                else:
                    old = engine
                old = old.to(self.device)
                weights = None
                if rl.importance_cap is not None:
                    weights = truncated_weights(old, engine, micro.mask_BT, cap=rl.importance_cap)
                shared: dict[str, Any] = {
                    "aggregation": rl.aggregation,
                    "normaliser": normaliser[micro.index] if isinstance(normaliser, Tensor) else normaliser,
                    "horizon": rl.max_response_tokens,
                }
                loss, stats = policy_loss(
                    log_probs,
                    old,
                    advantages[micro.index][:, None].expand_as(log_probs),
                    micro.mask_BT,
                    clip_low=rl.clip_low,
                    clip_high=rl.clip_high,
                    variant=rl.variant,
                    rollout_weights=weights,
                    generator=generator,
                    **shared,
                )
                if weights is not None:
                    stats["importance_weight"] = float(weights.sum() / micro.mask_BT.sum().clamp(min=1))
                if self.reference is not None:
                    with torch.no_grad():
                        reference, _ = self.forward(self.reference, micro, rl)
                    distance = kl_loss(log_probs, reference, micro.mask_BT, **shared)
                    loss = loss + rl.kl_coefficient * distance
                    update.sums["reference_kl"] += float(distance.detach())
                loss.backward()
                update.add(stats, float(loss.detach()))
            self._add_up_gradients()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), rl.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            update.grad_norms.append(float(norm))
        if self.device.type == "cpu":
            release_free_heap()
        return update.merge(self.ranks.gather(update))

    def _add_up_gradients(self) -> None:
        if self.ranks.size == 1:
            return
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # this rank had nothing of the mini-batch
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum([parameter.grad for parameter in parameters if parameter.grad is not None])

    def cut(self, batch: Sequence[Trajectory], rl: RlSection) -> Iterator[MicroBatch]:
        """This rank's part of a batch."""
        return micro_batches(batch, rl.micro_batch_tokens, self.device, share=self.shares_prompts, ranks=self.ranks)

    def forward(self, model: "PreTrainedModel", micro: MicroBatch, rl: RlSection) -> tuple[Tensor, Tensor]:
        """log_probs_BT and entropy_BT, float32; the products in the recipe's precision."""
        with products(rl, self.device):
            return log_probs_and_entropy(model, micro, rl.temperature, fp32_head=rl.fp32_head)

    @torch.no_grad()
    def measure(self, kept: Selection, rl: RlSection, update: "Update") -> None:
        """Log-probs and entropy of all kept rollouts under the weights that rolled them out."""
        prompts = [len(t.prompt_ids) for t in kept.trajectories]
        for micro in self.cut(kept.trajectories, rl):
            log_probs, entropy = self.forward(self.model, micro, rl)
            update.note(micro, prompts, kept.trajectories, log_probs, entropy, 0)
        measured = update.merge(self.ranks.gather(update))
        update.log_probs, update.entropies = self.ranks.share((measured.log_probs, measured.entropies))


def follow(ranks: Ranks) -> None:
    """What a helper process does: as rank 0's learner, until it is dismissed."""
    model_class, config, optimizer, rl = ranks.share(None)
    model = model_class(config).float()
    ranks.share_weights(model)
    learner = Learner(model, ranks)
    if optimizer is not None:
        learner.load_optimizer(optimizer, rl)
    while (call := ranks.share(None)) is not None:
        name, arguments, keywords = call
        getattr(learner, name)(*arguments, **keywords)


def make_optimizer(model: "PreTrainedModel", rl: RlSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rl.lr, weight_decay=rl.weight_decay)


def products(rl: RlSection, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast where the update's products run in bf16; master weights stay fp32."""
    bf16 = rl.precision == "bf16" or (rl.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def batch_normaliser(batch: Sequence[Trajectory], rl: RlSection) -> float | Tensor:
    """What the losses of a mini-batch's micro-batches are divided by, so that they add up."""
    if rl.aggregation == "token-mean":
        return sum(t.model_tokens for t in batch)
    if rl.aggregation == "group-token-mean":
        return group_normaliser([t.model_tokens for t in batch], [t.group_id for t in batch])
    return len(batch)


class Update:
    """What the update measured. log_probs, entropies: per kept rollout, over its response; None where not measured."""

    def __init__(self, count: int):
        self.log_probs: list[Any] = [None] * count
        self.entropies: list[Any] = [None] * count
        self.grad_norms: list[float] = []
        self.sums: dict[str, float] = defaultdict(float)  # add up over micro-batches; a mean over mini-batches is told
        self.extra: dict[str, float] = {}
        self._means: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._ratio_max = 0.0

    def note(
        self,
        micro: MicroBatch,
        prompts: Sequence[int],
        batch: Sequence[Trajectory],
        log_probs: Tensor,
        entropy: Tensor,
        offset: int,
    ) -> None:
        """Take a micro-batch's log-probs and entropy apart into responses."""
        for row, i in enumerate(micro.index):
            span = slice(prompts[i], prompts[i] + len(batch[i].response_ids))
            outside = ~micro.mask_BT[row, span]
            for kind, values in ((self.log_probs, log_probs), (self.entropies, entropy)):
                kind[offset + i] = values[row, span].detach().masked_fill(outside, torch.nan).cpu().numpy()

    def add(self, stats: Mapping[str, float], loss: float) -> None:
        """The stats of a micro-batch's policy_loss."""
        tokens = int(stats["tokens"])
        for name in stats.keys() - {"tokens", "ratio_max"}:
            self._means[name] += stats[name] * tokens
        self._ratio_max = max(self._ratio_max, stats["ratio_max"])
        self._tokens += tokens
        self.sums["loss"] += loss

    def merge(self, parts: Sequence["Update"]) -> "Update":
        """Take in what the other ranks have measured; parts: of all ranks, the first being this one (or none)."""
        for part in parts[1:]:
            for mine, theirs in ((self.log_probs, part.log_probs), (self.entropies, part.entropies)):
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

    def check_mismatch(self, kept: Selection, limit: float | None, version: int | None = None) -> None:
        """Compare engine and trainer on the tokens that both have scored. Raises MismatchError past the limit.

        version: where older policies wrote some of the tokens, the one whose weights the trainer scored with.
        """
        gaps = []
        for t, measured in zip(kept.trajectories, self.log_probs, strict=True):
            if measured is not None:
                both = np.asarray(t.loss_mask)
                if version is not None:
                    both = both & (np.asarray(t.token_versions) == version)
                gaps.append(np.abs(np.asarray(measured) - np.asarray(t.log_probs))[both])
        gap = np.concatenate(gaps) if gaps else np.empty(0)
        if not len(gap):
            return
        self.extra |= {"mismatch": float(gap.mean()), "mismatch_max": float(gap.max())}
        if limit is not None and not gap.mean() <= limit:
            raise MismatchError(
                f"engine and trainer differ by {gap.mean():.2g} in the mean log-prob of a token, the limit is {limit:g}: "
                "stale weights, another precision or a bug; engine.mismatch_limit sets the limit"
            )
