"""The section `rl.correction`: off-policy correction of the loss. See `algorithm.correction` for formulas and sources."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rstar_lab.rl.algorithm.config import CORRECTION_BOUNDS, TRUNCATED
from rstar_lab.rl.section import ByType, Function, Section


class NoCorrection(Section):
    """No off-policy correction (paper)."""

    type: Literal["none"] = "none"
    """Name of the correction."""


class LimitedCorrection(Section):
    """An off-policy correction whose effect is limited."""

    max_share: float = Field(0.5, gt=0, le=1)
    """Stop the run if the correction truncates or drops more than this share of the tokens in 5 consecutive updates:
    the rollouts then come from too different a policy. Default: our choice."""


class RatioCorrection(LimitedCorrection):
    """Off-policy correction by the ratio of trainer to engine probability. Requires `old_log_probs: trainer`."""

    type: Literal["tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"]
    """`tis` and `seq_tis` truncate the ratio per token or sequence; `token_mask`, `seq_mask`, `geo_mask` and `icepop` leave
    tokens or sequences out (formulas and sources in docs/algorithm.md)."""
    bounds: tuple[float, float] | None = None
    """Lower and upper bound of the ratio. Default: the bounds of the correction's source (docs/algorithm.md)."""

    @property
    def resolved_bounds(self) -> tuple[float, float]:
        """`bounds`, or those of the correction's source."""
        return self.bounds or CORRECTION_BOUNDS[self.type]

    @model_validator(mode="after")
    def _check_bounds(self) -> "RatioCorrection":
        low, high = self.resolved_bounds
        if not 0 <= low < high:
            raise ValueError(f"bounds must be 0 <= low < high, got {low:g}, {high:g}")
        if self.type in TRUNCATED and low > 0:
            raise ValueError(f"{self.type} has no lower bound: set bounds to [0, {high:g}]")
        return self


class UserCorrectionSection(LimitedCorrection):
    """Off-policy correction by your own function (docs/extending.md). Requires `old_log_probs: trainer`."""

    type: Function
    """Your own `module:function` of (trainer_log_probs, engine_log_probs, mask) that returns a weight per token."""


AnyCorrection = Annotated[NoCorrection | RatioCorrection | UserCorrectionSection, ByType()]
