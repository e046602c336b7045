"""Selection of the rollouts of a step that are trained on, and their advantages. Used by the local trainer and by verl."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rstar_lab.rl.algorithm.advantages import group_advantages, tool_budget_advantages
from rstar_lab.rl.algorithm.config import SelectionConfig
from rstar_lab.rl.algorithm.roc import released_tool_error_penalty, resample, rewards_equal
from rstar_lab.rl.algorithm.shaping import overlong_penalty
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts of a step that are trained on.

    trajectories, advantages: of equal length, in the order of their groups. equal_groups: number of groups dropped
    because their kept rewards were equal. void, control_tokens: number of rollouts dropped by `drop_void_turns` and by
    `drop_control_tokens`. teacher_log_probs: the teacher's log-probs, (response length,) per trajectory, NaN where the
    teacher returned none; None without a teacher.
    """

    trajectories: list[Trajectory]
    advantages: list[float]
    equal_groups: int
    void: int = 0
    control_tokens: int = 0
    teacher_log_probs: list[np.ndarray] | None = None

    @property
    def groups(self) -> int:
        return len({t.group_id for t in self.trajectories})

    @property
    def metrics(self) -> dict[str, int]:
        counts = {"kept": len(self.trajectories), "equal_groups": self.equal_groups, "void": self.void}
        return counts | {"control_tokens_dropped": self.control_tokens}


def select_rollouts(trajectories: Sequence[Trajectory], config: SelectionConfig, seed: int) -> Selection:
    """Resample every group by the configured rule and drop the groups whose remaining rewards are all equal.

    Rollouts that ended because an engine or an environment failed are left out. Reward shaping changes the advantages
    only: resampling and the test for equal rewards use the unshaped reward. seed: seed of the step.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.usable:
            groups[trajectory.group_id].append(trajectory)
    kept: list[Trajectory] = []
    equal_groups = 0
    for group_id, group in groups.items():
        chosen = group
        if config.rule != "none":
            indices = resample(
                [t.reward for t in group],
                [rollout_penalty(t, config) for t in group],
                config.group_size,
                rule=config.rule,
                min_positive=config.min_positive,
                min_negative=config.min_negative,
                rng=np.random.default_rng(derive_seed(seed, "roc", group_id)),
            )
            chosen = [group[i] for i in indices]
        if not config.keep_equal and rewards_equal([t.reward for t in chosen]):
            equal_groups += 1
        else:
            kept += chosen
    rewards = [shaped_reward(t, config) for t in kept]
    groups_of = [t.group_id for t in kept]
    if config.tool_budget:
        rates = {name: float(np.mean([t.reward > 0 for t in group])) for name, group in groups.items()}
        advantages = tool_budget_advantages(
            rewards,
            groups_of,
            [len(t.calls) for t in kept],
            [rates[name] >= config.tool_budget_from for name in groups_of],
            weight=config.tool_budget,
            max_calls=config.max_turns,
            normalise_std=config.normalise_std,
        ).tolist()
    elif config.advantage is None:
        advantages = group_advantages(rewards, groups_of, normalise_std=config.normalise_std).tolist()
    else:
        advantages = list(config.advantage(np.asarray(rewards, dtype=float), kept)) if kept else []
    # Rollouts are dropped after the advantages are computed, so that the baseline is that of the whole group.
    void = {i for i, t in enumerate(kept) if config.drop_void_turns and any(turn.void for turn in t.turns)}
    control = {
        i for i, t in enumerate(kept) if config.drop_control_tokens and any(turn.control_token for turn in t.turns)
    } - void
    valid = [i for i in range(len(kept)) if i not in void | control]
    return Selection([kept[i] for i in valid], [advantages[i] for i in valid], equal_groups, len(void), len(control))


def rollout_penalty(trajectory: Trajectory, config: SelectionConfig) -> float:
    """Return the penalty by which RoC ranks a correct rollout. The rule `released` computes p_err from the tool responses
    that contain the word "error", not from the outcomes of the calls."""
    errors = trajectory.p_err
    if config.rule == "released":
        errors = released_tool_error_penalty([call.response for call in trajectory.calls])
    terms = {"errors": errors, "format": trajectory.p_format}
    penalties = config.environment_penalties.get(trajectory.environment, config.penalties)
    return sum(term(trajectory) if callable(term) else terms[term] for term in penalties)


def shaped_reward(trajectory: Trajectory, config: SelectionConfig) -> float:
    """Return the reward that advantages are computed from."""
    if not config.overlong_buffer:
        return trajectory.reward
    return trajectory.reward + overlong_penalty(
        len(trajectory.response_ids), config.max_response_tokens, config.overlong_buffer
    )


def solved_groups(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of groups whose rollouts are all correct; None without a usable rollout."""
    groups: dict[str, bool] = {}
    for t in trajectories:
        if t.usable:
            groups[t.group_id] = groups.get(t.group_id, True) and t.reward > 0
    return sum(groups.values()) / len(groups) if groups else None


def problems_to_retire(trajectories: Sequence[Trajectory], threshold: float) -> list[str]:
    """Return the ids of the problems whose share of correct rollouts in this step is at least `threshold`."""
    correct: dict[str, list[bool]] = defaultdict(list)
    for t in trajectories:
        if t.usable:
            correct[t.problem_id].append(t.reward > 0)
    return [name for name, values in correct.items() if sum(values) >= threshold * len(values)]
