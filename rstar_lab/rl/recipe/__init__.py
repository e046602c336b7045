"""The recipe: a pydantic model of the YAML file that describes a run. Unknown keys are rejected."""

from rstar_lab.rl.recipe.data import MixEntry, Problems
from rstar_lab.rl.recipe.recipe import DifficultyFilter, HandOff, Recipe, Stage
from rstar_lab.rl.recipe.rl import CODE_TOOLS, EnvironmentEntry, LimitsSection, OneStepOff, RlSection
from rstar_lab.rl.recipe.services import DuringSection, EngineSection, EvaluateSection, SandboxSection
from rstar_lab.rl.recipe.sft import SftConfig
from rstar_lab.rl.section import RecipeError, Section

__all__ = [
    "CODE_TOOLS", "DifficultyFilter", "DuringSection", "EngineSection", "EnvironmentEntry", "EvaluateSection", "HandOff", "LimitsSection",
    "MixEntry", "OneStepOff", "Problems", "Recipe", "RecipeError", "RlSection", "SandboxSection", "Section", "SftConfig", "Stage",
]  # fmt: skip
