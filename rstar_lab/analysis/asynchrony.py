"""Asynchronous training: staleness and idle time of a run."""

from plotly.subplots import make_subplots

from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.runs import Runs
from rstar_lab.errors import UserError
from rstar_lab.figure_theme import COLOURS


def plot_staleness(runs: Runs, run_id: str, *, mode: str = "light") -> Figure:
    """Plot, by step: staleness of the groups trained on, idle shares of generator and trainer, and dropped groups.

    The third panel shows which groups the staleness limit affects: the share of groups dropped as too old, among all
    groups, the longest third and the least solved third. mode: "light" or "dark" page. Raises UserError for a run in
    mode sync.
    """
    steps = runs.steps({"run_id": run_id})
    if "staleness_mean" not in steps:
        raise UserError(f"run {run_id} has no staleness: it was trained in mode sync")
    figure = make_subplots(
        1, 3, subplot_titles=("staleness (updates)", "idle share", "dropped as too old (share of groups)")
    )
    idle = {
        "generator": 1 - steps.engine_busy_s / steps.step_s if "engine_busy_s" in steps else None,
        "trainer": steps["generate_s" if "generate_s" in steps else "gen_s"] / steps.step_s,  # gen_s: verl's name
    }
    panels = [
        {"mean": steps.staleness_mean, "maximum": steps.staleness_max},
        {name: share for name, share in idle.items() if share is not None},
        {
            "all groups": steps.dropped_share,
            "longest third": steps.dropped_share_long,
            "least solved third": steps.dropped_share_hard,
        },
    ]
    colours = iter(COLOURS)
    for column, panel in enumerate(panels, start=1):
        for name, values in panel.items():
            figure.add_scatter(
                x=steps.step, y=values, mode="lines+markers", name=name, line_color=next(colours), row=1, col=column,
                hovertemplate=f"step %{{x}}, {name}: %{{y:.3g}}<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(rangemode="tozero")
    for column in (2, 3):
        figure.update_yaxes(tickformat=".0%", row=1, col=column)
    figure.update_layout(height=380)
    return Figure(figure, steps, mode)
