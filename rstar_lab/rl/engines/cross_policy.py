"""Engine slots that send some turns to a second engine with an older policy; see `methods.cross_policy`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rstar_lab.rl.engine import Completion, Engine, EngineSlot, Sampling
from rstar_lab.rl.scheduling.slots import PlannedRollout
from rstar_lab.rl.seeds import derive_seed

OLDER = -1  # policy version of the tokens of the older engine: before every version of the run
Slots = Callable[[int, PlannedRollout], EngineSlot]


def cross_policy_slots(slots: Slots, older: Engine, share: float) -> Slots:
    """Return slots that send each turn to `older` with probability `share`. The choice depends only on the seed of the turn."""
    return lambda index, rollout: CrossPolicySlot(slots(index, rollout), older, share)


class CrossPolicySlot:
    """The slot of one rollout."""

    def __init__(self, slot: EngineSlot, older: Engine, share: float):
        self.slot, self.older, self.share = slot, older, share
        self.on_turn, self.leave, self.interrupt = slot.on_turn, slot.leave, slot.interrupt

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion from the older or the newest policy."""
        if np.random.default_rng(derive_seed(sampling.seed or 0, "policy")).random() >= self.share:
            return await self.slot.generate(prompt_ids, sampling)
        completion = await self.older.generate(prompt_ids, sampling)
        return replace(completion, policy_version=OLDER, versions=())
