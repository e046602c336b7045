"""Restart a run from a stored checkpoint, with changes to its recipe: `rewind(run, step, into)`."""

import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from rstar_lab.common.errors import UserError, file_errors
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.runs.files import atomic_write, check_no_links, name_disk_errors, write_json
from rstar_lab.runs.lock import is_locked
from rstar_lab.runs.reader import RunReader

RECIPE_FILE = "recipe.yaml"


def rewind(
    run: str | Path,
    step: int,
    into: str | Path,
    overrides: Mapping[str, Any] | None = None,
    functions: Collection[str] = (),
) -> Path:
    """Prepare a run that continues `run` from its newest checkpoint before `step`.

    `rstar-lab train RECIPE` then repeats the steps after the checkpoint. Without overrides they have the same rollouts, metrics and weights
    as the original ones, bit for bit, if the run is reproducible (`rl.schedule.lockstep`, same machine).

    Args:
        run: Folder of a training run.
        step: First step to repeat, or a later one.
        into: New folder of runs. The run is copied there under its own id, because random draws depend on the id.
            Its SFT run is copied too.
        overrides: Values by dotted key, such as `{"rl.method.roc.rule": "none"}`; `name`, `runs` and `seed` cannot be changed.
        functions: Functions, commands and addresses that the recipe of the run may name, because you know them.

    Returns:
        Path of the recipe.

    Raises:
        UserError: If no checkpoint before `step` is stored, if the run is being written, if `into` exists, and if the recipe of
            the run names functions, commands or addresses that are not in `functions`.
    """
    source, target = RunReader(run), Path(into).absolute()
    info = source.info
    if info["kind"] != "train" or not source.run_id.endswith("-rl"):
        raise UserError(f"{source.run_dir} is not an RL run; rewind needs the folder of one: runs/NAME-rl")
    if is_locked(source.run_dir):
        raise UserError(f"{source.run_dir} is being written; stop it, or wait until it ends, and rewind it then")
    stored = source.checkpoints()
    before = [number for number in stored if number < step]
    if not before:
        there = ", ".join(map(str, stored)) or "none"
        raise UserError(
            f"run {source.run_id} has no checkpoint before step {step} (stored: {there}); choose a later step, or train again"
            " with larger rl.keep_checkpoints"
        )
    if fixed := {"name", "runs", "seed"} & set(overrides or {}):
        raise UserError(f"rewind cannot change {sorted(fixed)[0]}: random draws depend on it")
    if target.exists():
        raise UserError(f"{target} exists; choose a new folder for the rewound run")
    stored_recipe = info["recipe"].accept(f"run {source.run_id}", functions)
    name = source.run_id.removesuffix("-rl")
    with file_errors(source.run_dir):
        check_no_links(source.run_dir)  # a copy has the files that they name
    with ExitStack() as stack, name_disk_errors(target, part=target):
        stack.callback(shutil.rmtree, target, ignore_errors=True)
        target.mkdir(parents=True)
        _copy_run(source, target / source.run_id, before[-1])
        sft = source.run_dir.parent / f"{name}-sft"
        if sft.is_dir():
            shutil.copytree(sft, target / sft.name, symlinks=True, ignore=shutil.ignore_patterns(".lock"))
        path = target / RECIPE_FILE
        _write_recipe(path, stored_recipe | {"runs": str(target)})
        recipe = load_recipe(path, overrides).model_dump(mode="json")
        _write_recipe(path, recipe)
        # The recipe is the one of the copy, so that the run accepts the changed keys.
        write_json(target / source.run_id / "run.json", {**info, "recipe": recipe, "status": "stopped"})
        stack.pop_all()
    return path


def _copy_run(source: RunReader, target: Path, checkpoint: int) -> None:
    """Copy a run without its other checkpoints. Training removes the steps after the checkpoint. Links are copied as links."""

    def skip(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == source.run_dir / "checkpoints":
            return set(names) - {source.checkpoints()[checkpoint].name}
        return {".lock"} & set(names)

    shutil.copytree(source.run_dir, target, symlinks=True, ignore=skip)


def _write_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(yaml.safe_dump(dict(recipe), sort_keys=False).encode())
