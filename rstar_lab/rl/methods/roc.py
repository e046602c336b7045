"""Resampling on correct (RoC): which of the oversampled rollouts of a group are trained on.

Source: rStar2-Agent (arXiv 2508.20722), section 3.2; the rule `released` is that of microsoft/rStar. See
`algorithm.roc.resample` for the rules and docs/algorithm.md for the choices that the paper leaves open.
"""

from pydantic import model_validator

from rstar_lab.rl.algorithm.roc import Penalty, SelectionRule
from rstar_lab.rl.section import Function, NotNegative, Positive, Section, is_own


class Roc(Section):
    """Resampling on correct: each problem gets more rollouts than are trained on, and a rule selects among them."""

    rule: SelectionRule | Function = "paper"
    """How `group_size` rollouts are selected from a group. `paper`: failed rollouts uniformly, successful ones with
    probability inversely proportional to their penalty (section 3.2). `released`: the rule of microsoft/rStar. `random`: uniformly,
    as a control. `none`: no oversampling (plain GRPO). Or your own `module:function` (docs/extending.md)."""
    oversample: Positive = 2
    """Each problem gets `group_size * oversample` rollouts, of which `group_size` are trained on. Default: paper, section
    3.2 (GRPO-RoC)."""
    penalties: tuple[Penalty | Function, ...] = ("errors", "format")
    """Penalties of a successful rollout that RoC adds up: `errors` (tool errors), `format` (answer tags), or your
    own `module:function` of a trajectory. Default: paper, section 3.2."""
    min_positive: NotNegative = 0
    """Minimum number of successful rollouts that RoC keeps, if the group has that many. Default: our choice; the release's
    script uses 2."""
    min_negative: NotNegative = 0
    """Minimum number of failed rollouts that RoC keeps, if the group has that many. Default: our choice; the release's
    script uses 2."""

    @model_validator(mode="after")
    def _check_minima(self) -> "Roc":
        if is_own(self.rule) and (self.min_positive or self.min_negative):
            raise ValueError("min_positive and min_negative require one of the built-in rules in rule")
        return self
