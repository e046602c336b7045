"""The recorded runs of docs/ablation.md and docs/async.md, and the figure of the grid of sandbox faults."""

import re

import pandas as pd

from rstar_lab.analysis.ablation import PLOTTED, load_sums, plot_lines, require_held_out
from rstar_lab.analysis.figure import Figure
from rstar_lab.common.resources import benchmark_file
from rstar_lab.runs import RunStoreError

FAULT_ARM = re.compile(r"(\d+)%(?:, (counted|masked|retried))?")  # of `benchmarks.sandbox_faults`
HANDLING = {
    "counted": "counted as failures of the model",
    "masked": "left out",
    "retried": "generated once more, then left out",
}


def recorded_sums(name: str = "ablation") -> pd.DataFrame:
    """Return the recorded result of `ablation_sums` from which a table of docs/ablation.md is computed.

    name: `ablation`; `ablation-clean`, whose SFT data has no deliberate errors; `ablation-options` and `ablation-echo`, RoC with
    newer options of the recipe; `ablation-faults`, with failures of the sandbox; `ablation-pretrained`, SmolLM2-135M-Instruct.
    """
    return load_sums(benchmark_file(f"{name}.parquet"))


def recorded_curves(name: str = "async") -> pd.DataFrame:
    """Return a recorded result of `learning_curves`, from which a table in docs/async.md is computed.

    name: `async`, or `async-fast` with twice the learning rate.
    """
    return pd.read_csv(benchmark_file(f"{name}.csv"))


def plot_faults(sums: pd.DataFrame) -> Figure:
    """Plot held-out pass@1 and the tool-error rate of correct trajectories over the share of calls with a sandbox failure.

    sums: result of `ablation_sums` for the runs of `benchmarks.sandbox_faults`. Its arms are named "15%, masked". Sums over
    the last third of the steps; mean over seeds with Student's 95% interval. Raises RunStoreError for other arms and if the
    runs have no held-out evaluations.
    """
    require_held_out(sums)
    shares: dict[str, re.Match[str]] = {}
    for arm in dict.fromkeys(sums.arm):
        if not (share := FAULT_ARM.fullmatch(arm)):
            raise RunStoreError(
                f"arm {arm!r} does not belong to a grid of sandbox faults, whose arms are named like '15%, masked'"
            )
        shares[arm] = share
    totals = (
        sums[sums.step > sums.step.max() * 2 / 3]
        .groupby(["arm", "seed"])[[f"{name}_{part}" for name in PLOTTED for part in ("numerator", "denominator")]]
        .sum()
    )
    rows = []
    for (arm, seed), row in totals.iterrows():
        share = shares[arm]
        values = {name: row[f"{name}_numerator"] / row[f"{name}_denominator"] for name in PLOTTED}
        # Without faults all series are the same runs.
        kinds = HANDLING if share[1] == "0" else [share[2]]
        rows += [{"series": HANDLING[kind], "share": int(share[1]) / 100, "seed": seed} | values for kind in kinds]
    frame = pd.DataFrame(rows).sort_values(["series", "share", "seed"], ignore_index=True)
    figure = plot_lines(frame, "series", list(HANDLING.values()), "share", "share", "%{x:.0%} failures")
    figure.update_xaxes(title_text="share of calls that fail during training", tickformat=".0%")
    figure.update_yaxes(rangemode="tozero")
    return Figure(figure, frame)
