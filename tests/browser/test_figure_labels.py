"""The labels of every figure at three widths: ticks of an axis differ, no label covers another one, and none is cut off."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from helpers.awkward_runs import make_awkward_runs, write_rows
from helpers.notebooks import GOLDEN
from plotly.offline import get_plotlyjs

from browser.lab_page import SHOTS
from browser.widget_page import WidgetPage
from rstar_lab import analysis
from rstar_lab.analysis import LinkedFigure, open_runs, watch
from rstar_lab.analysis.figure import Figure
from rstar_lab.analysis.runs import Runs
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunStoreError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WIDTHS = (1400, 900, 620)  # of the page; a cell of JupyterLab at 900 pixels is 620 wide
# Texts of one axis that are equal, texts that cover each other, and texts outside of the figure.
DRAW = """async ([figure, width]) => {
  const box = document.getElementById("figure");
  Plotly.purge(box);
  box.style.width = `${width}px`;
  await Plotly.newPlot(box, figure.data, { ...figure.layout, autosize: true, width: undefined }, { displaylogo: false });
}"""
FAULTS = (Path(__file__).parent / "figure_faults.js").read_text()


def scatter(values: list[float], tickformat: str) -> Figure:
    figure = go.Figure(go.Scatter(x=list(range(len(values))), y=values))
    figure.update_yaxes(tickformat=tickformat, title="value")
    return Figure(figure, pd.DataFrame({"value": values}))


def figures_of(runs: Runs, run: str) -> dict[str, Callable[[], go.Figure]]:
    def failed() -> pd.DataFrame:
        return analysis.failed_rollouts(runs, {"run_id": run})

    return {
        "curves": lambda: analysis.plot_curves(runs),
        "four curves": lambda: analysis.plot_curves(runs, ["pass1", "tool_error_rate", "response_tokens", "calls"]),
        "ablation": lambda: analysis.plot_curves(runs, ["pass1"], by="rl.method.roc.rule"),
        "outcomes": lambda: analysis.plot_outcomes(runs),
        "lengths": lambda: analysis.plot_lengths(runs),
        "pass@k": lambda: analysis.plot_pass_at_k(runs, (1, 2)),
        "heat map": lambda: analysis.plot_heatmap(runs, run),
        "failures": lambda: analysis.plot_failures(failed()),
        "tool use": lambda: analysis.plot_tool_use(runs),
    }


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, go.Figure]:
    golden = open_runs(GOLDEN)
    awkward = open_runs(make_awkward_runs(tmp_path_factory.mktemp("runs"), 400))
    found: dict[str, go.Figure] = {}
    for name, runs, run in (("golden", golden, "tiny_fast-rl"), ("awkward", awkward, "big-rl")):
        found |= {f"{kind} of {name} runs": draw() for kind, draw in figures_of(runs, run).items()}
    with pytest.raises(RunStoreError, match="no measured times"):
        analysis.plot_timeline(awkward, "big-rl", 3)
    table = analysis.token_table(golden, {"run_id": "tiny_fast-rl"}, limit=60)
    found |= {
        "timeline": analysis.plot_timeline(golden, "tiny_fast-rl", 3),
        "kinds of tokens": analysis.plot_token_kinds(table),
        "entropy": analysis.plot_entropy(table),
        "words": analysis.plot_high_entropy_words(table),
        "one point": scatter([0.5], ".2f"),
        "no point": scatter([], ".2f"),
        "equal values": scatter([0.25] * 5, ".1%"),
        "values that differ by little": scatter([0.99991, 0.99992, 0.99996], ".2f"),
        "missing values": scatter([float("nan"), 0.1, float("nan"), 0.2], ".0%"),
        "10,000 points": scatter([i % 97 / 97 for i in range(10_000)], ".0%"),
    }
    return found


@pytest.fixture(scope="module")
def extremes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, go.Figure]:
    """Draw every figure for four runs: one with one rollout, one with 10,000, one with equal rewards, one without rewards.

    A figure without data raises an error of one sentence.
    """
    settings: dict[str, dict[str, Any]] = {
        "one": {"rows": 1, "steps": 1}, "many": {"rows": 10_000, "steps": 10}, "equal": {"rows": 80, "reward": 1.0},
        "unscored": {"rows": 80, "reward": None, "advantage": None},
    }  # fmt: skip
    found: dict[str, go.Figure] = {}
    for name, keys in settings.items():
        folder = tmp_path_factory.mktemp(name)
        write_rows(folder, "run-rl", **keys)
        for kind, draw in figures_of(open_runs(folder), "run-rl").items():
            try:
                found[f"{kind} of {name}"] = draw()
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) > 20, error
    return found


@pytest.mark.soak
def test_labels_of_figures_of_extreme_runs(browser, extremes):
    assert len(extremes) > 30
    check_labels(browser, extremes)


def test_labels_differ_and_do_not_overlap_at_three_widths(browser, figures):
    check_labels(browser, figures)


def check_labels(browser: Any, figures: dict[str, go.Figure]) -> None:
    page = browser.new_page(viewport={"width": 1450, "height": 1000})
    page.set_content('<body style="margin: 0"><div id="figure"></div></body>')
    page.add_script_tag(content=get_plotlyjs())
    faults = []
    for name, figure in figures.items():
        for width in WIDTHS:
            page.evaluate(DRAW, [json.loads(figure.to_json()), width])
            found = page.evaluate(FAULTS)
            if found:
                SHOTS.mkdir(parents=True, exist_ok=True)
                page.locator("#figure").screenshot(path=SHOTS / f"labels-{name.replace(' ', '-')}-{width}.png")
            faults += [f"{name}, {width}: {fault}" for fault in found]
    page.close()
    assert not faults, "\n".join(faults)


def test_figures_of_widgets_fit_into_a_narrow_cell(browser):
    """A cell of JupyterLab at 900 pixels with the file browser open is about 460 pixels wide."""
    golden = open_runs(GOLDEN)
    figures = {
        "watch": watch(GOLDEN / "tiny_fast-rl").figure,
        "curves": LinkedFigure(analysis.plot_curves(golden), None),
        "timeline": LinkedFigure(analysis.plot_timeline(golden, "tiny_fast-rl", 3), None),
    }
    faults = []
    for name, figure in figures.items():
        shown = WidgetPage(browser, figure, (900, 500))
        for width in (900, 460, 640):
            shown.page.set_viewport_size({"width": width, "height": 500})
            shown.wait(f"() => document.querySelector('.main-svg')?.getBoundingClientRect().width > {width - 40}")
            shown.wait(f"() => document.querySelector('.main-svg').getBoundingClientRect().width <= {width}")
            shown.page.wait_for_timeout(300)
            faults += [f"{name}, {width}: {fault}" for fault in shown.page.evaluate(FAULTS)]
            SHOTS.mkdir(parents=True, exist_ok=True)
            shown.page.screenshot(path=SHOTS / f"narrow-{name}-{width}.png")
        assert shown.errors == []
        shown.close()
    assert not faults, "\n".join(faults)
