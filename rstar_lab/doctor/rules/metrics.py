"""Rules over the metrics of steps."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from rstar_lab.common.estimates import ratio
from rstar_lab.doctor.metric_names import RANGES
from rstar_lab.doctor.rule import LEVEL, WINDOW, Check, Evidence, Log, at_steps, change, first

ENTROPY = "entropy {last:.3g} nats per token, {first:.3g} in the first steps"
LENGTH = "{last:.0f} tokens per response, {first:.0f} in the first steps"
LIMIT, FP32_LIMIT = 0.05, 1e-3  # nats per token between engine and trainer


def at(column: str, condition: Callable[[pd.Series], pd.Series], text: str, *, cost: float) -> Check:
    """Return a check that fires if a condition on the values of a metric holds in at least two steps; see `at_steps`."""

    def check(log: Log) -> Evidence | None:
        values = log.steps[column]
        return at_steps(log, values, condition(values), text, cost=cost)

    return check


def thirds(text: str, numbers: tuple[float, float, float]) -> str:
    """Return "reward +0.120 [+0.080, +0.160]"."""
    return f"{text} {numbers[0]:+.3f} [{numbers[1]:+.3f}, {numbers[2]:+.3f}]"


def few_groups_train(log: Log) -> Evidence | None:
    late = log.steps.dropna(subset=["equal_share"]).tail(WINDOW)
    value = float(late.equal_share.mean())
    groups = log.last().group_id.nunique() or 20 * len(late)
    equal = np.repeat([1.0, 0.0], [round(value * groups), groups - round(value * groups)])
    if value < 0.8 or not ratio(equal, np.ones(groups), groups, level=LEVEL).low > 0.25 or is_solved(log):
        return None
    text = f"{value:.0%} of the groups in the last {len(late)} steps have equal rewards"
    return Evidence(text, {"share": value}, late.step.astype(int).tolist(), (), value)


def is_solved(log: Log) -> bool:
    """Return whether groups became equal because the policy learned to solve their problems, which ends a stage and is no fault."""
    rewards = log.steps.reward if log.has("steps.reward") else pd.Series(dtype=float)
    best = float(log.rollouts.reward.max()) if log.has("rollouts.reward") else max(1.0, float(rewards.max()))
    early = float(log.steps.equal_share.dropna().head(max(3, len(log.steps) // 3)).mean())
    return early < 0.6 and change(rewards)[1] > 0 and float(rewards.tail(WINDOW).mean()) > 0.6 * best


def no_progress(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    difference, low, high = change(rewards)
    # Equivalence: the interval shows that the change is small. A wide interval shows nothing.
    small = 0.1 * float(rewards.abs().mean())
    solved = log.has("rollouts.reward") and rewards.tail(len(rewards) // 3).mean() > 0.9 * log.rollouts.reward.max()
    if not (-small < low and high < small) or solved or not rewards.any():
        return None
    text = thirds("mean reward of the last third minus the first third:", (difference, low, high))
    text += f" over {len(rewards)} steps, less than a tenth of the mean reward"
    return Evidence(text, {"difference": difference, "low": low, "high": high}, (), (), 0.6)


def reward_collapses(log: Log) -> Evidence | None:
    rewards = log.steps.reward.dropna()
    difference, low, high = change(rewards, 0.99)
    third = len(rewards) // 3
    start, last = float(rewards.head(third).mean()), rewards.tail(third)
    fallen = third >= 3 and last.max() < 0.25 * rewards.head(2).mean()  # within the first third, too
    if rewards.head(2).mean() < 0.05 or not (fallen or (high < 0 and difference < -0.4 * start)):
        return None
    text = f"mean reward {start:.3f} in the first third, {last.mean():.3f} in the last: "
    steps = log.steps.step[last.index].astype(int).tolist()
    numbers = {"first": start, "last": float(last.mean()), "low": low, "high": high}
    return Evidence(thirds(text, (difference, low, high)) + " (99%)", numbers, steps, (), 0.9)


def goes_back(log: Log) -> Evidence | None:
    """Find a step at which the reward and another metric return to their values at the start, after both had moved away."""
    rewards = log.steps.reward.dropna()
    for place in range(4, len(rewards) - 2):
        moved = [
            name
            for name in ("reward", "held_out", "entropy", "response_tokens")
            if log.count(f"steps.{name}") >= 7 and _returns(log.steps[name].reindex(rewards.index), place)
        ]
        if "reward" in moved and len(moved) > 1:
            step = int(log.steps.step[rewards.index[place]])
            before, after = rewards.iloc[place - 3 : place].mean(), rewards.iloc[place : place + 3].mean()
            text = f"at step {step}, {' and '.join(moved)} return to their values of the first steps: "
            text += f"reward {first(rewards):.3f} at first, {before:.3f} before, {after:.3f} after"
            return Evidence(text, {"before": before, "after": after}, [step], (), place / len(rewards))
    return None


def _returns(values: pd.Series, place: int) -> bool:
    values = values.replace([np.inf, -np.inf], np.nan)
    start, before, after = first(values), values.iloc[place - 3 : place].mean(), values.iloc[place : place + 3].mean()
    steps = values.diff().dropna()
    noise = 1.4826 * float((steps - steps.median()).abs().median()) / np.sqrt(2)
    moved = abs(before - start)
    jump = abs(values.iloc[place] - values.iloc[place - 1])
    return moved > 5 * noise and moved > 0.15 * abs(start) and abs(after - start) < 0.4 * moved and jump > 0.5 * moved


def held_out_is_flat(log: Log) -> Evidence | None:
    held_out = log.steps.held_out.dropna()
    train, evaluated = change(log.steps.reward, 0.99), change(held_out, 0.99)
    start, end = float(held_out.iloc[0]), float(held_out.iloc[-1])
    falls = len(held_out) >= 5 and bool((held_out.diff().dropna() < 0).all()) and start - end > 0.1
    flat = len(held_out) >= 9 and evaluated[2] < 0.5 * train[0]  # three in each third
    if train[0] < 0.05 or not ((flat and train[1] > 0) or falls):
        return None
    seen = thirds("held-out", evaluated) if len(held_out) >= 6 else f"held-out {start:.3f} to {end:.3f}"
    text = f"{thirds('training reward', train)}, {seen} (99%)"
    return Evidence(text, {"train": train[0], "held_out": end - start}, (), (), 0.7)


def progress_is_noise(log: Log) -> Evidence | None:
    held_out = log.steps.held_out.dropna()
    difference, low, high = change(held_out)
    best = float(held_out.max() - held_out.iloc[0])
    if not (best > 0.02 and low <= 0 and difference < 0.5 * best):
        return None
    text = f"best held-out minus first: {best:+.3f}; {thirds('last third minus first third:', (difference, low, high))}"
    return Evidence(text, {"best": best, "difference": difference, "low": low, "high": high}, (), (), 0.3)


def held_out_never_changes(log: Log) -> Evidence | None:
    values = log.steps.held_out.dropna()
    if values.nunique() > 1 or values.iloc[0] in (0.0, 1.0):
        return None
    text = f"the held-out score is {values.iloc[0]:.4g} at all {len(values)} evaluations"
    return Evidence(text, {"score": float(values.iloc[0])}, log.steps.step[values.index].astype(int).tolist(), (), 0.4)


def stops_changing(log: Log) -> Evidence | None:
    for name in ("reward", "entropy", "grad_norm", "response_tokens", "kl_k3"):
        values = log.steps[name].dropna() if log.has(f"steps.{name}") else pd.Series(dtype=float)
        same = int((values.iloc[::-1] == values.iloc[-1]).cumprod().sum()) if len(values) else 0
        before = values.iloc[: len(values) - same]
        varied = before.nunique() >= max(4, 0.9 * len(before))
        if same >= max(5, len(values) // 5) and varied and values.iloc[-1] not in (0, 1, np.inf):
            steps = log.steps.step[values.index[-same:]].astype(int).tolist()
            text = f"{name} is exactly {values.iloc[-1]:.6g} at the last {same} of {len(values)} steps, and differed at each one before"
            return Evidence(text, {"steps": same}, steps, (), same / len(values))
    return None


def length_grows(log: Log) -> Evidence | None:
    values = log.steps.response_tokens
    rises = change(log.steps.reward, 0.99)[1] > 0
    cut = log.steps.truncated if log.has("steps.truncated") else pd.Series(dtype=float)
    if rises and not (change(cut)[1] > 0 and cut.tail(WINDOW).mean() > 0.2):  # longer reasoning that pays
        return None
    at_limit = f"{cut.tail(WINDOW).mean():.0%} of the rollouts end at the limit"
    text = f"{LENGTH}, and {at_limit if rises else 'the reward does not rise'}"
    return at_steps(log, values, values > 3 * first(values), text, cost=0.3)


def steps_become_slow(log: Log) -> Evidence | None:
    seconds, third = log.steps.step_s.dropna(), log.count("steps.step_s") // 3
    times = (seconds / log.steps.response_tokens).dropna() if log.has("steps.response_tokens") else seconds
    factor = float(times.tail(third).median() / times.head(third).median())
    grown = seconds.tail(third).median() > 2 * seconds.head(third).median()
    if not (factor > 3 and grown and times.tail(third).min() > times.head(third).max()):
        return None
    text = f"a step takes {factor:.1f} times as long per token in the last third of the run as in the first"
    return Evidence(text, {"factor": factor}, log.steps.step.tail(third).astype(int).tolist(), (), 0.3)


def gradient_spikes(log: Log) -> Evidence | None:
    values = log.steps.grad_norm
    logs = np.log(values.where(values > 0))
    spread = 1.4826 * float((logs - logs.median()).abs().median())  # standard deviation of normal data
    spike = logs - logs.median() > max(np.log(10), 6 * spread)
    return at_steps(log, values, spike, "gradient norm {last:.3g}, {median:.3g} usually", least=1, cost=0.4)


def gradient_grows(log: Log) -> Evidence | None:
    values = log.steps.grad_norm.dropna()
    third = len(values) // 3
    factor = float(values.tail(third).median() / max(values.head(third).median(), 1e-12))
    apart = values.tail(third).min() > values.head(third).max()
    if not (factor > 10 and apart and values.corr(log.steps.step, "spearman") > 0.7):
        return None
    text = f"the gradient norm is {values.tail(third).median():.3g} in the last third, {values.head(third).median():.3g} in the first"
    return Evidence(text, {"factor": factor}, log.steps.step.tail(third).astype(int).tolist(), (), 0.5)


def no_gradient(log: Log) -> Evidence | None:
    values = log.steps.grad_norm
    idle = log.steps.equal_share == 1 if log.has("steps.equal_share") else values.isna()
    zero = values == 0
    if (zero & ~idle).sum() < max(2, 0.2 * len(values)) and zero.sum() < max(4, 0.5 * len(values)):
        return None
    return at_steps(log, values, zero, "the gradient norm is 0", cost=float(zero.mean()))


def not_finite(log: Log) -> Evidence | None:
    if not log.not_finite:
        return None
    steps = sorted({step for own in log.not_finite.values() for step in own})
    text = f"{', '.join(log.not_finite)}: not a finite number at {len(steps)} of {log.steps.step.nunique()} steps"
    left = float((log.steps.step >= steps[0]).mean())
    return Evidence(text, {name: len(own) for name, own in log.not_finite.items()}, steps, (), max(0.5, left))


def impossible(log: Log) -> Evidence | None:
    found = {}
    for name, (low, high) in RANGES.items():
        if log.has(f"steps.{name}"):
            values = log.steps[name]
            outside = (values < low - 1e-6) | (values > high + 1e-6)
            if outside.sum() >= max(2, 0.05 * len(values)):
                found[name] = values[outside]
    if not found:
        return None
    ends = [(name, values.iloc[-1], log.steps.step[values.index[-1]]) for name, values in found.items()]
    text = "; ".join(f"{name} is {value:.4g} at step {step:.0f}" for name, value, step in ends)
    steps = sorted({int(step) for values in found.values() for step in log.steps.step[values.index]})
    return Evidence(text, {name: float(values.iloc[-1]) for name, values in found.items()}, steps, (), 0.6)


def learning_rate(log: Log) -> Evidence | None:
    late = log.steps.lr.dropna().tail(max(1, len(log.steps) // 2))
    value = float(late.max())
    if not 0 <= value < 1e-8:
        return None
    return Evidence(f"learning rate {value:.2g} over the last {len(late)} steps", {"lr": value}, (), (), 0.8)


def nothing_changes(log: Log) -> Evidence | None:
    rows = log.steps.dropna(subset=["grad_norm", "kl_k3"]).query("grad_norm > 0")
    still = (rows.kl_k3.abs() < 1e-6) & (rows.ratio_max.sub(1).abs() < 1e-2)
    if len(rows) < 4 or still.sum() < max(4, 0.8 * len(rows)):  # the first update can round the weights once
        return None
    rows = rows[still]
    largest = float(rows.kl_k3.abs().max())
    text = f"the policy moves by {largest:.1g} nats per token at most within an update, at {len(rows)} steps with a "
    text += f"gradient norm of {rows.grad_norm.median():.2g}"
    return Evidence(text, {"kl": largest}, rows.step.astype(int).tolist(), (), 1.0)


def _explodes(values: pd.Series) -> pd.Series:
    """Return where a metric is far above its values in the first half of the steps before.

    A KL that is proportional to step**4, as during a linear warm-up, grows by a factor of at most 18 in this time.
    """
    known = values.dropna().abs()
    smooth = (
        known[known.cummax() > 1e-5].rolling(3, min_periods=1).median()
    )  # after the warm-up of a critic, without spikes
    place = np.arange(len(smooth))
    earlier = smooth.cummax().to_numpy()[(place + 1) // 2]
    return ((smooth > 1) & (smooth > 32 * earlier) & (place >= 7)).reindex(values.index)


def mismatch(log: Log) -> Evidence | None:
    values = log.steps.mismatch
    text = "mean difference {last:.3g} nats per token, {first:.3g} in the first steps"
    high = values > (FP32_LIMIT if log.fp32 else LIMIT)
    return at_steps(log, values, high, text, least=1 if len(values) < 3 else 2, cost=0.8)


def mismatch_grows(log: Log) -> Evidence | None:
    values = log.steps.mismatch.dropna()
    start, last = float(values.head(2).mean()), float(values.tail(2).mean())
    rising = float((values.diff().dropna() > 0).mean())
    if not (last > 1e-3 and last > 5 * start and rising >= 0.75):
        return None
    text = f"mismatch {start:.3g} at the start, {last:.3g} at the end, rising in {rising:.0%} of the steps"
    return Evidence(text, {"first": start, "last": last}, log.steps.step.tail(2).astype(int).tolist(), (), 0.9)


def large_ratios(log: Log) -> Evidence | None:
    values = log.steps.ratio_max
    text = "the largest importance ratio is {last:.3g}"
    return at_steps(log, values, values > 1000, text, least=max(2, len(values) // 10), cost=0.4)


def sft_loss_is_flat(log: Log) -> Evidence | None:
    losses = log.steps.loss.dropna()
    difference, low, high = change(losses, 0.99)
    # Equivalence: the interval excludes that the loss has fallen by a tenth.
    if not log.supervised or not low > -0.1 * losses.iloc[0]:
        return None
    text = thirds("mean loss of the last third minus the first third:", (difference, low, high))
    numbers = {"first": float(losses.iloc[0]), "difference": difference, "low": low, "high": high}
    return Evidence(f"{text} over {len(losses)} values", numbers, (), (), 0.9)


def sft_loss_rises(log: Log) -> Evidence | None:
    losses = log.steps.loss.dropna()
    start, lowest = float(losses.iloc[0]), losses.cummin().shift()  # the lowest loss before each step
    steps = log.steps.step[losses.index[losses - lowest > 0.5 * start]].astype(int).tolist()  # batches differ by less
    if len(steps) < 2 or not log.supervised:
        return None
    place = int(np.nanargmax(losses - lowest))
    low, high = float(lowest.iloc[place]), float(losses.iloc[place])
    text = f"the loss is {start:.3g} at first, {low:.3g} later, and then {high:.3g}; it has risen at {len(steps)} of {len(losses)} steps"
    return Evidence(text, {"first": start, "low": low, "high": high}, steps, (), 0.9)


entropy_collapse = at("entropy", lambda v: (v < 0.15 * first(v)) & (v < 0.1), ENTROPY, cost=0.6)
entropy_explosion = at("entropy", lambda v: (v > 4 * first(v)) & (v > 0.5), ENTROPY, cost=0.6)
length_collapse = at("response_tokens", lambda v: v < 0.4 * first(v), LENGTH, cost=0.5)
kl_explodes = at("kl", _explodes, "KL to the reference model {last:.3g}, {first:.3g} in the first steps", cost=0.8)
large_updates = at("kl_k3", lambda v: v > 0.3, "the policy moves by {last:.2g} nats per token in one step", cost=0.8)
far_updates = at("update_kl", lambda v: v.abs() > 0.5, "the mean log-ratio within a step is {last:.2g}", cost=0.8)
clipping = at("clip_share", lambda v: v > 0.3, "{last:.0%} of the tokens are clipped", cost=0.4)
old_rollouts = at("staleness", lambda v: v > 4, "the rollouts are {last:.1f} updates old on average", cost=0.3)
