"""Test of the forms in JupyterLab: a key is found, changed and rejected by keyboard, and a reward is tried, on both themes."""

from pathlib import Path

import pytest
from conftest import Lab
from inspector_page import book, run_python, wait_for_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = Path(__file__).parents[1] / "golden" / "runs" / "tiny_fast-eval-rl"


def test_forms_are_filled_by_keyboard(lab: Lab, tmp_path: Path):
    cells = (
        "from rstar_lab.rl.forms import RecipeForm, RewardPreview\nform = RecipeForm('tiny_fast')\nform",
        f"preview = RewardPreview({str(RUN)!r}, n=6)\npreview",
    )
    with lab.notebook(book(tmp_path, *cells), size=(1400, 1500)) as opened:
        page = opened.page
        opened.command("application:toggle-left-area")
        opened.run_all()
        search = page.get_by_placeholder("part of a key")
        search.click()
        page.keyboard.type("group_size", delay=20)
        wait_for_python(
            opened, "[key for key, row in form._rows.items() if row in form.body.children][0]", "rl.group_size"
        )
        page.keyboard.press("Tab")
        page.keyboard.press("Control+A")
        page.keyboard.type("zero")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            opened.theme(theme)
            opened.shot(f"forms-{theme.split()[-1].lower()}")
        assert "rl.group_size" in page.locator("[role=alert]").first.inner_text()
        page.keyboard.press("Control+A")
        page.keyboard.type("16")
        page.keyboard.press("Enter")
        wait_for_python(opened, "form.overrides", "{'rl.group_size': 16}")
        page.get_by_label("Answer").select_option("last_number")
        wait_for_python(opened, "preview.answer.value", "last_number")
        assert page.locator("table").last.locator("tr").count() == 7
        assert run_python(opened, "print(len(preview.table))") == "6"
