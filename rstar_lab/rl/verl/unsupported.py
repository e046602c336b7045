"""What a recipe may ask of verl: everything but this. Asked before anything starts, so that no key is passed over in silence."""

from rstar_lab.errors import UserError
from rstar_lab.rl.recipe import Recipe


def refusals(recipe: Recipe) -> list[str]:
    """Keys that verl cannot honour, each with its stage and the way out."""
    found = []
    if recipe.evaluate.every:
        found.append("evaluate.every: the verl trainer does not evaluate during training; evaluate its stage models")
    for stage in recipe.stages:
        rl = recipe.settings(stage)
        if rl.fp32_head:
            found.append(f"stages.{stage.name}: fp32_head: verl has none; precision: fp32 keeps everything in fp32")
        if rl.step_time_s is not None:
            found.append(
                f"stages.{stage.name}: step_time_s: verl's step ends with its last rollout; time_limit_s cuts each"
            )
        if rl.kl_coefficient and rl.aggregation != "token-mean":
            found.append(
                f"stages.{stage.name}: kl_coefficient with aggregation {rl.aggregation}: verl divides the KL by rows that "
                "RoC has dropped; aggregation: token-mean has none of this"
            )
        if rl.problems_per_step % rl.mini_batches:
            found.append(
                f"stages.{stage.name}: mini_batches: {rl.problems_per_step} problems_per_step cannot be cut into "
                f"{rl.mini_batches} equal parts, which verl asks for"
            )
    return found


def sft_refusals(recipe: Recipe) -> list[str]:
    """The same of the recipe's SFT."""
    sft, found = recipe.sft, []
    if sft is not None and sft.optimizer != "adamw":
        found.append(f"sft.optimizer: {sft.optimizer}: verl has AdamW alone")
    if sft is not None and sft.schedule != "cosine":
        found.append(f"sft.schedule: {sft.schedule}: verl has cosine")
    return [f"{one}; `rstar-lab sft` makes the model without verl" for one in found]


def check(recipe: Recipe) -> None:
    """Raises UserError with what verl cannot honour."""
    if not recipe.stages:
        raise UserError("stages: the recipe has none to train")
    if found := refusals(recipe):
        raise UserError(f"not under verl: {'; '.join(found)}")
