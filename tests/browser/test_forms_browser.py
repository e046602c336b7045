"""The form of a recipe in JupyterLab: a key is found, changed and rejected by keyboard, on both themes. The rows of the job board."""

from pathlib import Path
from typing import Any

import pytest
from inspector_page import book, wait_for_python
from lab_page import Lab
from widget_page import WidgetPage

from rstar_lab.jobs.board import BoardRow, BoardWidget, JobBoard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def type_into(field: Any, text: str) -> None:
    """Replace the text of a field. JupyterLab takes the focus back for a moment after it has run a cell or changed the theme."""
    for _ in range(20):
        field.press("Control+A")
        field.press_sequentially(text, delay=20)
        if field.input_value() == text:
            return
    raise AssertionError(f"the field has {field.input_value()!r}, not {text!r}")


@pytest.mark.soak
def test_forms_are_filled_by_keyboard(lab: Lab, tmp_path: Path):
    cell = "from rstar_lab.rl.forms import RecipeForm\nform = RecipeForm('tiny_fast')\nform"
    with lab.notebook(book(tmp_path, cell), size=(1400, 1500)) as opened:
        page = opened.page
        opened.command("application:toggle-left-area")
        opened.run_all()
        search = page.get_by_placeholder("part of a key")
        type_into(search, "group_size")
        # Tab goes to the first field that the page shows, and the page shows the matches later than the kernel has them.
        opened.wait("() => document.querySelector('.widget-hbox .widget-html code')?.textContent === 'rl.group_size'")
        row = page.locator(".widget-hbox").filter(has=page.get_by_text("rl.group_size", exact=True)).last
        field = row.locator("input")
        field.wait_for()
        search.press("Tab")
        assert field.evaluate("field => field === document.activeElement")
        type_into(field, "zero")
        field.press("Enter")
        page.wait_for_selector("[role=alert]")
        assert "rl.group_size" in page.locator("[role=alert]").first.inner_text()
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            opened.theme(theme)
            opened.shot(f"forms-{theme.split()[-1].lower()}")
        type_into(field, "16")
        field.press("Enter")
        wait_for_python(opened, "form.overrides", "{'rl.group_size': 16}")


def test_a_click_on_a_row_of_the_board_selects_its_job(browser: Any):
    board = BoardWidget(JobBoard("."), None)
    names = ["first", "<b>x</b>'\"\u202e", "third"]
    board.show(
        [BoardRow(name, status, "here") for name, status in zip(names, ("running", "failed", "finished"), strict=True)]
    )
    page = WidgetPage(browser, board.table, (1000, 400))
    for index, name in [(2, "third"), (1, names[1])]:
        page.page.locator("tbody tr").nth(index).locator("td").nth(1).click()
        page.wait(f"() => document.querySelectorAll('tbody tr')[{index}].className === 'rl-selected'")
        assert board.table.selected == name and not board.buttons["Resume"].disabled
    page.page.keyboard.press("ArrowUp")
    page.wait("() => document.querySelector('tbody tr').className === 'rl-selected'")
    assert board.table.selected == "first" and not board.buttons["Stop"].disabled
    board.show([BoardRow(name, "finished", "here") for name in names])
    page.sync()
    page.wait(
        "() => document.querySelectorAll('.rl-finished').length === 3 && document.activeElement.value === 'first'"
    )
    assert page.errors == []
    page.close()
