"""The settings of a run that the adapters read, stored in verl's configuration under the key `rstar`, and how far the run has come."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rstar_lab.rl.environments.mixture import restricted
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.resolved import ResolvedRecipe, resolve
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.stages import difficulty_file, stage_end_reason, stage_model, without_solved
from rstar_lab.runs.reader import RunReader
from rstar_lab.untrusted.files import read_json


@dataclass(frozen=True)
class Settings:
    """The settings of one stage of a run."""

    recipe: Recipe
    stage: Stage
    run: str
    runs_dir: Path
    first_step: int  # first step of the stage; the steps of a run are numbered from 1
    watchdog_s: float | None = None
    base: bool = False  # evaluate the model before SFT instead of training

    @classmethod
    def of(cls, node: Any) -> "Settings":
        """Read the settings from the node `rstar` of verl's configuration, which `as_config` wrote."""
        recipe = parse_recipe(json.loads(node["recipe"]))
        stage = next(stage for stage in recipe.stages if stage.name == node["stage"])
        return cls(**{**node, "recipe": recipe, "stage": stage, "runs_dir": Path(node["runs_dir"])})

    def as_config(self) -> dict[str, Any]:
        names = {"recipe": self.recipe.model_dump_json(), "stage": self.stage.name, "runs_dir": str(self.runs_dir)}
        return names | {name: getattr(self, name) for name in ("run", "first_step", "watchdog_s", "base")}

    @cached_property
    def rl(self) -> RlSection:
        return self.recipe.settings(self.stage)

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.run

    @property
    def number(self) -> int:
        """Index of the stage, from 0."""
        return [stage.name for stage in self.recipe.stages].index(self.stage.name)

    @property
    def is_last(self) -> bool:
        return self.stage.name == self.recipe.stages[-1].name

    @property
    def reads_texts(self) -> bool:
        """Whether the selection or a metric of the recipe reads texts or tokens of the rollouts."""
        return bool(self.rl.metrics) or any(method.reads_texts for method in self.rl.hooks)

    @cached_property
    def resolved(self) -> ResolvedRecipe:
        """The recipe with the problems of this stage."""
        return resolve(self.recipe, stages=[self.stage])

    @cached_property
    def problems(self) -> Sequence[Problem]:
        """The problems of the stage, without evaluation problems. With `rl.environments`: a mixture of the
        problems of these environments."""
        problems = self.resolved.problems[self.stage.name]
        if not self.overlong_file.exists():
            return problems
        overlong = set(read_json(self.overlong_file, list[str]))
        return restricted(problems, [problem for problem in problems if problem.problem_id not in overlong])

    @property
    def overlong_file(self) -> Path:
        """The ids of the problems of the stage whose prompts are too long; `train.drop_overlong` writes it."""
        return self.run_dir / "overlong" / f"stage={self.stage.name}.json"

    @cached_property
    def pool(self) -> Sequence[Problem]:
        """The problems of the stage that its filter keeps. Raises UserError before the filter has run."""
        if self.stage.filter is None:
            return self.problems
        return restricted(self.problems, without_solved(self.problems, difficulty_file(self.run_dir, self.stage.name)))


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return verl's folder for the checkpoint of a step."""
    return run_dir / "verl" / f"global_step_{step}"


def checkpointed(run_dir: Path) -> int:
    """Return the step of verl's newest complete checkpoint, or 0."""
    path = run_dir / "verl" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


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
        lines, ended = saved_lines(settings)
        first += len(lines) if lines and ended else stage.steps
        settings_of_stages.append(settings)
    return settings_of_stages


def saved_lines(settings: Settings) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines of metrics.jsonl of a stage up to the newest checkpoint, and whether the stage has ended with them."""
    run_dir, last = settings.run_dir, checkpointed(settings.run_dir)
    lines = RunReader(run_dir).metrics() if (run_dir / "run.json").exists() else []
    lines = [line for line in lines if line["stage"] == settings.stage.name and line["step"] <= last]
    state = TrainerState.read(checkpoint_folder(run_dir, last)) if last else TrainerState()
    return lines, stage_has_ended(settings, lines, state.retired)


def has_steps_left(settings: Settings) -> bool:
    """Return whether a stage has steps left."""
    return not saved_lines(settings)[1]


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
