"""Read from the newest checkpoint how far a run under verl has come, and what is left to do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.stages import stage_end_reason, stage_model
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.runs.reader import RunReader


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return verl's folder for the checkpoint of a step."""
    return run_dir / "verl" / f"global_step_{step}"


def checkpointed(run_dir: Path) -> int:
    """Return the step of verl's newest complete checkpoint, or 0."""
    path = run_dir / "verl" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def saved_state(run_dir: Path) -> TrainerState:
    """Return the position in the stages and in the data at the newest checkpoint."""
    step = checkpointed(run_dir)
    return TrainerState.read(checkpoint_folder(run_dir, step)) if step else TrainerState()


def stage_lines(run_dir: Path, stage: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a stage, up to the newest checkpoint."""
    if not (run_dir / "run.json").exists():
        return []
    last = checkpointed(run_dir)
    return [line for line in RunReader(run_dir).metrics() if line["stage"] == stage and line["step"] <= last]


def stage_has_ended(settings: Settings, lines: Sequence[Mapping[str, Any]], retired: Sequence[str]) -> bool:
    """Return whether a stage with these metrics is finished."""
    if stage_end_reason(settings.stage, lines) is not None:
        return True
    retired_ids = set(retired)
    return bool(lines) and bool(retired_ids) and all(problem.problem_id in retired_ids for problem in settings.pool)


def stages_of(recipe: Recipe, runs_dir: Path, watchdog_s: float | None = None) -> list[Settings]:
    """Return the settings of every stage, with the number of its first step.

    A finished stage counts its actual steps, an unfinished stage its maximum.
    """
    settings_of_stages, first = list[Settings](), 1
    for stage in recipe.stages:
        settings = Settings(recipe, stage, f"{recipe.name}-rl", runs_dir, first, watchdog_s)
        lines = stage_lines(settings.run_dir, stage.name)
        first += (
            len(lines)
            if lines and stage_has_ended(settings, lines, saved_state(settings.run_dir).retired)
            else stage.steps
        )
        settings_of_stages.append(settings)
    return settings_of_stages


def has_steps_left(settings: Settings) -> bool:
    """Return whether a stage has steps left."""
    lines = stage_lines(settings.run_dir, settings.stage.name)
    return not stage_has_ended(settings, lines, saved_state(settings.run_dir).retired)


def model_before(settings: Settings, start: Path) -> Path:
    """Return the model at the start of a stage: of the previous stage, or `start`. It is also the reference of the KL term.

    With `rl.lora` it is `start` for all stages: the adapters are loaded from verl's checkpoint.
    """
    if settings.number == 0 or settings.rl.lora is not None:
        return start
    kept = stage_model(settings.run_dir, settings.recipe.stages[settings.number - 1].name)
    if kept.exists():
        return kept
    # The run was killed between verl's checkpoint and the copy of its model.
    return checkpoint_folder(settings.run_dir, settings.first_step - 1) / "actor" / "huggingface"
