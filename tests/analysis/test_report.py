"""The report of a run: complete, self-contained, computed from the run, and safe with hostile transcripts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.analysis_runs import make_run
from helpers.inspector_runs import HOSTILE, write_run

import rstar_lab
from rstar_lab.analysis import open_runs
from rstar_lab.analysis.metrics import measure
from rstar_lab.analysis.report import report_html
from rstar_lab.runs import RunStoreError

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"


@pytest.fixture(scope="module")
def page():
    return report_html(GOLDEN / "tiny_fast-rl")


def test_the_numbers_are_those_of_the_run(page):
    runs = open_runs(GOLDEN / "tiny_fast-rl")
    first = measure(runs, ["pass1"], by=(), where="step <= 2").iloc[0]
    assert f"{first.value:.1%} [{first.low:.1%}, {first.high:.1%}] in steps 1 to 2" in page
    assert f"{runs.count():,}" in page


def test_the_page_loads_nothing_and_fits_the_limit(page):
    assert len(page) < 15e6
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?https?:", own)
    assert "default-src 'none'" in page


def test_no_rule_of_a_style_sheet_is_inside_a_list_of_selectors():
    sheets = list((Path(rstar_lab.__file__).parent).rglob("*.css"))
    assert len(sheets) > 1
    assert [sheet.name for sheet in sheets if re.search(r",\s*@", sheet.read_text())] == []


def trajectories_of(page: str) -> list[dict[str, Any]]:
    texts = re.findall(r'<script type="application/json" id="trajectory-\d+">(.*?)</script>', page, re.DOTALL)
    return [json.loads(text) for text in texts]


def test_the_same_run_gives_the_same_trajectories(page):
    ids = [data["row"]["traj_id"] for data in trajectories_of(page)]
    again = trajectories_of(report_html(GOLDEN / "tiny_fast-rl"))
    assert ids == [data["row"]["traj_id"] for data in again] and len(ids) == 60 == len(set(ids))


def test_problems_are_named_by_their_question(page):
    labels = re.findall(r'<button type="button"><b[^>]*>.</b> ([^<]+)<small>step \d', page)
    titles = [data["title"] for data in trajectories_of(page)]
    assert len(labels) == len(titles) == 60
    assert all("?" in text and not re.search(r"[0-9a-f]{16}", text) for text in labels + titles)


def test_an_evaluation_of_one_step_and_a_comparison():
    page = report_html(GOLDEN / "tiny_fast-eval-rl", compare_with=GOLDEN / "tiny_fast-eval-sft", sample=5)
    assert "<h2>Comparison</h2>" in page and "<h2>Curves</h2>" not in page
    assert len(trajectories_of(page)) == 5


def test_a_page_says_that_it_leaves_out_the_token_values_of_long_responses(monkeypatch):
    monkeypatch.setattr("rstar_lab.analysis.report.TOKEN_LIMIT", 1)
    page = report_html(GOLDEN / "tiny_fast-rl", sample=8)
    kept = [data for data in trajectories_of(page) if data["row"]["kept"]]
    assert kept and all(data["tokens"] == 0 and data["omitted"] for data in kept)


def test_hostile_text_stays_text(tmp_path):
    write_run(tmp_path, "hostile", steps=2, problems=1, group=4)
    page = report_html(tmp_path / "hostile", sample=8)
    assert HOSTILE[:30] not in page, "the raw text is nowhere in the page"
    assert len(trajectories_of(page)) == 8
    assert page.count("</script>") == page.count("<script"), "no text ends an element"


def test_a_run_without_trajectories_is_an_error():
    with pytest.raises(RunStoreError, match="no trajectories"):
        report_html(GOLDEN / "tiny_fast-sft")


@pytest.mark.parametrize("level", ["trajectories", "transcripts"])
def test_a_damaged_table_is_named_and_the_rest_is_shown(level, tmp_path):
    make_run(tmp_path, "a", steps=3)
    file = next((tmp_path / "a" / level).rglob("step=000002.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    page = report_html(tmp_path / "a")
    assert "Damaged files, which are left out" in page and f"{file}: truncated" in page
    assert "<h2>Trajectories</h2>" in page
