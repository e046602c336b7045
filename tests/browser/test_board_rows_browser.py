"""The rows of the job board."""

from typing import Any

import pytest

from browser.widget_page import WidgetPage
from rstar_lab.jobs.board import BoardRow, BoardWidget, JobBoard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
