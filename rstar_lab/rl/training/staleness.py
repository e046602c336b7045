"""Staleness of rollouts: which weights generated their tokens, what is too old, and whom the limit affects."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.training.group_stream import Batch
from rstar_lab.rl.trajectory import Trajectory


def stale_tokens(selection: Selection, version: int) -> float | None:
    """Return the share of the model's tokens in the selected rollouts that older weights than those of `version`
    generated."""
    own = [np.asarray(t.token_versions)[np.asarray(t.loss_mask, dtype=bool)] for t in selection.trajectories]
    return float(np.mean(np.concatenate(own) < version)) if own else None


def trim(selection: Selection, is_stale: Callable[[int], bool]) -> tuple[Selection, float | None]:
    """Take the tokens of stale versions out of the loss; rollouts without a token left are dropped.

    Returns the selection and the share of the model's tokens that were taken out (None without rollouts). The advantages
    stay those of the whole group.
    """
    kept: list[Trajectory] = []
    advantages: list[float] = []
    before = after = 0
    for trajectory, advantage in zip(selection.trajectories, selection.advantages, strict=True):
        versions = zip(trajectory.loss_mask, trajectory.token_versions, strict=True)
        mask = [own and not is_stale(version) for own, version in versions]
        before, after = before + trajectory.model_tokens, after + sum(mask)
        if any(mask):
            kept.append(replace(trajectory, loss_mask=mask))
            advantages.append(advantage)
    share = 1 - after / before if before else None
    return replace(selection, trajectories=kept, advantages=advantages), share


def staleness_metrics(batch: Batch) -> dict[str, float | int | None]:
    """Return the metrics of a batch of a GroupStream.

    staleness_mean, staleness_max: over the groups trained on. dropped_groups: groups that were too old; dropped_share: of
    the groups that were complete. dropped_share_long, dropped_share_hard: the same, of the longest and of the least solved
    third of them, which show whether the limit falls on slow and hard problems. buffer_age_s: mean time from the end of a
    group to its use.
    """
    groups = [*batch.groups, *batch.dropped]
    is_dropped = np.array([group in batch.dropped for group in groups], dtype=float)
    lengths = [_mean([len(t.response_ids) for t in group.trajectories]) for group in groups]
    unsolved = [_mean([t.reward <= 0 for t in group.trajectories]) for group in groups]
    third = -(-len(groups) // 3)

    def share_of_top(values: Sequence[float]) -> float | None:
        return float(is_dropped[np.argsort(values, kind="stable")[::-1][:third]].mean()) if groups else None

    return {
        "staleness_mean": _mean(batch.staleness) if batch.staleness else None,
        "staleness_max": max(batch.staleness, default=None),
        "dropped_groups": len(batch.dropped),
        "dropped_share": float(is_dropped.mean()) if groups else None,
        "dropped_share_long": share_of_top(lengths),
        "dropped_share_hard": share_of_top(unsolved),
        "buffer_age_s": _mean(batch.ages_s) if batch.ages_s else None,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
