"""The report of a run opens from disk in a browser, without errors and without network."""

from pathlib import Path

import pytest

from rstar_lab.analysis.report import report_html

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(GOLDEN / "tiny_fast-rl"))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_works_from_disk(browser, file, scheme):
    page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=scheme)
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"file://{file}")
    page.wait_for_selector(f".on-{scheme} .main-svg")
    assert page.locator("#list li:visible").count() == 60
    assert page.locator("#shown article").count() == 1
    assert page.locator("#shown .rl-turns").bounding_box()["height"] > 100
    page.select_option("#filter", "errors")
    with_errors = page.locator("#list li:visible").count()
    assert 0 < with_errors < 60 and page.locator("#count").inner_text() == f"{with_errors} of 60"
    page.locator("#list li:visible button").first.focus()
    before = page.locator("#shown .rl-id").inner_text()
    page.keyboard.press("ArrowDown")
    assert page.locator("#shown .rl-id").inner_text() != before
    page.fill("#search", "no transcript has this text")
    assert page.locator("#list li:visible").count() == 0
    other = "dark" if scheme == "light" else "light"
    assert not page.locator(f".on-{other} .main-svg").first.is_visible()
    assert problems == [] and [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()
