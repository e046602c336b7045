"""Tests that all figures of the project use one theme, for light and dark pages."""

from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.subplots import make_subplots

from benchmarks.barrier import Static
from benchmarks.calibration import recorded_measurements
from benchmarks.figures import plot_calibration
from benchmarks.sandbox_load import Sample, plot_load, plot_outcomes
from benchmarks.scheduler_figures import plot_gantt, plot_turns
from benchmarks.simulated_engine import EngineSpec, Rates
from benchmarks.simulator import ScriptedRollout, ScriptedTurn, SimulationResult, simulate
from rstar_lab.analysis.figure_theme import COLOURS, apply_theme, outcome_marker, place_headings, template
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome

ROOT = Path(__file__).parents[1] / "rstar_lab"
SAMPLES = [Sample("print", Outcome.OK, 0.1 * i, 0.02, 0.0, 0.01) for i in range(20)]


def simulated() -> SimulationResult:
    rollouts = [ScriptedRollout(i, f"p{i}", 100, (ScriptedTurn(50),)) for i in range(4)]
    return simulate(rollouts, Static(), [EngineSpec(Rates(0.01, 0.002, 1e-5, 1e-7), kv_tokens=10_000)] * 2, spans=True)


FIGURES: dict[str, Callable[[str], go.Figure]] = {
    "load": lambda mode: plot_load(SAMPLES, mode=mode),
    "outcomes": lambda mode: plot_outcomes(SAMPLES, mode=mode),
    "gantt": lambda mode: plot_gantt({"static": simulated()}, 1.0, mode=mode),
    "turns": lambda mode: plot_turns(simulated(), 0, mode=mode),
    "calibration": lambda mode: plot_calibration(recorded_measurements(), mode=mode),
}


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_use_the_template_of_the_page(name: str, mode: str):
    assert FIGURES[name](mode).layout.template == template(mode)


def test_templates_of_plotly_are_not_used():
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert "plotly_white" not in text and "plotly_dark" not in text, path


def test_every_outcome_has_its_own_marker():
    markers = {str(outcome_marker(outcome)) for outcome in Outcome}
    assert len(markers) == len(Outcome)
    assert {outcome_marker(outcome)["color"] for outcome in INFRASTRUCTURE_FAILURES} == {"#6B6B6B"}
    assert all(outcome_marker(outcome)["color"] in COLOURS for outcome in Outcome)


def test_an_axis_of_words_stays_one_and_ticks_differ():
    words = go.Figure(go.Bar(x=[1.0, 2.0, 3.0], y=["514", "3", "so"], orientation="h"))
    apply_theme(words)
    assert words.layout.yaxis.type == "category" and words.layout.xaxis.type is None
    for values, given, wanted in (
        ([0.9990, 0.9995], ".2f", ".4f"),
        ([0.1, 0.9], ".2f", ".2f"),
        ([0.011, 0.013], ".0%", ".2%"),
        ([0.1, 0.9], ".0%", ".0%"),
        ([1.0], ".2f", ".2f"),
        ([1.0, 1.0], ".2f", ".2f"),
        ([float("nan")], ".0%", ".0%"),
        ([], ".0%", ".0%"),
        ([i / 10_000 for i in range(10_000)], ".0%", ".0%"),
    ):
        figure = go.Figure(go.Scatter(x=list(range(len(values))), y=values))
        figure.update_yaxes(tickformat=given)
        apply_theme(figure)
        assert figure.layout.yaxis.tickformat == wanted, values


def test_the_title_of_a_panel_alone_in_its_row_is_wrapped_too():
    figure = make_subplots(2, 2, subplot_titles=["one", "two", "characters of text before the first call"])
    place_headings(figure)
    assert figure.layout.annotations[2].text == "characters of text before the<br>first call"
