"""Model folders: find the folder of a model, and check its files."""

from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.sources import check_files, get_model, is_named, read_config
from rstar_lab.rl.recipe import Recipe
from rstar_lab.runs.reader import RunReader


def model_folder(model: str, runs_dir: Path) -> Path:
    """Return the folder of `model`: a model folder, a run (its folder, or its id in `runs_dir`), whose last model is used,
    or a model by name (`sources.get_model`).

    Raises UserError if it is none of them, or if the run has no finished model.
    """
    if (Path(model) / "config.json").exists():
        return get_model(model)
    run = next((run for run in (runs_dir / model, Path(model)) if (run / "run.json").exists()), None)
    if run:
        if checkpoints := RunReader(run).checkpoints():
            return check_files(max(checkpoints.items())[1])
        if (run / "sft" / "model" / "config.json").exists():
            return check_files(run / "sft" / "model")
        kind = RunReader(run).info.get("kind")
        reason = "it has no checkpoint" if kind == "train" else f"it is of kind {kind}"
        raise UserError(f"run {run} has no model: {reason}; name a run that trained, or a model folder")
    if is_named(model):
        return get_model(model)
    raise UserError(
        f"model {model}: neither a folder with a config.json, nor a run in {runs_dir}, nor ORG/NAME on the Hugging Face Hub"
    )


def has_tied_embeddings(folder: Path) -> bool:
    """Return whether the LM head of the model shares the weights of the embeddings. Raises UserError for a broken config.json."""
    return bool(read_config(folder).get("tie_word_embeddings"))


def starting_model(recipe: Recipe, runs_dir: Path) -> Path:
    """Return the folder of the model that the recipe's RL starts from: the model after SFT, or without SFT the recipe's
    model. It may not exist yet."""
    if recipe.sft is None:
        return get_model(recipe.model).absolute() if is_named(recipe.model) else Path(recipe.model).absolute()
    return (runs_dir / f"{recipe.name}-sft" / "sft" / "model").absolute()
