"""Rules over rewards, groups and advantages."""

import re
from math import comb

import numpy as np
import pandas as pd

from rstar_lab.doctor.rule import SHOWN, WINDOW, Evidence, Log, among, change, examples, groups_where
from rstar_lab.doctor.rules.metrics import is_solved, thirds
from rstar_lab.runs.tables import UNUSABLE

CORRECTNESS = re.compile(r"(?i)acc|correct|verif|solv|pass|match")
NOT_SCORED = (*UNUSABLE, "error")  # stop reasons of rollouts that rightly have no reward


def all_right(log: Log) -> Evidence | None:
    late = log.last()
    best = late.reward.max()
    solved = log.has("steps.equal_share") and is_solved(log) and log.right[late.index].eq(True).mean() > 0.9
    if solved or not best > 0:
        return None
    return groups_where(late, late.groupby("group_id").reward.min() >= best, f"all rollouts have the reward {best:g}")


def all_wrong(log: Log) -> Evidence | None:
    late = log.last().dropna(subset=["reward"])
    rewards = late.groupby("group_id").reward
    wrong = (rewards.max() <= 0) & (rewards.min() == rewards.max())  # different rewards below 0 are a signal
    return groups_where(late, wrong, "no rollout is rewarded")


def advantages_have_the_wrong_sign(log: Log) -> Evidence | None:
    rows = log.complete_groups
    rows = rows[(rows.centred.abs() > 1e-6) & (rows.advantage.abs() > 1e-9)]
    wrong = np.sign(rows.centred) != np.sign(rows.advantage)
    what = "advantages have the opposite sign of reward minus group mean"
    return among(rows, wrong, what, above=0.3, least=50, cost=1.0)


def _deviation(rows: pd.DataFrame, key: str) -> pd.Series:
    """Return how far each advantage is from the linear function of the reward that fits its group best, as a share of the range of the
    advantages in the group. key: column of the group."""
    by = rows.groupby(key)
    reward = rows.reward - by.reward.transform("mean")
    advantage = rows.advantage - by.advantage.transform("mean")
    products, squares = (part.groupby(rows[key]).transform("sum") for part in (reward * advantage, reward**2))
    slope = (products / squares.replace(0, np.nan)).clip(lower=0)  # a negative slope is another fault, and no fit
    spread = by.advantage.transform("max") - by.advantage.transform("min")
    return (advantage - slope * reward).abs() / spread.replace(0, np.nan)


def advantages_do_not_follow(log: Log) -> Evidence | None:
    """Within a group, the advantage is a linear function of the reward: equal rewards have equal advantages."""
    rows = log.complete_groups
    if not log.plain_advantages or rows.empty:
        return None
    wrong = _deviation(rows, "group_id").fillna(1.0) > 0.1  # NaN: equal advantages for different rewards
    centred = rows.advantage - rows.groupby("group_id").advantage.transform("mean")
    correlation = float(np.corrcoef(rows.centred, centred)[0, 1]) if centred.std() > 0 else 0.0
    what = f"advantages are no linear function of the rewards of their group (correlation {correlation:.2f}, 1 is expected)"
    return among(rows, wrong, what, above=0.1, least=50, cost=0.9)


def baseline_is_wrong(log: Log) -> Evidence | None:
    """Advantages have the mean 0 in each group, or in each step if the baseline is that of the batch."""
    rows = log.complete_groups
    if not log.plain_advantages or rows.group_id.nunique() < 12:
        return None
    by = rows.groupby("group_id").advantage
    off = (by.mean() / (by.max() - by.min()).replace(0, np.nan)).abs() > 0.1
    known = log.rollouts.dropna(subset=["advantage"]).groupby("step").advantage
    shift = float((known.mean() / known.std().replace(0, np.nan)).mean())
    of_batch = abs(shift) < 0.25 and (_deviation(rows, "step") < 0.1).mean() > 0.9
    if off.mean() < 0.5 or of_batch:
        return None
    text = f"the mean advantage is not 0 in {off.mean():.0%} of {len(off)} groups with different rewards; over all rollouts, it is "
    text += f"{shift:+.2f} standard deviations"
    chosen = rows[rows.group_id.isin(off.index[off])]
    steps = sorted(chosen.step.unique().astype(int))
    return Evidence(text, {"share": float(off.mean()), "shift": shift}, steps, examples(chosen), 0.8)


def not_scored(log: Log) -> Evidence | None:
    rows = log.rollouts[~log.rollouts.stop_reason.isin(NOT_SCORED)]
    return among(rows, rows.reward.isna(), "rollouts have no score, though others have one", above=0.003)


def grader_fails_at_steps(log: Log) -> Evidence | None:
    """Find steps at which all rewards are equal, while groups before and after have different ones."""
    rewarded = log.rollouts.dropna(subset=["reward"])
    groups = rewarded.groupby(["step", "group_id"]).reward.agg(["min", "max"]).reset_index()
    steps = groups.groupby("step").agg(low=("min", "min"), high=("max", "max"), count=("min", "size"))
    constant = steps.low == steps.high
    runs = (constant != constant.shift()).cumsum()
    for _, run in steps[constant].groupby(runs[constant]):
        reward, count = float(run.low.iloc[0]), int(run["count"].sum())
        others = steps.index[~constant]
        before, after = others[others < run.index[0]], others[others > run.index[-1]]
        if not len(before) or not len(after):
            continue
        near = [groups[groups.step.isin(side)] for side in (before[-3:], after[:3])]
        # The share of groups before and after with this reward only, plus a half: that all groups have it is no chance.
        equal = max(((side["min"] == reward) & (side["max"] == reward)).sum() for side in near)
        if ((equal + 0.5) / (min(map(len, near)) + 1)) ** count < 1e-4:
            text = f"all {count} groups of {len(run)} steps have the reward {reward:g}; those before and after do not"
            chosen, at = log.rollouts[log.rollouts.step.isin(run.index)], run.index.astype(int).tolist()
            return Evidence(text, {"reward": reward}, at, examples(chosen), len(run) / len(steps))
    return None


def few_problems_return(log: Log) -> Evidence | None:
    """Find problems that are in each of the last steps of a stage, while many others with a signal do not return.

    A sampler that draws all problems alike, with or without replacement, does this with a probability of less than 1e-6.
    """
    rows = log.rollouts[log.rollouts.stage.isna() | (log.rollouts.stage == log.rollouts.stage.iloc[-1])]
    rows = rows[rows.groupby("problem_id").truth.transform("nunique") == 1]  # pictures can have the same question
    drawn = rows.groupby("step").problem_id.agg(frozenset)
    same = sorted(frozenset.intersection(*drawn.tail(WINDOW))) if len(drawn) else []
    steps = drawn.index[drawn.map(set(same).issubset)[::-1].cummin()[::-1]]
    before = set().union(*drawn.drop(steps))
    if not same or len(steps) < WINDOW or (before and not before > set(same)):  # a curriculum goes on with new problems
        return None
    late, rates = rows[rows.step.isin(steps)], log.rewarded[rows.index].groupby(rows.problem_id).mean()
    again, useful = late.groupby("problem_id").step.nunique().drop(same), rates.drop(same).between(0.2, 0.8)
    ways = comb(len(rates), len(same))
    chance = ways * (comb(drawn[steps].map(len).max(), len(same)) / ways) ** len(steps)
    if again.gt(2).any() or useful.sum() < 8 or useful.mean() < 0.3 or rates[same].min() < 0.1 or chance > 1e-6:
        return None
    what = f"rollouts of the last {len(steps)} steps are of the same {len(same)} of {len(rates)} problems, while {useful.sum()} others "
    what += "with right and wrong rollouts hardly return"
    return among(late, late.problem_id.isin(same), what, above=0.0)


def scale_changes(log: Log) -> Evidence | None:
    """Find a step from which on the few values that rewards have are others than before."""
    rewards = log.rollouts.dropna(subset=["reward"])
    sets = rewards.groupby("step").reward.agg(frozenset)
    if sets.map(len).max() > 3:
        return None
    for place in range(2, len(sets) - 1):
        before, after = frozenset().union(*sets.iloc[:place]), frozenset().union(*sets.iloc[place:])
        if min(len(before), len(after)) > 1 and len(before & after) < 2 and max(len(before), len(after)) <= 3:
            step = int(sets.index[place])
            named = [" or ".join(f"{value:g}" for value in sorted(values)) for values in (before, after)]
            text = f"rewards are {named[0]} before step {step}, and {named[1]} from then on"
            return Evidence(text, {}, [step], examples(rewards[rewards.step >= step]), 0.5)
    return None


def reward_is_length(log: Log) -> Evidence | None:
    rows = log.rollouts.dropna(subset=["reward", "response_tokens"])
    if rows.reward.nunique() <= 10:
        return None
    values = rows[["reward", "response_tokens"]].astype(float)
    centred = values - values.groupby(rows.group_id).transform("mean")
    if centred.std().min() < 1e-9:
        return None
    correlation = float(centred.reward.corr(centred.response_tokens))
    if abs(correlation) < 0.95:
        return None
    text = f"within groups, the correlation of reward and length is {correlation:+.2f} over {len(rows):,} rollouts"
    return Evidence(text, {"correlation": correlation}, (), examples(rows), 0.8)


def only_a_side_reward_rises(log: Log) -> Evidence | None:
    parts = log.reward_parts().groupby("step").mean(numeric_only=True)
    total = change(log.steps.reward, 0.99)
    if len(parts) < 9 or parts.shape[1] < 2 or not total[1] > 0:
        return None
    moves = {str(name): change(parts[name], 0.99) for name in parts}
    right = [name for name in moves if CORRECTNESS.search(name)]
    # A part for correctness must not have risen by half of what the reward did, with confidence.
    if len(right) != 1 or not moves[right[0]][2] < 0.5 * total[0]:
        return None
    text = f"{thirds('reward', total)}; its parts: " + ", ".join(thirds(name, move) for name, move in moves.items())
    return Evidence(text, {name: value for name, (value, _, _) in moves.items()}, (), (), 0.7)


def contradicts_accuracy(log: Log) -> Evidence | None:
    """Compare the rewards of rollouts that another column calls right with those of the others."""
    parts = log.reward_parts().merge(log.rollouts[["traj_id", "reward"]], on="traj_id")
    for name in parts.columns.difference(["traj_id", "step", "reward"]):
        known = parts.dropna(subset=[name, "reward"])
        right, wrong = (known.reward[known[name] == value] for value in (1, 0))
        is_flag = len(right) + len(wrong) == len(known) and min(len(right), len(wrong)) >= 20
        if not CORRECTNESS.search(str(name)) or not is_flag:
            continue
        if right.mean() <= wrong.mean() + 0.1 * float(known.reward.std()):
            text = f"the mean reward is {right.mean():.3f} where {name} is 1 ({len(right)} rollouts), {wrong.mean():.3f} where it is 0"
            numbers = {"right": float(right.mean()), "wrong": float(wrong.mean())}
            return Evidence(text, numbers, (), known.traj_id.head(SHOWN).tolist(), 0.9)
    return None
