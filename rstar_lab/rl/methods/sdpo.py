"""Self-distillation from a clean rollout of the group (after SDPO, arXiv 2601.20802).

A failed rollout is scored again with the text of a successful one of its group in the prompt. The advantage of each token
gets weight * (log p with it - log p without it). The paper's teacher is a moving average of the policy; here it is the
policy before the update.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from rstar_lab.rl.algorithm.hooks import ForwardPasses
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods.opd import Distillation
from rstar_lab.rl.trajectory import Trajectory, by_group

DEMONSTRATION = "{question}\n\nA correct solution of this problem:\n{solution}\n\nNow solve the problem again."


class Sdpo(Distillation):
    """Self-distillation (after SDPO, arXiv 2601.20802): scores a failed rollout again with a successful one of its group in the
    prompt (the lowest RoC penalty, no tool errors) and adds weight * (log p with it - log p) to the advantage of each token. One
    more forward pass. Local trainer only."""

    type: Literal["sdpo"] = "sdpo"
    """Name of the method."""

    not_with_verl: ClassVar[str] = "verl scores rollouts with the prompts that they had; leave it out"

    async def forward(self, selection: Selection, rollouts: Sequence[Trajectory], passes: ForwardPasses) -> Selection:
        """Successful rollouts, those without a demonstration, and those that do not fit the context have no reference."""
        failed = [t for t in selection.trajectories if t.reward <= 0]
        conditioned: dict[str, Trajectory] = {}
        for rollout, shown in zip(failed, self.demonstrations(failed, rollouts), strict=True):
            if shown is None:
                continue
            question = DEMONSTRATION.format(question=rollout.question, solution=shown.text)
            ids = passes.prompt_ids(rollout, question)
            if len(ids) + len(rollout.response_ids) <= passes.max_tokens:
                conditioned[rollout.traj_id] = replace(rollout, prompt_ids=ids)
        scored = await passes.log_probs([*conditioned.values()]) if conditioned else []
        log_probs = dict(zip(conditioned, scored, strict=True))
        return selection.add(
            [
                Streams(reference_log_prob_T=np.asarray(log_probs.get(t.traj_id, np.nan), dtype=np.float32))
                for t in selection.trajectories
            ]
        )

    def demonstrations(self, failed: Sequence[Trajectory], rollouts: Sequence[Trajectory]) -> list[Trajectory | None]:
        """Return for each failed rollout the demonstration of its group, None if the group has none.

        It is the successful rollout without tool errors that has the lowest RoC penalty; of equal ones the shortest, then
        the first. rollouts: all rollouts of the step, including those that RoC dropped.
        """
        roc = self._rl.method.roc.bound(self._rl)
        clean = by_group(t for t in rollouts if t.usable and t.reward > 0 and not t.errors_and_calls[0])
        best = {
            group: min(found, key=lambda t: (roc.penalty(t), len(t.response_ids), t.sample))
            for group, found in clean.items()
        }
        return [best.get(rollout.group_id) for rollout in failed]
