"""Arms that measure the effect of sandbox failures: `run_grid("tiny", fault_arms(), range(5), overrides=OVERRIDES,
name="faults")`.

A share of the calls fails as `sandbox_error`. One half of the arms leaves these calls out of the tool-error penalty of RoC,
as the outcome taxonomy does; the other half counts them as errors of the model.
"""

from typing import Any

from rstar_lab.outcomes import Outcome
from rstar_lab.rl.algorithm.roc import tool_error_penalty
from rstar_lab.rl.trajectory import Trajectory

SHARES = (0.05, 0.1, 0.2)
OVERRIDES = {  # the overrides of notebook 06_ablation
    "stages.0.steps": 24,
    "rl.token_arrays": "sampled",
    "rl.problems_per_step": 8,
    "evaluate.every": 8,
    "evaluate.sets.held_out.synthetic.count": 96,
    "evaluate.samples": 2,
}


def all_failures(trajectory: Trajectory) -> float:
    """Return p_err with failures of the sandbox counted as errors of the model."""
    outcomes = [call.outcome for call in trajectory.calls]
    return tool_error_penalty(sum(outcome != Outcome.OK for outcome in outcomes), len(outcomes))


def fault_arms() -> dict[str, dict[str, Any]]:
    """Return the arms of the grid: name -> recipe keys. `plot_faults` reads the share from the name."""
    arms: dict[str, dict[str, Any]] = {"0%": {}}
    counted = ["benchmarks.sandbox_faults:all_failures", "format"]
    for share in SHARES:
        arms[f"{share:.0%}"] = {"sandbox.fault_share": share}
        arms[f"{share:.0%}, counted"] = {"sandbox.fault_share": share, "rl.method.roc.penalties": counted}
    return arms
