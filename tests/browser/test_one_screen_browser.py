"""Test of the screen of `explore` in JupyterLab: curves, heat map and rollouts together, at three widths, light and dark."""

from pathlib import Path

import pytest
from helpers.inspector_runs import write_run

from browser.inspector_page import (
    APP,
    axe_violations,
    book,
    low_contrast,
    run_python,
    wait_for_count,
    wait_for_head,
    wait_for_python,
)
from browser.lab_page import Lab, LabPage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Elements of the screen that are visible, in pixels: the app, the plots, the list, the transcript, and plotly's texts by plot.
BOXES = """() => {
  const app = document.querySelector('.rl-app');
  const box = (element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return [left, top, right, bottom].map(Math.round);
  };
  const visible = (selector, root = app) => [...root.querySelectorAll(selector)].filter(
    element => element.getClientRects().length && element.getBoundingClientRect().width > 1);
  const texts = '.gtitle, .annotation-text, .xtitle, .ytitle, .legendtext, .xtick text, .ytick text, .cbtitle text, .cbaxis text';
  return {
    app: box(app), turns: box(app.querySelector('.rl-turns')), foot: box(app.querySelector('.rl-foot')),
    panes: visible('.rl-plot, .rl-list, .rl-detail, .rl-filters').map(element => [element.className.split(' ')[0], box(element)]),
    texts: visible('.rl-plot').map(plot => [box(plot), visible(texts, plot).map(text => [text.textContent, box(text)])]),
  };
}"""


def inside(inner: list[int], outer: list[int], slack: int = 1) -> bool:
    return min(inner[0] - outer[0], inner[1] - outer[1], outer[2] - inner[2], outer[3] - inner[3]) >= -slack


def overlap(a: list[int], b: list[int]) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > 2 and min(a[3], b[3]) - max(a[1], b[1]) > 2


def check_boxes(opened: LabPage, plots: int) -> None:
    """Assert that nothing overlaps and nothing is cut off."""
    found = opened.page.evaluate(BOXES)
    panes = found["panes"]
    assert [name for name, _ in panes].count("rl-plot") == plots
    for number, (name, box) in enumerate(panes):
        assert inside(box, found["app"]), f"{name} is outside of the screen: {box}, {found['app']}"
        assert box[2] - box[0] > 250 and box[3] - box[1] > 30, f"{name} is too small: {box}"
        for other, place in panes[number + 1 :]:
            assert not overlap(box, place), f"{name} and {other} overlap: {box}, {place}"
    assert not overlap(found["turns"], found["foot"]), "the transcript overlaps the line below it"
    for plot, texts in found["texts"]:
        drawn = [max(box[3] for _, box in texts), plot[3]]
        assert drawn[1] - drawn[0] < 40, f"the figure does not fill its pane: {drawn}"
        for number, (text, box) in enumerate(texts):
            assert inside(box, plot), f"{text!r} is cut off: {box}, {plot}"
            for other, place in texts[number + 1 :]:
                assert not overlap(box, place), f"{text!r} and {other!r} overlap: {box}, {place}"


@pytest.mark.soak
def test_curves_heat_map_and_rollouts_share_one_screen(lab: Lab, tmp_path: Path, axe: Path):
    write_run(tmp_path / "runs", "roc")
    cells = (
        "from rstar_lab.analysis import explore, open_runs, plot_curves, plot_heatmap\n"
        f"runs = open_runs({str(tmp_path / 'runs')!r})\n"
        "heatmap = plot_heatmap(runs, 'roc')\n"
        "screen = explore([plot_curves(runs, ['pass1', 'tool_error_rate_correct']), heatmap], runs)\nscreen",
    )
    with lab.notebook(book(tmp_path, *cells), size=(1920, 1080)) as opened:
        page = opened.page
        opened.command("application:toggle-left-area")
        opened.run_all()
        wait_for_count(opened, 192)
        page.wait_for_selector(".rl-figure .heatmaplayer image")
        for width, plots in ((1920, 2), (1400, 2), (900, 1)):
            page.set_viewport_size({"width": width, "height": 1080})
            for theme in ("JupyterLab Light", "JupyterLab Dark"):
                opened.theme(theme)
                page.wait_for_timeout(700)
                opened.shot(f"one-screen-{width}-{theme.split()[-1].lower()}", APP)
                check_boxes(opened, plots)
                paper = page.evaluate("getComputedStyle(document.querySelector('.rl-plot .main-svg')).backgroundColor")
                assert paper == ("rgba(0, 0, 0, 0)" if theme.endswith("Dark") else "rgb(255, 255, 255)")
                page.add_script_tag(path=axe)
                assert axe_violations(opened) == [], (width, theme)
                assert low_contrast(opened) == [], (width, theme)

        # A narrow page shows one figure at a time.
        page.locator(f"{APP} .rl-tabs button", has_text="Heat map").click()
        page.wait_for_timeout(700)
        check_boxes(opened, 1)
        assert low_contrast(opened) == [], "a figure that was hidden follows the theme"
        page.set_viewport_size({"width": 1400, "height": 1080})
        page.wait_for_timeout(700)

        # A click on a cell opens its group; the list is in view without scrolling.
        image = page.locator(".rl-figure .heatmaplayer image").first
        row, column = 3, 1
        box = image.bounding_box()
        x, y = box["x"] + box["width"] * (column + 0.5) / 6, box["y"] + box["height"] * (3.5 - row) / 4
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        page.wait_for_selector(".rl-figure .hovertext", state="attached")
        page.mouse.click(x, y)
        wait_for_count(opened, 8)
        wait_for_head(opened, f"step {column + 1}")
        problem = run_python(opened, f"print(heatmap.data[0].y[{row}])")
        label = f"run roc, step {column + 1}, problem {problem}"
        assert page.locator(".rl-app .rl-scope .rl-chip").first.inner_text() == label
        wait_for_python(opened, "screen.selected.rsplit('/', 1)[0]", f"roc/{column + 1}/p{int(problem[-2:])}")

        # A click on a curve lists the rollouts of its step.
        point = page.locator(".rl-figure .scatterlayer .point").nth(3)
        place = point.bounding_box()
        x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        page.wait_for_timeout(300)
        page.mouse.click(x, y)
        wait_for_count(opened, 32)
        wait_for_head(opened, "step 4")
