"""Register the objective in verl: the advantage `rstar` and one loss `rstar-VARIANT` per variant of the recipe.

The environment variable RSTAR_LAB_LOSS names a loss of the user, `module:function`; each process loads it at its first call.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch.nn.utils.rnn import pad_sequence
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from rstar_lab.rl.algorithm import objective
from rstar_lab.rl.algorithm.config import Variant
from rstar_lab.rl.algorithm.correction import correction_weights
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.functions import own_loss
from rstar_lab.rl.recipe.rl import is_own
from rstar_lab.rl.verl.variables import OWN_LOSS

ADVANTAGE = "rstar"
VARIANTS = (*get_args(Variant), *filter(None, [os.environ.get(OWN_LOSS)]))
ROWS_AT_ONCE = 256  # rows whose log-probs are padded together


def loss_name(variant: str) -> str:
    return f"rstar-{variant}"


@register_adv_est(ADVANTAGE)
def group_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return group advantages (batch, tokens). index: the group of each row."""
    normalise = config.get("norm_adv_by_std_in_grpo", True) if config is not None else True
    rewards = token_level_rewards.sum(-1).tolist()
    advantages = objective.group_advantages(rewards, list(index), normalise_std=normalise)
    per_token = torch.tensor(advantages, dtype=torch.float32)[:, None] * response_mask
    return per_token, per_token


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    variant: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the contribution of one micro-batch to the loss of its mini-batch; tensors are (batch, tokens).

    The loss is multiplied by the number of ranks, because FSDP averages gradients over ranks.
    """
    batch = config.global_batch_info
    by_token = loss_agg_mode == "token-mean"
    loss, stats = objective.policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        clip_low=config.clip_ratio_low,
        clip_high=config.clip_ratio_high,
        aggregation=loss_agg_mode,  # type: ignore[arg-type]
        variant=own_loss(variant) if is_own(variant) else variant,
        rollout_weights=rollout_is_weights,
        normaliser=batch["batch_num_tokens"] if by_token else batch["global_batch_size"],
        horizon=batch.get("loss_scale_factor"),
    )
    return loss * batch["dp_size"], {f"actor/{name}": value for name, value in stats.items()}


for _variant in VARIANTS:
    register_policy_loss(loss_name(_variant))(partial(policy_loss, variant=_variant))


def row_weights(groups: list[Any], tokens: list[int], aggregation: str, size: int) -> list[float]:
    """Return a weight per row that turns verl's normaliser into the objective's.

    verl divides sequence means by the configured `size`, even if rows were dropped and replaced by padding, and it does not
    support a mean over groups. groups, tokens: of the real rows of a mini-batch.
    """
    if aggregation == "group-token-mean":
        return (sum(tokens) / objective.group_normaliser(tokens, groups)).tolist()
    rows = sum(count > 0 for count in tokens)
    weight = 1.0 if aggregation == "token-mean" else size / max(1, rows)
    return [weight] * len(tokens)


def correct_rows(
    trainer: Sequence[torch.Tensor], engine: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], keys: RlSection
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return the weights of `rl.correction` of each row, and its statistics over all rows; see `correction_weights`.

    trainer, engine: log-probs of the tokens of each row, masks: 1 on the tokens that are trained on; rows have different
    lengths. ROWS_AT_ONCE rows are padded at a time.
    """
    correction, bounds = keys.loss_config.correction, keys.resolved_correction[1]
    weights: list[torch.Tensor] = []
    sums: dict[str, float] = {}
    for start in range(0, len(masks), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        columns = [pad_sequence([row.float() for row in rows[part]], True) for rows in (trainer, engine, masks)]
        corrected, stats = correction_weights(*columns, correction=correction, bounds=bounds)
        weights += [row[: len(mask)] for row, mask in zip(corrected, masks[part], strict=True)]
        tokens = float(columns[2].sum())
        for name, share in stats.items():
            sums[name] = sums.get(name, 0.0) + share * tokens
    total = max(1.0, sum(float(mask.sum()) for mask in masks))
    return weights, {name: value / total for name, value in sums.items()}
