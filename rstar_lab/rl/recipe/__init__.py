"""The recipe: a pydantic model of the YAML file that describes a run. Unknown keys are rejected."""

from rstar_lab.rl.recipe.correction import NoCorrection, RatioCorrection, UserCorrectionSection
from rstar_lab.rl.recipe.data import MixEntry, Problems, Synthetic
from rstar_lab.rl.recipe.environments import EnvironmentEntry
from rstar_lab.rl.recipe.limits import LimitsSection
from rstar_lab.rl.recipe.prompt import ModelPrompt, PaperPrompt, ReleasedPrompt
from rstar_lab.rl.recipe.recipe import Recipe
from rstar_lab.rl.recipe.rl import CODE_TOOLS, RlSection
from rstar_lab.rl.recipe.schedule import Async, OneStepOff, Sync
from rstar_lab.rl.recipe.services import EngineSection, EvaluateSection, SandboxSection
from rstar_lab.rl.recipe.sft import SftConfig, SftSection
from rstar_lab.rl.recipe.stages import DifficultyFilter, HandOff, Stage
from rstar_lab.rl.section import RecipeError, Section

__all__ = [
    "CODE_TOOLS", "Async", "DifficultyFilter", "EngineSection", "EnvironmentEntry", "EvaluateSection", "HandOff",
    "LimitsSection", "MixEntry", "ModelPrompt", "NoCorrection", "OneStepOff", "PaperPrompt",
    "Problems", "RatioCorrection", "Recipe", "RecipeError", "ReleasedPrompt", "RlSection", "SandboxSection",
    "Section", "SftConfig", "SftSection", "Stage", "Sync", "Synthetic", "UserCorrectionSection",
]  # fmt: skip
