"""Test of the heat map of problems in JupyterLab: a click on a cell opens its group, on light and dark pages."""

from pathlib import Path

import pytest
from conftest import Lab
from helpers.inspector_runs import write_run
from inspector_page import book, run_python, wait_for_count, wait_for_head, wait_for_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_click_on_a_cell_opens_the_group(lab: Lab, tmp_path: Path):
    write_run(tmp_path / "runs", "roc")
    cells = (
        "from rstar_lab.analysis import inspect, link, open_runs, plot_heatmap\n"
        f"runs = open_runs({str(tmp_path / 'runs')!r})\ninspector = inspect(runs)\n"
        "heatmap = plot_heatmap(runs, 'roc')\nlink(heatmap, inspector)",
        "inspector",
    )
    with lab.notebook(book(tmp_path, *cells), size=(1600, 1300)) as opened:
        page = opened.page
        opened.command("application:toggle-left-area")
        opened.run_all()
        wait_for_count(opened, 192)
        image = page.locator(".rl-figure .heatmaplayer image").first
        for theme, row, column in (("JupyterLab Light", 3, 1), ("JupyterLab Dark", 0, 4)):
            opened.theme(theme)
            image.scroll_into_view_if_needed()
            opened.shot(f"heatmap-{theme.split()[-1].lower()}", ".rl-figure")
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
            wait_for_python(opened, "inspector.selected.rsplit('/', 1)[0]", f"roc/{column + 1}/p{int(problem[-2:])}")
