"""Train and evaluate reasoning models that use a Python tool. Names are imported on first use: this package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar_lab.rl.algorithm.objective import group_advantages, policy_loss
    from rstar_lab.rl.algorithm.roc import format_penalty, resample, tool_error_penalty
    from rstar_lab.rl.algorithm.streams import Streams
    from rstar_lab.rl.evaluation import evaluate
    from rstar_lab.rl.loop import TrainingLoop
    from rstar_lab.rl.overrides import load_recipe
    from rstar_lab.rl.problems import Problem
    from rstar_lab.rl.recipe import Recipe
    from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results
    from rstar_lab.rl.training.rewind import rewind
    from rstar_lab.rl.training.trainer import Trainer
    from rstar_lab.rl.trajectory import Trajectory
    from rstar_lab.tool_calls import parse_tool_calls
    from rstar_lab.verify import verify

_HOMES = {
    "rstar_lab.rl.algorithm.objective": ("group_advantages", "policy_loss"),
    "rstar_lab.rl.algorithm.roc": ("format_penalty", "resample", "tool_error_penalty"),
    "rstar_lab.rl.algorithm.streams": ("Streams",),
    "rstar_lab.rl.renderers.formats": ("render_prompt", "render_tool_results"),
    "rstar_lab.tool_calls": ("parse_tool_calls",),
    "rstar_lab.rl.evaluation": ("evaluate",),
    "rstar_lab.rl.loop": ("TrainingLoop",),
    "rstar_lab.rl.overrides": ("load_recipe",),
    "rstar_lab.rl.problems": ("Problem",),
    "rstar_lab.rl.recipe": ("Recipe",),
    "rstar_lab.rl.training.rewind": ("rewind",),
    "rstar_lab.rl.training.trainer": ("Trainer",),
    "rstar_lab.rl.trajectory": ("Trajectory",),
    "rstar_lab.verify": ("verify",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Problem",
    "Recipe",
    "Streams",
    "Trainer",
    "TrainingLoop",
    "Trajectory",
    "evaluate",
    "format_penalty",
    "group_advantages",
    "load_recipe",
    "parse_tool_calls",
    "policy_loss",
    "render_prompt",
    "render_tool_results",
    "resample",
    "rewind",
    "tool_error_penalty",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
