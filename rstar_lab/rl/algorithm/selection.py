"""Which rollouts of a step are trained on, and with what advantage. Local trainer and verl both ask here."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rstar_lab.rl.algorithm.objective import group_advantages
from rstar_lab.rl.algorithm.roc import released_tool_error_penalty, resample
from rstar_lab.rl.algorithm.shaping import has_void_turn, overlong_penalty
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes into the update, and how the rest was left out.

    equal_groups: groups whose kept rewards are equal; void: rollouts left out for a void turn.
    """

    trajectories: list[Trajectory]
    advantages: list[float]
    equal_groups: int
    void: int = 0

    @property
    def groups(self) -> int:
        return len({t.group_id for t in self.trajectories})


def select_rollouts(trajectories: Sequence[Trajectory], rl: RlSection, seed: int) -> Selection:
    """RoC in every group, then the groups left with equal rewards are dropped: they have no gradient.

    With roc: none all of a group stay, which is plain GRPO. Shaping changes advantages alone: what is right, and what has
    signal, is told by the reward itself.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.usable:
            groups[trajectory.group_id].append(trajectory)
    kept: list[Trajectory] = []
    equal = 0
    for group_id, group in groups.items():
        chosen = group
        if rl.roc != "none":
            indices = resample(
                [t.reward for t in group],
                [penalty(t, rl) for t in group],
                rl.group_size,
                rule=rl.roc,
                rng=np.random.default_rng(derive_seed(seed, "roc", group_id)),
            )
            chosen = [group[i] for i in indices]
        if len({t.reward for t in chosen}) < 2:
            equal += 1
        else:
            kept += chosen
    rewards = [shaped_reward(t, rl) for t in kept]
    advantages = group_advantages(rewards, [t.group_id for t in kept], normalise_std=rl.normalise_std).tolist()
    if not rl.drop_void_turns:
        return Selection(kept, advantages, equal)
    sound = [i for i, t in enumerate(kept) if not has_void_turn(turn.text for turn in t.turns)]
    return Selection([kept[i] for i in sound], [advantages[i] for i in sound], equal, len(kept) - len(sound))


def penalty(trajectory: Trajectory, rl: RlSection) -> float:
    """What RoC holds against a success. The released rule sees an error where a tool's text holds the word."""
    errors = trajectory.p_err
    if rl.roc == "released":
        errors = released_tool_error_penalty([call.response for call in trajectory.calls])
    parts = {"errors": errors, "format": trajectory.p_format}
    return sum(parts[part] for part in rl.roc_penalties)


def shaped_reward(trajectory: Trajectory, rl: RlSection) -> float:
    """The reward that advantages are made of."""
    if not rl.overlong_buffer:
        return trajectory.reward
    return trajectory.reward + overlong_penalty(
        len(trajectory.response_ids), rl.max_response_tokens, rl.overlong_buffer
    )


def solved_groups(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of the groups whose rollouts are all right; None without a usable rollout."""
    groups: dict[str, bool] = {}
    for t in trajectories:
        if t.usable:
            groups[t.group_id] = groups.get(t.group_id, True) and t.reward > 0
    return sum(groups.values()) / len(groups) if groups else None
