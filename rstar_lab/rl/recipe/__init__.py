"""The recipe: a pydantic model of the YAML file that describes a run. Unknown keys are rejected."""

from rstar_lab.rl.recipe.data import MixEntry, Problems, Synthetic
from rstar_lab.rl.recipe.recipe import DifficultyFilter, HandOff, Recipe, Stage
from rstar_lab.rl.recipe.rl import (
    CODE_TOOLS,
    Async,
    EnvironmentEntry,
    LimitsSection,
    ModelPrompt,
    NoCorrection,
    OneStepOff,
    PaperPrompt,
    RatioCorrection,
    ReleasedPrompt,
    RlSection,
    Sync,
    UserCorrectionSection,
)
from rstar_lab.rl.recipe.services import DuringSection, EngineSection, EvaluateSection, SandboxSection
from rstar_lab.rl.recipe.sft import SftConfig, SftSection
from rstar_lab.rl.section import RecipeError, Section

__all__ = [
    "CODE_TOOLS", "Async", "DifficultyFilter", "DuringSection", "EngineSection", "EnvironmentEntry", "EvaluateSection", "HandOff",
    "LimitsSection", "MixEntry", "ModelPrompt", "NoCorrection", "OneStepOff", "PaperPrompt",
    "Problems", "RatioCorrection", "Recipe", "RecipeError", "ReleasedPrompt", "RlSection", "SandboxSection",
    "Section", "SftConfig", "SftSection", "Stage", "Sync", "Synthetic", "UserCorrectionSection",
]  # fmt: skip
