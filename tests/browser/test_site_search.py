"""The search of the documentation site works when its pages are opened as files, without a server or network.

pytest -m soak tests/browser/test_site_search.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from browser.lab_page import ROOT

pytestmark = pytest.mark.soak


def test_the_search_finds_pages_that_are_opened_as_files(browser, tmp_path):
    mkdocs = Path(sys.executable).parent / "mkdocs"
    subprocess.run([mkdocs, "build", "--quiet", "--site-dir", tmp_path / "site"], cwd=ROOT, check=True)
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "site" / "index.html").as_uri())
    page.locator("input[name=query]").fill("resample")
    page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
    assert [url for url in requests if url.startswith("http")] == []
    page.close()
