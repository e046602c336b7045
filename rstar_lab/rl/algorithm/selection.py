"""Selection of the rollouts of a step that are trained on, and their streams. Used by the local trainer and by verl."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from rstar_lab.rl.algorithm.hooks import Group, MethodHooks
from rstar_lab.rl.algorithm.roc import rewards_equal
from rstar_lab.rl.algorithm.streams import Streams, mean_advantage, trained_tokens
from rstar_lab.rl.seeds import group_seed
from rstar_lab.rl.trajectory import Trajectory, by_group


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts of a step that are trained on.

    Attributes:
        trajectories: in the order of their groups.
        streams: what each contributes to the loss.
        equal_groups: number of groups without a policy gradient, because their selected rewards are equal.
        groups: number of groups with one.
        left_out: class of every rollout of the step that the policy loss does not use, by traj_id:
            `MethodHooks.unselected` (a method did not select it), `equal_group`, `masked/<reason>` (left out by a method, or by
            a failure of the infrastructure), `failed/<reason>` (not usable).
        outside: rollouts of the groups that a method left out after the advantages were computed, with their streams: their
            rewards belong to the baselines of the others.
        measured: log-probs and entropies of the rollouts under the weights before the update, if a method has computed
            them: a pair of lists with an array (response length,) per rollout, NaN outside of the loss mask.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    streams: list[Streams] = field(default_factory=list)
    equal_groups: int = 0
    groups: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    outside: list[tuple[Trajectory, Streams]] = field(default_factory=list)
    measured: tuple[list[np.ndarray], list[np.ndarray]] | None = None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> "Selection":
        """Return rollouts with one advantage each."""
        streams = [Streams(float(advantage)) for advantage in advantages]
        return cls([*trajectories], streams, groups=len({t.group_id for t in trajectories}))

    @classmethod
    def chosen(
        cls, trajectories: Sequence[Trajectory], chosen: Sequence[Trajectory], streams: Sequence[Streams]
    ) -> "Selection":
        """Return rollouts that someone else has chosen and scored among all rollouts of a step.

        A group has no policy gradient if its rewards are equal and no chosen rollout has an advantage.
        """
        advantages = dict(zip((t.traj_id for t in chosen), streams, strict=True))
        groups = by_group(t for t in trajectories if t.usable)
        left_out = {t.traj_id: f"failed/{t.stop_reason}" for t in trajectories if not t.usable}
        equal = 0
        for group in groups.values():
            kept = [t for t in group if t.traj_id in advantages]
            pushed = any(np.any(np.asarray(advantages[t.traj_id].advantage_T)) for t in kept)
            is_equal = not pushed and rewards_equal([t.reward for t in kept or group])
            equal += is_equal
            left_out |= {t.traj_id: MethodHooks.unselected for t in group if t.traj_id not in advantages}
            if is_equal:
                left_out |= {t.traj_id: "equal_group" for t in kept or group}
        return cls([*chosen], [*streams], equal, len(groups) - equal, left_out)

    @property
    def advantages(self) -> list[float]:
        """The advantage of each rollout: the mean over its trained tokens."""
        return [mean_advantage(t, stream) for t, stream in zip(self.trajectories, self.streams, strict=True)]

    def add(self, streams: Sequence[Streams]) -> "Selection":
        """Return the selection with further streams, one per rollout; see `Streams.plus`."""
        return replace(self, streams=[stream.plus(more) for stream, more in zip(self.streams, streams, strict=True)])


def select_rollouts(
    trajectories: Sequence[Trajectory], methods: Sequence[MethodHooks], seed: int, *, mask_failures: bool = False
) -> Selection:
    """Select and score the rollouts of a step with the hooks of the methods, in their order.

    Rollouts that ended because an engine or an environment failed are left out, and with `mask_failures` those with a tool
    call that failed through no fault of the model. Selection and the test for equal rewards use the unshaped reward. seed:
    seed of the step.
    """
    generated: dict[str, list[Trajectory]] = defaultdict(list)
    left_out: dict[str, str] = {}
    for trajectory in trajectories:
        if not trajectory.usable:
            left_out[trajectory.traj_id] = f"failed/{trajectory.stop_reason}"
        elif mask_failures and trajectory.infrastructure_failure is not None:
            left_out[trajectory.traj_id] = f"masked/{trajectory.infrastructure_failure}"
        else:
            generated[trajectory.group_id].append(trajectory)
    for_equal = {method.equal_groups for method in methods}
    groups: list[Group] = []
    policy_groups: list[bool] = []  # whether the group is in the policy loss
    equal_groups = 0
    for group_id, group in generated.items():
        chosen = group
        for method in methods:
            before = chosen
            chosen = method.select(chosen, np.random.default_rng(group_seed(seed, group_id)))
            left_out |= dict.fromkeys({t.traj_id for t in before} - {t.traj_id for t in chosen}, method.unselected)
        names = {t.traj_id for t in chosen}
        equal = rewards_equal([t.reward for t in chosen]) and "train" not in for_equal
        equal_groups += equal
        if equal:
            left_out |= dict.fromkeys(names, "equal_group")
        if equal and "cross_entropy" not in for_equal:
            continue
        rewards = [t.reward + sum(method.shape_reward(t) for method in methods) for t in chosen]
        groups.append(Group(chosen, np.asarray(rewards, dtype=np.float64), group))
        policy_groups.append(not equal)
    streams = [[Streams()] * len(group.rollouts) for group in groups]
    with_policy = [i for i, trained in enumerate(policy_groups) if trained]
    for method in methods:
        scored = method.score([groups[i] for i in with_policy], [streams[i] for i in with_policy])
        for i, stream in zip(with_policy, scored, strict=True):
            streams[i] = stream
    for i, trained in enumerate(policy_groups):
        if not trained:
            streams[i] = [Streams(loss_weight_T=0.0)] * len(groups[i].rollouts)
    # Rollouts are left out after the advantages are computed, so that the baseline is that of the whole group.
    kept: list[Trajectory] = []
    kept_streams: list[Streams] = []
    outside: list[tuple[Trajectory, Streams]] = []
    for chosen_group, scores in zip(groups, streams, strict=True):
        for rollout, score in zip(chosen_group.rollouts, scores, strict=True):
            left: Streams | None = score
            for method in methods:
                if left is not None and (left := method.score_rollout(rollout, left)) is None:
                    left_out[rollout.traj_id] = f"masked/{method.excluded.reason}"
                    outside.append((rollout, score))
            if left is not None:
                kept.append(rollout)
                kept_streams.append(left)
    trained_groups = {
        t.group_id for t, stream in zip(kept, kept_streams, strict=True) if np.any(stream.loss_weight_T != 0.0)
    }
    return Selection(kept, kept_streams, equal_groups, len(trained_groups), left_out, outside)


def cut_mini_batches(selection: Selection, parts: int) -> list[list[int]]:
    """Return the indices of the rollouts of each mini-batch, in order.

    The rollouts of the policy loss are cut in their order into equal parts, so that the policy loss does not depend on other
    terms. The others, which are in the cross-entropy only, fill up the smallest parts.
    """
    tokens = trained_tokens(selection.trajectories, selection.streams)
    first = [i for i, count in enumerate(tokens) if count] or [*range(len(tokens))]
    bounds = np.linspace(0, len(first), min(parts, len(first)) + 1).astype(int)
    batches = [first[start:end] for start, end in pairwise(bounds)]
    for i in sorted(set(range(len(tokens))) - set(first)):
        min(batches, key=len).append(i)
    return [sorted(batch) for batch in batches]


def correct_by(trajectories: Sequence[Trajectory], name: Literal["group_id", "problem_id"]) -> dict[str, list[bool]]:
    """Return whether each usable rollout is correct, by its group or its problem."""
    found: dict[str, list[bool]] = defaultdict(list)
    for t in trajectories:
        if t.usable:
            found[getattr(t, name)].append(t.reward > 0)
    return found


def solved_groups(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of groups whose rollouts are all correct; None without a usable rollout."""
    groups = correct_by(trajectories, "group_id")
    return sum(map(all, groups.values())) / len(groups) if groups else None


def problems_to_retire(trajectories: Sequence[Trajectory], threshold: float) -> list[str]:
    """Return the ids of the problems whose share of correct rollouts in this step is at least `threshold`."""
    correct = correct_by(trajectories, "problem_id")
    return [name for name, values in correct.items() if sum(values) >= threshold * len(values)]
