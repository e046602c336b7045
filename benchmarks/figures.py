"""Figure of the scheduler calibration: predicted and measured makespans."""

from collections.abc import Sequence

import plotly.graph_objects as go

from benchmarks.calibration import Measurement
from rstar_lab.analysis.figure_theme import COLOURS, apply_theme


def plot_calibration(results: Sequence[Measurement], *, mode: str = "light") -> go.Figure:
    """Plot measured over predicted makespan, one point per policy; bars span the fastest and slowest replay.

    mode: "light" or "dark" page.
    """
    figure = go.Figure()
    limit = 1.1 * max(max(result.predicted_s, *result.measured_s) for result in results)
    figure.add_scatter(
        x=[0, limit], y=[0, limit], mode="lines", line={"dash": "dot", "color": "grey"}, showlegend=False
    )
    figure.add_annotation(x=limit, y=limit, text="measured as predicted", showarrow=False, xanchor="right", yshift=14)
    ranked = sorted(results, key=lambda result: result.predicted_s)
    for result, colour in zip(results, COLOURS, strict=False):
        figure.add_scatter(
            x=[result.predicted_s],
            y=[result.measured],
            error_y={
                "array": [max(result.measured_s) - result.measured],
                "arrayminus": [result.measured - min(result.measured_s)],
            },
            mode="markers+text",
            text=[result.policy],
            # Alternate sides, so that the names of neighbours do not overlap.
            textposition=("middle left", "middle right")[ranked.index(result) % 2],
            marker={"color": colour, "size": 11},
            showlegend=False,
        )
    figure.update_layout(height=460, xaxis_title="predicted makespan (s)", yaxis_title="measured makespan (s)")
    apply_theme(figure, mode)
    return figure
