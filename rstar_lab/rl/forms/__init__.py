"""Forms for notebooks: `RecipeForm`, `MixForm` and `RewardPreview`."""

from rstar_lab.rl.forms.mix_form import MixForm
from rstar_lab.rl.forms.recipe_form import RecipeForm
from rstar_lab.rl.forms.reward_preview import RewardPreview

__all__ = ["MixForm", "RecipeForm", "RewardPreview"]
