"""Stop a run whose off-policy correction changes too many tokens for several updates."""

from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.recipe.correction import LimitedCorrection
from rstar_lab.rl.training.update import MismatchError

FAR_UPDATES = 5  # number of consecutive updates above the limit that stops a run


class CorrectionLimit:
    """Counts consecutive updates whose corrected_share exceeds `rl.correction.max_share`."""

    def __init__(self) -> None:
        self.far_updates = 0

    def check(self, share: float | None, rl: RlSection) -> None:
        """Count an update by its corrected_share (None: a step without one). Raises MismatchError at FAR_UPDATES in a row."""
        if share is None or not isinstance(rl.correction, LimitedCorrection):
            return
        self.far_updates = self.far_updates + 1 if share > rl.correction.max_share else 0
        if self.far_updates == FAR_UPDATES:
            raise MismatchError(
                f"rl.correction: {rl.correction.type} changed more than {rl.correction.max_share:.0%} of the tokens in "
                f"{FAR_UPDATES} updates in a row, last {share:.0%}: the engine samples from another policy than the trainer "
                "trains. Check engine.dtype and the weight sync, or use newer rollouts"
            )
