"""Names of the same metric in the logs of other trainers, from `foreign_names.toml`."""

import math
import re
from collections.abc import Iterable

from rstar_lab.exchange.rollout_rows import FOREIGN_NAMES

NAMES: dict[str, list[str]] = FOREIGN_NAMES["metrics"]
# Values that a metric can have.
RANGES = {
    name: (0.0, 1.0 if key == "shares" else math.inf) for key, own in FOREIGN_NAMES["ranges"].items() for name in own
}
HELD_OUT = re.compile(
    r"(eval/.*(pass1|pass@1|avg@|accuracy|reward)|val[-/].*(mean@|acc|score|reward)|eval_reward|eval_accuracy)"
)
_SPREAD = re.compile(r"(?:^|[/_@-])(?:std|min|max|best|worst|maj)(?:$|[/_@-])")
_MAIN = re.compile(r"^val-core/|^eval[_/](?:reward|accuracy)$|pass@?1")
_CANONICAL = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases)}


def canonical(name: str) -> str | None:
    """Return the name that rules use for a metric of any trainer; None if no rule reads it."""
    own = name.removeprefix("train/").removeprefix("verl/")  # verl/: of our runs under verl
    return _CANONICAL.get(name) or _CANONICAL.get(own) or ("held_out" if HELD_OUT.search(name[:500]) else None)


def held_out_score(names: Iterable[str]) -> str | None:
    """Return the metric that is the held-out score of another trainer: a mean and no spread, the first evaluation set of several."""
    scores = [name for name in names if canonical(name) == "held_out" and not _SPREAD.search(name)]
    return min(scores, key=lambda name: _MAIN.search(name) is None, default=None)
