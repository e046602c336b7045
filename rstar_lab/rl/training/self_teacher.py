"""Self-distillation: the policy, with a successful rollout of the same group in its prompt, is the teacher of failed rollouts.

Source: SDPO (arXiv 2601.20802), which conditions on the successful rollouts of a batch where there is no other feedback. Here the
demonstration is chosen by RoC's penalty. As in `teacher`, log p_teacher - log p_policy of a token, times
`rl.self_distillation`, is added to the advantage of the token.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rstar_lab.rl.algorithm.config import SelectionConfig
from rstar_lab.rl.algorithm.selection import Selection, rollout_penalty
from rstar_lab.rl.trajectory import Trajectory

DEMONSTRATION = "{question}\n\nA correct solution of this problem:\n{solution}\n\nNow solve the problem again."


def demonstrations(
    failed: Sequence[Trajectory], rollouts: Sequence[Trajectory], config: SelectionConfig
) -> list[Trajectory | None]:
    """Return for each failed rollout the demonstration of its group, None if the group has none.

    It is the successful rollout without tool errors that has the lowest RoC penalty; of equal ones the shortest, then the first.
    rollouts: all rollouts of the step, including those that RoC dropped.
    """
    clean: dict[str, list[Trajectory]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.usable and rollout.reward > 0 and not rollout.errors_and_calls[0]:
            clean[rollout.group_id].append(rollout)
    best = {
        group: min(found, key=lambda t: (rollout_penalty(t, config), len(t.response_ids), t.sample))
        for group, found in clean.items()
    }
    return [best.get(rollout.group_id) for rollout in failed]


def with_self_teacher(
    selection: Selection,
    rollouts: Sequence[Trajectory],
    config: SelectionConfig,
    *,
    prompt_ids: Callable[[Trajectory, str], list[int]],
    score: Callable[[list[Trajectory]], list[np.ndarray]],
    max_tokens: int,
) -> Selection:
    """Return the selection with `teacher_log_probs`: NaN for successful rollouts and for those without a demonstration.

    prompt_ids: (rollout, first user message) -> prompt. score: rollouts -> log-probs of their responses under the policy, NaN
    outside of the loss mask. max_tokens: context of the model; a rollout that does not fit gets NaN.
    """
    failed = [t for t in selection.trajectories if t.reward <= 0]
    conditioned: dict[str, Trajectory] = {}
    for rollout, shown in zip(failed, demonstrations(failed, rollouts, config), strict=True):
        if shown is None:
            continue
        ids = prompt_ids(rollout, DEMONSTRATION.format(question=rollout.question, solution=shown.text))
        if len(ids) + len(rollout.response_ids) <= max_tokens:
            conditioned[rollout.traj_id] = replace(rollout, prompt_ids=ids)
    log_probs = dict(zip(conditioned, score([*conditioned.values()]) if conditioned else [], strict=True))
    return replace(
        selection,
        teacher_log_probs=[
            np.asarray(log_probs.get(t.traj_id, np.full(len(t.response_ids), np.nan)), dtype=np.float32)
            for t in selection.trajectories
        ],
    )
