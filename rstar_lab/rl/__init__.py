"""Train and evaluate reasoning models that use a Python tool. Names are imported on first use: this package loads no torch."""

# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

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

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
