"""Run the SFT of a recipe with verl.

Conversations, token ids, masks, batches and learning rates equal the local trainer's. Forward, backward, update, checkpoints
and export are those of verl's SFT trainer on Ray.
"""

import asyncio
import os
import shutil
import time
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.pipeline import SFT_KEYS, base_folder, sft_data, sft_finished
from rstar_lab.rl.recipe import Recipe, SftConfig
from rstar_lab.rl.renderers.conversations import Example, encode
from rstar_lab.rl.resolved import ResolvedRecipe, resolve
from rstar_lab.rl.session import RunSession, open_run
from rstar_lab.rl.training.sft import finish, steps_of, summary
from rstar_lab.rl.training.stages import link_or_copy
from rstar_lab.rl.verl.adapters import export_merged
from rstar_lab.rl.verl.config import compose, sft_overrides
from rstar_lab.rl.verl.settings import checkpoint_folder
from rstar_lab.rl.verl.train import environment, own_ray
from rstar_lab.rl.verl.unsupported import check_architecture, unsupported_sft_options
from rstar_lab.runs.writer import RunWriter


def train_sft(recipe: Recipe, profile: Profile) -> None:
    """Run the SFT of a recipe from its last checkpoint. If it is finished, do nothing."""
    if recipe.sft is None:
        raise UserError("sft: the recipe has no sft section")
    resolved = resolve(recipe)
    with open_run(RunSession(resolved, Reporter()), "sft", "train", SFT_KEYS, extra={"trainer": "verl"}) as writer:
        if not sft_finished(recipe, writer.run_dir):
            fine_tune(resolved, recipe.sft, profile, writer)
        writer.finish("finished")


def fine_tune(resolved: ResolvedRecipe, sft: SftConfig, profile: Profile, writer: RunWriter) -> None:
    """Run SFT. Raises UserError for options that verl does not support, or if no conversation is left."""
    recipe = resolved.recipe
    if unsupported := unsupported_sft_options(recipe):
        raise UserError(f"verl does not support: {'; '.join(unsupported)}")
    started, run_dir = time.monotonic(), writer.run_dir
    base = base_folder(recipe, run_dir)
    examples, left_out = asyncio.run(read_examples(resolved, sft, base, run_dir))
    check_architecture(base)
    variables = environment(profile, run_dir)
    os.environ.update(variables)  # before verl is imported: it selects its platform then
    import ray
    from verl.utils.device import auto_set_device

    from rstar_lab.rl.verl.checkpoints import write_stored_dtype
    from rstar_lab.rl.verl.sft_trainer import Batches, RstarSft

    keys = sft_overrides(sft, profile, base, run_dir, steps_of(examples, sft))
    auto_set_device(config := compose(keys, "sft_trainer_engine"))
    gpus = profile.hardware.nodes * max(1, profile.hardware.gpus_per_node)
    ranks = max(1, gpus // profile.parallelism.sequence_parallel)
    with own_ray(profile):
        ray.init(runtime_env={"env_vars": variables})
        trainer = RstarSft(config, Batches(examples, sft, ranks), writer)
        trainer.fit()
        ray.shutdown()
    history = trainer.batches.history
    model = checkpoint_folder(run_dir, len(history)) / "huggingface"
    write_stored_dtype(model)
    if sft.lora is not None:
        export_merged(model, model.with_name("merged"), sft.lora)
        model = model.with_name("merged")
    result = summary(history, len(examples), left_out, time.monotonic() - started)
    finish(
        run_dir / "sft",
        lambda folder: shutil.copytree(model, folder, copy_function=link_or_copy),
        history,
        {"key": "verl", "result": result},
    )
    shutil.rmtree(run_dir / "verl")
    writer.finish("finished", result=result)


async def read_examples(
    resolved: ResolvedRecipe, sft: SftConfig, base: Path, run_dir: Path
) -> tuple[list[Example], int]:
    """Return the local trainer's examples, and how many conversations were dropped. base: folder of the base model."""
    async with RunSession.open(resolved, Reporter()) as session:
        dataset = await sft_data(session, run_dir)
    return encode(dataset, load_tokenizer(base), sft.max_tokens)
