"""Actions on an inspector in JupyterLab, for the browser tests."""

import json
import time
from pathlib import Path

import nbformat

from browser.lab_page import LabPage

APP = ".rl-app"


def book(folder: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = folder / "book.ipynb"
    nbformat.write(made, path)
    return path


def total(opened: LabPage) -> int:
    return int(opened.page.locator(f"{APP} .rl-count").first.inner_text().split(" ")[0].replace(",", ""))


def wait_for_count(opened: LabPage, count: int | str) -> None:
    opened.wait(f"() => document.querySelector('{APP} .rl-count')?.textContent.startsWith('{count} of')")


def wait_for_head(opened: LabPage, text: str) -> None:
    """Wait until the head of the transcript contains `text`."""
    opened.wait(f"() => document.querySelector('{APP} .rl-dhead')?.textContent.includes({json.dumps(text)})")


def wait_for_sample(opened: LabPage, sample: int) -> None:
    """Wait until this rollout of the group is open."""
    opened.wait(f"() => document.querySelectorAll('{APP} .rl-cell')[{sample}]?.getAttribute('aria-pressed') === 'true'")


def wait_for_trajectory(opened: LabPage, traj_id: str) -> None:
    """Wait until the transcript of this trajectory is shown."""
    opened.wait(f"() => document.querySelector('{APP} .rl-detail')?.dataset.traj === {json.dumps(traj_id)}")


def select(opened: LabPage, expression: str) -> None:
    """Select the trajectory whose id is the value of a Python expression, and wait until it is shown."""
    wait_for_trajectory(opened, run_python(opened, f"inspector.selected = {expression}; print(inspector.selected)"))


def run_python(opened: LabPage, code: str) -> str:
    """Run code in the notebook's kernel and return its printed text."""
    return opened.page.evaluate(
        """async code => {
          const kernel = window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
          const future = kernel.requestExecute({ code, store_history: false });
          let text = '';
          future.onIOPub = message => { text += message.content.text ?? message.content.evalue ?? ''; };
          await future.done;
          return text;
        }""",
        code,
    ).strip()


def wait_for_python(opened: LabPage, expression: str, wanted: str) -> None:
    """Wait until an expression prints `wanted`. Changes made in the page reach the kernel with a delay."""
    deadline = time.monotonic() + 120
    while (printed := run_python(opened, f"print({expression})")) != wanted:
        assert time.monotonic() < deadline, f"{expression} is {printed!r}, not {wanted!r}"
        time.sleep(0.3)


def click_point(opened: LabPage, number: int) -> None:
    opened.page.wait_for_selector(".rl-figure .scatterlayer .point")
    point = opened.page.locator(".rl-figure .scatterlayer .point").nth(number)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    opened.page.mouse.move(x - 3, y)
    opened.page.mouse.move(x, y)
    opened.page.wait_for_selector(".rl-figure .hovertext", state="attached")
    opened.page.mouse.click(x, y)


def box_select(opened: LabPage, first: int, last: int) -> None:
    """Draw a box around the points `first` to `last` of the first panel, from its top to its bottom."""
    page = opened.page
    page.locator(".rl-figure").first.hover()
    page.locator(".rl-figure .modebar-btn[data-val=select]").first.click()
    points = page.locator(".rl-figure .scatterlayer .point")
    left, right = (points.nth(number).bounding_box() for number in (first, last))
    panel = page.locator(".rl-figure .nsewdrag").first.bounding_box()
    page.mouse.move(left["x"] - 4, panel["y"] + 3)
    page.mouse.down()
    page.mouse.move(right["x"] + right["width"] + 2, panel["y"] + panel["height"] / 2, steps=4)
    page.mouse.move(right["x"] + right["width"] + 4, panel["y"] + panel["height"] - 3, steps=4)
    page.mouse.up()


def axe_violations(opened: LabPage) -> list[str]:
    found = opened.page.evaluate(
        "async () => (await axe.run(document.querySelector('.rl-app'),"
        " { runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa'] })).violations"
    )
    return [f"{rule['id']}: {node['target']} {node['failureSummary']}" for rule in found for node in rule["nodes"]]


def low_contrast(opened: LabPage) -> list[str]:
    """Return the visible texts of figures whose contrast with the page is below 4.5 (WCAG AA). axe-core does not check SVG."""
    return opened.page.evaluate(
        """() => {
          const numbers = colour => {
            const context = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const luminance = colour => numbers(colour).map(value => value / 255)
            .map(value => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
            .reduce((sum, value, i) => sum + [0.2126, 0.7152, 0.0722][i] * value, 0);
          const paper = luminance(getComputedStyle(document.querySelector('.rl-app')).backgroundColor);
          const texts = [...document.querySelectorAll('.rl-app .main-svg text')];
          return texts.filter(text => text.textContent.trim() && text.getClientRects().length).filter(text => {
            const ink = luminance(getComputedStyle(text).fill);
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) < 4.5;
          }).map(text => `${text.textContent}: ${getComputedStyle(text).fill}`);
        }"""
    )
