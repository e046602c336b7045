"""Most groups have equal rewards, a mixture of all right and all wrong."""

import numpy as np

from rstar_lab.common.estimates import ratio
from rstar_lab.doctor.rule import LEVEL, WINDOW, Evidence, Log, rule


@rule(
    "few groups train the policy",
    reads=("steps.equal_share",),
    cause="most groups have equal rewards and train nothing: the compute of their rollouts is lost",
    remedy=(
        "use problems with a pass rate between 0.1 and 0.9, a larger group, or dynamic sampling "
        "(`rl.schedule.dynamic_sampling`)"
    ),
    source="DAPO, arXiv 2503.14476, section 3.2",
)
def check(log: Log) -> Evidence | None:
    late = log.steps.dropna(subset=["equal_share"]).tail(WINDOW)
    value = float(late.equal_share.mean())
    groups = log.last().group_id.nunique() or 20 * len(late)
    equal = np.repeat([1.0, 0.0], [round(value * groups), groups - round(value * groups)])
    if value < 0.8 or len(late) < WINDOW or not ratio(equal, np.ones(groups), groups, level=LEVEL).low > 0.25:
        return None
    text = f"{value:.0%} of the groups in the last {len(late)} steps have equal rewards"
    return Evidence(text, {"share": value}, late.step.astype(int).tolist(), (), value)
