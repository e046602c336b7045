"""Model folders: find the folder of a model, and check its files."""

import json
import re
from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.rl.recipe import Recipe
from rstar_lab.runs.reader import RunReader


def model_folder(model: str, runs_dir: Path) -> Path:
    """Return the folder of `model`: a model folder, or a run (its folder, or its id in `runs_dir`), whose last model is used.

    Raises UserError if it is neither, or if the run has no finished model.
    """
    if (Path(model) / "config.json").exists():
        return Path(model)
    run = next((run for run in (runs_dir / model, Path(model)) if (run / "run.json").exists()), None)
    if run:
        if checkpoints := RunReader(run).checkpoints():
            return max(checkpoints.items())[1]
        if (run / "sft" / "model" / "config.json").exists():
            return run / "sft" / "model"
        raise UserError(f"run {run} has no finished model yet")
    raise UserError(f"model {model}: neither a folder with a config.json nor a run in {runs_dir}{download_hint(model)}")


def download_hint(model: str | Path) -> str:
    """Return how to download a model, for an error, if the text looks like its name on the Hugging Face Hub."""
    name = str(model)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return ""
    return f"; to download it: `hf download {name} --local-dir models/{name.partition('/')[2]}`, then give that folder"


def check_readable(folder: Path) -> None:
    """Raise PermissionError for the first file of a model folder that cannot be read.

    transformers and vLLM would report such a file as missing, or try again.
    """
    for path in sorted(folder.iterdir()):
        if path.is_file():
            path.open("rb").close()


def has_tied_embeddings(folder: Path) -> bool:
    """Return whether the LM head of the model shares the weights of the embeddings."""
    return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"))


def starting_model(recipe: Recipe, runs_dir: Path) -> Path:
    """Return the folder of the model that the recipe's RL starts from: the model after SFT, or without SFT the recipe's
    model. It may not exist yet."""
    if recipe.sft is None:
        return Path(recipe.model).absolute()
    return (runs_dir / f"{recipe.name}-sft" / "sft" / "model").absolute()
