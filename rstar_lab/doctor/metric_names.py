"""Names of the same metric in the logs of other trainers. The key is the name that rules use, which is ours where we log it."""

import math
import re
from collections.abc import Iterable

NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "rewards/mean", "train/reward", "reward/mean", "reward/all/mean"),
    "entropy": (
        "entropy", "policy_entropy", "actor/entropy", "actor/entropy_loss", "train/entropy", "entropy/mean", "entropy/all/mean",
        "optim/entropy",
    ),
    "grad_norm": ("grad_norm", "actor/grad_norm", "train/grad_norm", "optim/grad_norm", "train/actor_grad_norm"),
    "loss": ("loss", "actor/pg_loss", "train/loss", "loss/mean"),
    "lr": ("lr", "learning_rate", "actor/lr", "train/learning_rate", "optim/lr", "train/actor_lr", "train/lr", "actor_lr"),
    "kl_k3": ("kl_k3", "actor/kl_k3"),
    "kl": ("kl", "actor/ppo_kl", "train/kl", "approx_kl"),
    "clip_share": ("clip_share", "actor/pg_clipfrac", "clip_ratio/region_mean", "clip_ratio", "train/clip_ratio/region_mean"),
    "ratio_max": ("ratio_max", "actor/ratio_max", "sampling/importance_sampling_ratio/max", "rollout_corr/rollout_is_max"),
    "mismatch": (
        "mismatch", "training/rollout_probs_diff_mean", "rollout_corr/log_ppl_abs_diff", "sampling/sampling_logp_difference/mean",
        "mismatch_kl/mean", "mismatch_kl/all/mean",
    ),
    "response_tokens": ("response_tokens", "response_length/mean", "completions/mean_length", "completion_length", "seq_len/all/mean",
        "train/response_length", "response_length", "train/completion_length",
    ),
    "truncated": ("truncated", "response_length/clip_ratio", "completions/clipped_ratio", "is_truncated/all/mean"),
    "equal_share": ("equal_share", "frac_reward_zero_std", "solve_none", "effective_batch_size/none"),
    "error_rate": ("error_rate", "tools/failure_frequency"),
    "step_s": ("step_s", "timing_s/step", "step_time", "time/step"),
    "generate_s": ("generate_s", "timing_s/gen", "timing/gen"),
    "staleness": ("staleness_mean", "staleness", "async/staleness_mean", "off_policy_level/mean"),
}  # fmt: skip
# Values that a metric can have.
SHARE, POSITIVE = (0.0, 1.0), (0.0, math.inf)
RANGES = {
    "clip_share": SHARE, "truncated": SHARE, "equal_share": SHARE, "error_rate": SHARE,
    "entropy": POSITIVE, "grad_norm": POSITIVE, "lr": POSITIVE, "kl_k3": POSITIVE, "ratio_max": POSITIVE, "response_tokens": POSITIVE,
    "step_s": POSITIVE, "generate_s": POSITIVE, "staleness": POSITIVE,
}  # fmt: skip
HELD_OUT = re.compile(
    r"(eval/.*(pass1|pass@1|avg@|accuracy|reward)|val[-/].*(mean@|acc|score|reward)|eval_reward|eval_accuracy)"
)
_SPREAD = re.compile(r"(?:^|[/_@-])(?:std|min|max|best|worst|maj)(?:$|[/_@-])")
_MAIN = re.compile(r"^val-core/|^eval[_/](?:reward|accuracy)$|pass@?1")
_CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in aliases}


def canonical(name: str) -> str | None:
    """Return the name that rules use for a metric of any trainer; None if no rule reads it."""
    known = _CANONICAL.get(name) or _CANONICAL.get(
        name.removeprefix("train/").removeprefix("verl/")
    )  # verl/: of our runs under verl
    return known or ("held_out" if HELD_OUT.search(name[:500]) else None)


def held_out_score(names: Iterable[str]) -> str | None:
    """Return the metric that is the held-out score of another trainer: a mean and no spread, the first evaluation set of several."""
    scores = [name for name in names if canonical(name) == "held_out" and not _SPREAD.search(name)]
    return min(scores, key=lambda name: _MAIN.search(name) is None, default=None)
