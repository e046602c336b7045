"""The learning-rate schedule of a stage, equal to the local trainer's: a linear warm-up to the recipe's rate."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class StageSchedule(LambdaLR):
    """lr * min(1, (updates + 1) / warmup_steps). Learning rate and weight decay always come from the recipe, not from a checkpoint."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, **_: Any):
        super().__init__(optimizer, lambda updates: min(1.0, (updates + 1) / max(1, num_warmup_steps)))
        decay = [group["weight_decay"] for group in optimizer.param_groups]

        def keep_own(loaded: Optimizer) -> None:
            for group, base, own in zip(loaded.param_groups, self.base_lrs, decay, strict=True):
                group |= {"initial_lr": base, "weight_decay": own}
            self._apply()

        optimizer.register_load_state_dict_post_hook(keep_own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = own
        self._apply()

    def _apply(self) -> None:
        for group, base, of_update in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * of_update(self.last_epoch)


def use_stage_schedule() -> None:
    """Replace verl's constant schedule: verl has no registry for schedules, and its own one starts at 0 and continues the
    schedule of the previous stage."""
    from verl.utils import torch_functional

    torch_functional.get_constant_schedule_with_warmup = StageSchedule  # type: ignore[assignment]
