"""The objective in verl: the streams of a batch as tensors, and the loss that verl's workers compute from them.

The trainer's process knows all rows of a mini-batch, so it computes the normalisers: `stream_tensors` multiplies the weights of
each token by them. The loss of a micro-batch is then a weighted sum, and the micro-batches of all ranks add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import register_adv_est

from rstar_lab.rl.algorithm import objective
from rstar_lab.rl.algorithm.config import LossConfig
from rstar_lab.rl.algorithm.objective import correction_weights
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Stream, Streams, trained_tokens
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.step import Update

ADVANTAGE = "rstar"
LARGEST, MEANS = "ratio_max", ("clip_share", "kl", "kl_k3", "ratio_mean")  # statistics of `objective.policy_loss`
ROWS_AT_ONCE = 256  # rows whose log-probs are padded together
POLICY_WEIGHTS, CORRECTION, CE_WEIGHTS = "rstar_policy_weights", "rollout_is_weights", "rstar_ce_weights"


@register_adv_est(ADVANTAGE)
def placeholder_advantages(token_level_rewards: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards, (batch, tokens): verl requires an estimator. `RecipeTrainer` replaces the result by the streams."""
    return token_level_rewards, token_level_rewards


@dataclass(frozen=True)
class StreamLoss:
    """The loss function of verl's workers, in place of verl's `ppo_loss`. Pickled, and called for each micro-batch.

    Attributes:
        rl: settings of the stage.
    """

    rl: RlSection

    @cached_property
    def config(self) -> LossConfig:
        """Options of the loss of a weighted sum. Loads the user's loss in the process that calls it."""
        return replace(self.rl.loss_config, aggregation="token-mean", correction="none")

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the contribution of a micro-batch to the loss of its mini-batch, and metrics.

        The loss is multiplied by the number of ranks, because FSDP averages gradients over ranks.
        """
        from verl.utils.metric import AggregationType, Metric
        from verl.workers.utils.padding import no_padding_2_padding

        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        dp_size = data["dp_size"]
        names = ["response_mask", "old_log_probs", "advantages", POLICY_WEIGHTS]
        names += [name for name in (CORRECTION, CE_WEIGHTS, "ref_log_prob") if name in data]
        padded = data.select(*names).to_padded_tensor()
        loss, stats = self.loss(log_probs, {name: padded[name] for name in names})
        tokens, largest = stats["tokens"], stats.pop(LARGEST)
        sums = ("tokens", self.config.kl_metric, self.config.ce_metric)
        parts = {"pg_loss": float(loss.detach())}
        parts |= {name: value if name in sums else value * tokens for name, value in stats.items()}
        metrics = {name: Metric(AggregationType.SUM, value * dp_size) for name, value in parts.items()}
        metrics[LARGEST] = Metric(AggregationType.MAX, largest)
        return loss * dp_size, {f"actor/{name}": metric for name, metric in metrics.items()}

    def loss(self, log_probs: torch.Tensor, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a micro-batch and its statistics; see `training_loss`.

        Args:
            log_probs: of the trained policy, with gradient, (batch, tokens).
            tensors: (batch, tokens) each: response_mask, old_log_probs, advantages and the weights of `stream_tensors`;
                optional: the weights of the cross-entropy and of the correction, ref_log_prob.
        """
        weights = tensors[POLICY_WEIGHTS]
        terms = objective.Terms(
            tensors["advantages"],
            tensors["response_mask"].bool() & (weights != 0),
            loss_weights=weights,
            ce_weights=tensors.get(CE_WEIGHTS),
            reference_log_probs=tensors.get("ref_log_prob"),
            normaliser=1.0,
            ce_tokens=1,
        )
        loss, stats = objective.training_loss(
            log_probs, tensors["old_log_probs"], terms, self.config, correction_weights_BT=tensors.get(CORRECTION)
        )
        stats = objective.floats(stats)
        if terms.ce_weights is not None:
            # The contribution to the loss: the number of tokens of the mini-batch is part of the weights.
            stats[self.config.ce_metric] = float((-log_probs.detach() * terms.ce_weights).sum())
        return loss, stats


def measured_update(
    metrics: Mapping[str, float],
    statistics: Mapping[str, float],
    selection: Selection,
    ce_weight: float,
    config: LossConfig,
) -> Update:
    """Return the measurements of an update from what verl reports of it.

    Args:
        metrics: verl's metrics of the step, with those of `StreamLoss` as `actor/<name>`.
        statistics: of the loss that the trainer's process has computed.
        selection: the rollouts that were trained on; without any, there was no update.
        ce_weight: weight of the cross-entropy, which its sum contains.
        config: options of the loss.
    """
    if not selection.trajectories:
        return Update()
    found = {name.removeprefix("actor/"): value for name, value in metrics.items() if name.startswith("actor/")}
    sums = [name for name in (config.kl_metric, config.ce_metric) if name in found]
    means = {name: found[name] / max(1.0, found["tokens"]) for name in MEANS}
    parts = {"loss": found["pg_loss"]} | {name: found[name] for name in sums}
    if config.ce_metric in parts:
        parts[config.ce_metric] /= ce_weight  # the local trainer reports it without the weight
    tokens = sum(trained_tokens(selection.trajectories, selection.streams))
    return Update({**means, **statistics, **parts}, tokens, found["grad_norm"], found[LARGEST])


def stream_tensors(
    streams: Sequence[Streams | None], masks: Sequence[torch.Tensor], groups: Sequence[Any], rl: RlSection
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that carry the streams of the rows of a mini-batch, by name: one tensor (tokens,) per row.

    Args:
        streams: streams of each row; None for verl's padding and for a row that is not trained on.
        masks: 1 on the tokens that the model generated, (tokens,) per row.
        groups: group of each row.
        rl: settings of the stage.
    """
    rows = [
        (Streams(loss_weight_T=0.0) if stream is None or not mask.any() else stream, mask)
        for stream, mask in zip(streams, masks, strict=True)
    ]
    weights = [mask * _row(stream.loss_weight_T, mask, default=1.0) for stream, mask in rows]
    tokens = [int((row != 0).sum()) for row in weights]
    of_rows = aggregation_weights(tokens, groups, rl)
    ce_weights = [_row(stream.ce_weight_T, mask) for stream, mask in rows]
    ce_tokens = max(1, sum(int((row != 0).sum()) for row in ce_weights))
    return {
        "advantages": [_row(stream.advantage_T, mask) * mask for stream, mask in rows],
        POLICY_WEIGHTS: [row * weight for row, weight in zip(weights, of_rows, strict=True)],
        CE_WEIGHTS: [row / ce_tokens for row in ce_weights],
    }


def _row(values: Stream | None, mask: torch.Tensor, default: float = 0.0) -> torch.Tensor:
    """Return the values of a stream as a tensor of the mask's shape. default: value of a stream that is missing."""
    row = np.asarray(default if values is None else values, np.float32)
    return torch.as_tensor(np.broadcast_to(row, tuple(mask.shape)).copy())


def aggregation_weights(tokens: Sequence[int], groups: Sequence[Any], rl: RlSection) -> list[float]:
    """Return the weight of the tokens of each row with which their weighted sum is the aggregation of the recipe.

    Args:
        tokens: trained tokens of each row of a mini-batch; 0 for rows that are not trained on.
        groups: group of each row.
        rl: settings of the stage.
    """
    if rl.method.aggregation == "token-mean":
        return [1 / max(1, sum(tokens))] * len(tokens)
    if rl.method.aggregation == "group-token-mean":
        return (1 / objective.group_normaliser(tokens, groups)).tolist()
    rows = max(1, sum(count > 0 for count in tokens))
    if rl.method.aggregation == "seq-mean-token-mean":
        return [1 / (rows * max(1, count)) for count in tokens]
    horizon = rl.limits.max_response_tokens if rl.method.aggregation == "seq-mean-token-sum-norm" else 1
    return [1 / (rows * horizon)] * len(tokens)


def teacher_advantages(
    advantages: Sequence[torch.Tensor],
    streams: Sequence[Streams | None],
    old_log_probs: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    config: LossConfig,
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return the advantages with the reverse KL to a teacher added, and its metric; see `training_loss`.

    All are one row per rollout, (tokens,) each. Rows without a reference are unchanged.
    """
    found: list[torch.Tensor] = []
    total, tokens = 0.0, 0.0
    for row, stream, old, mask in zip(advantages, streams, old_log_probs, masks, strict=True):
        tokens += float(mask.sum()) if stream is not None else 0.0
        if stream is None or stream.reference_log_prob_T is None:
            found.append(row)
            continue
        gap = ((_row(stream.reference_log_prob_T, mask) - old.float()) * mask).nan_to_num(0.0)
        total += float(gap.sum())
        found.append(row + config.kl_coefficient * gap)
    return found, {config.kl_metric: -total / max(1.0, tokens)}


def correct_rows(
    trainer: Sequence[torch.Tensor], engine: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], keys: RlSection
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return the weights of `rl.correction` of each row, and its statistics over all rows; see `correction_weights`.

    trainer, engine: log-probs of the tokens of each row, masks: 1 on the tokens that are trained on; rows have different
    lengths. ROWS_AT_ONCE rows are padded at a time.
    """
    config = keys.loss_config
    weights: list[torch.Tensor] = []
    sums: dict[str, float] = {}
    for start in range(0, len(masks), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        columns = [pad_sequence([row.float() for row in rows[part]], True) for rows in (trainer, engine, masks)]
        corrected, stats = correction_weights(*columns, correction=config.correction, bounds=config.correction_bounds)
        weights += [row[: len(mask)] for row, mask in zip(corrected, masks[part], strict=True)]
        tokens = float(columns[2].sum())
        for name, share in stats.items():
            sums[name] = sums.get(name, 0.0) + share * tokens
    total = max(1.0, sum(float(mask.sum()) for mask in masks))
    return weights, {name: value / total for name, value in sums.items()}


def order_rows(
    mini_batch_of: Sequence[int | None], ranks: int, mini_batches: int, workloads: Sequence[float] | None = None
) -> list[int]:
    """Return an order of the rows in which mini-batch `m`, over all ranks together, holds the rows assigned to `m`.

    verl gives each rank a contiguous slice of the batch and cuts each slice into `mini_batches` equal parts. All ranks
    wait for the slowest, so the rows of a mini-batch are dealt to the ranks by their work (Karmarkar-Karp, as in verl).
    Padding fills each part up.

    Args:
        mini_batch_of: (rows,) the mini-batch of each real row, None for padding. The number of rows is a multiple of
            ranks * mini_batches, and no mini-batch has more than rows / mini_batches real rows.
        ranks: number of ranks.
        mini_batches: number of mini-batches.
        workloads: (rows,) work of each row, in any unit. Default: the same for all real rows.
    """
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    size = len(mini_batch_of) // mini_batches
    if workloads is None:
        workloads = [float(number is not None) for number in mini_batch_of]
    padding = iter([row for row, number in enumerate(mini_batch_of) if number is None])
    parts: list[list[list[int]]] = []  # by mini-batch and rank
    for wanted in range(mini_batches):
        rows = [row for row, number in enumerate(mini_batch_of) if number == wanted]
        rows += [next(padding) for _ in range(size - len(rows))]
        work = np.array([workloads[row] for row in rows])
        shares = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
        _swap_rows(shares, work)
        parts.append([[rows[i] for i in share] for share in shares])
    return [row for rank in range(ranks) for part in parts for row in part[rank]]


def _swap_rows(shares: list[list[int]], work: np.ndarray) -> None:
    """Swap rows of the rank with the most work and of that with the least, until they differ by at most 1% of the mean, in place.

    The partition of verl is up to 30% above the mean where a rank has about ten rows of different lengths.
    """
    loads = np.array([work[share].sum() for share in shares])
    for _ in range(16 * len(shares)):
        most, least = loads.argmax(), loads.argmin()
        gap = loads[most] - loads[least]
        if gap <= 0.01 * loads.mean():
            return
        moved = work[shares[most]][:, None] - work[shares[least]]
        i, j = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[i, j] < gap:
            return
        loads[most], loads[least] = loads[most] - moved[i, j], loads[least] + moved[i, j]
        shares[most][i], shares[least][j] = shares[least][j], shares[most][i]


def rows_of_mini_batches(rows: int, ranks: int, mini_batches: int) -> list[list[int]]:
    """Return the positions, in the ordered batch, of the rows of each mini-batch over all ranks."""
    size = rows // ranks // mini_batches
    return [
        [rank * size * mini_batches + part * size + i for rank in range(ranks) for i in range(size)]
        for part in range(mini_batches)
    ]
