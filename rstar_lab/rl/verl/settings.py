"""The settings of a run that the adapters read, stored in verl's configuration under the key `rstar`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rstar_lab.rl.environments.mixture import Mixture
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, Stage
from rstar_lab.rl.session import read_problems, read_stage_problems
from rstar_lab.rl.training.stages import difficulty_file, without_solved


@dataclass(frozen=True)
class Settings:
    """The settings of one stage of a run."""

    recipe: Recipe
    stage: Stage
    run: str
    runs_dir: Path
    first_step: int  # first step of the stage; the steps of a run are numbered from 1
    watchdog_s: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Settings":
        """Read the settings from verl's configuration."""
        return cls.of_node(config.rstar)

    @classmethod
    def of_node(cls, node: Any) -> "Settings":
        """Read the settings from the node that `as_config` wrote."""
        recipe = parse_recipe(json.loads(node["recipe"]))
        stage = next(stage for stage in recipe.stages if stage.name == node["stage"])
        return cls(recipe, stage, node["run"], Path(node["runs_dir"]), node["first_step"], node["watchdog_s"])

    def as_config(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump_json(),
            "stage": self.stage.name,
            "run": self.run,
            "runs_dir": str(self.runs_dir),
            "first_step": self.first_step,
            "watchdog_s": self.watchdog_s,
        }

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
    def rollouts_per_group(self) -> int:
        return self.rl.group_size * (1 if self.rl.method.roc.rule == "none" else self.rl.method.roc.oversample)

    @property
    def reads_texts(self) -> bool:
        """Whether the selection or a metric of the recipe reads texts or tokens of the rollouts."""
        return bool(self.rl.metrics) or any(method.reads_texts for method in self.rl.hooks)

    @cached_property
    def problems(self) -> Sequence[Problem]:
        """The problems of the stage, without evaluation problems. With `rl.environments`: a mixture of the
        problems of these environments."""
        held_out = [p for section in self.recipe.evaluate.sets.values() for p in read_problems(section)]
        problems = read_stage_problems(self.recipe, self.stage, held_out)
        if not self.overlong_file.exists():
            return problems
        overlong = set(json.loads(self.overlong_file.read_text()))
        left = [problem for problem in problems if problem.problem_id not in overlong]
        return problems.restricted(left) if isinstance(problems, Mixture) else left

    @property
    def overlong_file(self) -> Path:
        """The ids of the problems of the stage whose prompts are too long; `train.drop_overlong` writes it."""
        return self.run_dir / "overlong" / f"stage={self.stage.name}.json"

    @cached_property
    def pool(self) -> Sequence[Problem]:
        """The problems of the stage that its filter keeps. Raises UserError before the filter has run."""
        if self.stage.filter is None:
            return self.problems
        left = without_solved(self.problems, difficulty_file(self.run_dir, self.stage.name))
        return self.problems.restricted(left) if isinstance(self.problems, Mixture) else left

    async def open_sandbox(self) -> Any:
        """Start the sandbox of the recipe: embedded, or a client of the cluster's service."""
        from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient

        section = self.recipe.sandbox
        if section.url == "local":
            sandbox: Any = LocalSandbox(
                Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb),
                section.workers,
                isolation=section.isolation,
            )
        else:
            sandbox = SandboxClient(section.url)
        await sandbox.start()
        return sandbox
