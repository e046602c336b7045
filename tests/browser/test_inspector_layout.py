"""The layout of the inspector: the transcript gets most of the pane, and nothing overlaps or is cut off at any size."""

import itertools
from pathlib import Path

import pytest
from helpers.inspector_runs import write_run

from browser.widget_page import WidgetPage
from rstar_lab.analysis import explore, inspect, open_runs, plot_curves
from rstar_lab.analysis.filters import where_sql

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PARTS = (".rl-dhead", ".rl-siblings", ".rl-tools", ".rl-band", ".rl-turns", ".rl-foot", ".rl-status")
BOXES = """names => {
  const box = (name) => { const { top, bottom, left, right } = document.querySelector(name).getBoundingClientRect(); return { top, bottom, left, right }; };
  return Object.fromEntries([".rl-app", ".rl-list", ".rl-detail", ...names].map((name) => [name, box(name)]));
}"""  # noqa: E501


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("runs")
    write_run(folder, "roc")
    return open_runs(folder)


def shown(browser, widget, size) -> WidgetPage:
    page = WidgetPage(browser, widget, size)
    page.wait(
        "() => document.querySelectorAll('.rl-seg').length > 1 && document.querySelectorAll('.rl-row').length > 2", 120
    )
    return page


@pytest.mark.parametrize(
    "width, height, share",
    [
        (1400, 900, 0.6),
        (1006, 760, 0.5),
        (1000, 900, 0.6),
        (900, 900, 0.5),
        (700, 900, 0.5),
        (1400, 400, 0.3),
        (900, 400, 0.3),
    ],
)
def test_the_transcript_comes_first_and_nothing_overlaps(browser, runs, width, height, share):
    page = shown(browser, inspect(runs, height=min(760, height)), (width, height))
    boxes = page.page.evaluate(BOXES, list(PARTS))
    turns, detail = boxes[".rl-turns"], boxes[".rl-detail"]
    assert turns["bottom"] - turns["top"] >= share * (detail["bottom"] - detail["top"])
    for above, below in itertools.pairwise(PARTS):
        assert boxes[above]["bottom"] <= boxes[below]["top"] + 1, (above, below, boxes)
    for name in PARTS[:-1]:
        assert boxes[name]["left"] >= detail["left"] - 1 and boxes[name]["right"] <= detail["right"] + 1, name
    # All of it can be reached by scrolling the one scroll area.
    reach = page.page.locator(".rl-app").evaluate("app => app.scrollHeight - app.clientHeight")
    assert boxes[".rl-status"]["bottom"] - reach <= boxes[".rl-app"]["bottom"] + 1
    assert page.page.locator(".rl-tools").evaluate("row => row.scrollWidth - row.clientWidth") <= 0, (
        "a tool is out of view"
    )
    if width >= 1400:  # the columns up to the tokens are in view
        place = page.page.locator('[data-column="response_tokens"]').bounding_box()
        assert place["x"] + place["width"] <= boxes[".rl-list"]["right"] + 1
    assert page.errors == []
    page.close()


def test_problems_and_two_transcripts_are_readable_beside_the_file_browser(browser, runs):
    page = shown(browser, inspect(runs, height=760), (1006, 780))
    assert page.page.locator('[data-column="problem_id"]').bounding_box()["width"] >= 180
    for name in ("Group", "Side by side"):
        page.page.locator(".rl-tools .rl-toggle", has_text=name).click()
    page.wait("() => document.querySelectorAll('.rl-pane .rl-seg').length > 3")
    heights = page.page.evaluate(
        "() => [...document.querySelectorAll('.rl-turns, .rl-detail')].map(e => e.clientHeight)"
    )
    assert len(heights) == 3 and min(heights) >= max(heights) / 2
    assert page.errors == []
    page.close()


@pytest.mark.parametrize("width", [900, 1000, 1400, 1520, 1700, 2120])
def test_one_screen_leaves_the_transcript_250_pixels(browser, runs, width):
    page = shown(browser, explore([plot_curves(runs, ["pass1"])], runs), (width, 900))
    boxes = page.page.evaluate(BOXES, list(PARTS))
    assert boxes[".rl-turns"]["bottom"] - boxes[".rl-turns"]["top"] >= 250
    assert page.page.locator(".rl-tools").evaluate("row => row.scrollWidth - row.clientWidth") <= 0, (
        "a tool is out of view"
    )
    for above, below in itertools.pairwise(PARTS):
        assert boxes[above]["bottom"] <= boxes[below]["top"] + 1, (above, below, boxes)
    assert page.errors == []
    page.close()


def test_a_run_that_is_chosen_in_the_list_replaces_that_of_a_figure(browser, runs, tmp_path):
    for run_id in ("one", "two"):
        write_run(tmp_path, run_id, steps=1, problems=1)
    widget = inspect(tmp_path)
    page = shown(browser, widget, (1400, 900))
    widget.show("run one, step 1", run_id=["one"], step=1)
    page.wait("() => document.querySelector('.rl-scope').textContent.includes('run one')")
    page.page.get_by_label("All runs").select_option("two")
    page.wait("() => document.querySelector('.rl-count').textContent.startsWith('8 of 16')")
    assert widget.scope == {} and widget.filters == {"run_id": "two"}
    page.close()


def test_filters_without_a_control_are_shown_and_can_be_removed(browser, runs):
    widget = inspect(runs, {"step": 1, "ranges": {"turns": [2, 9]}, "correct": False})
    page = shown(browser, widget, (1400, 900))
    chips = page.page.locator(".rl-others .rl-chip")
    assert [text.rstrip(" ×") for text in chips.all_inner_texts()] == ["step: 1", 'ranges: {"turns":[2,9]}']
    chips.nth(1).locator("button").click()
    count = runs.count(where_sql({"step": 1, "correct": False}))
    page.wait(f"() => document.querySelector('.rl-count').textContent.startsWith('{count} of')")
    assert widget.filters == {"step": 1, "correct": False} and page.page.locator(".rl-others .rl-chip").count() == 1
    page.close()


def test_the_fields_of_a_note_appear_when_they_are_used(browser, runs):
    widget = inspect(runs)
    page = shown(browser, widget, (1400, 900))
    assert page.page.locator(".rl-notes").is_hidden()
    page.page.locator(".rl-list").focus()
    page.page.keyboard.press("n")
    assert page.page.locator(".rl-note-text").is_visible()
    page.page.locator(".rl-note-text").fill("odd")
    page.page.keyboard.press("Enter")
    page.wait("() => document.querySelector('.rl-status').textContent.includes('Note saved')")
    assert runs.count({"noted": True}) == 1
    page.close()


def test_the_state_of_one_notebook_never_acts_in_another(browser, runs, monkeypatch):
    places = []
    for notebook in ("a.ipynb", "b.ipynb", ""):
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
        places += [inspect(runs).place for _ in range(2)]
    assert len({place for place in places if place}) == 4 and places[4:] == ["", ""]


def test_the_first_rollout_that_opens_has_token_values(browser, runs):
    widget = inspect(runs)
    page = shown(browser, widget, (1400, 900))
    first, opened = widget.rows(1).iloc[0], runs.trajectories({"traj_id": widget.selected}).iloc[0]
    assert first.entropy is None and opened.entropy > 0  # dropped rollouts have none
    assert "not recorded" not in page.page.locator(".rl-legend").inner_text()
    assert widget.selected in inspect(runs).static_html()
    page.close()


def test_a_reply_to_earlier_filters_is_ignored_and_a_slow_kernel_is_shown(browser, runs):
    widget = inspect(runs)
    page = shown(browser, widget, (1400, 900))
    held = []
    widget.send = lambda content, buffers=(): held.append((content, buffers))
    correct = page.page.locator(".rl-toggles button").first
    correct.click()
    page.wait("() => document.querySelector('.rl-busy')")
    shown_after = "() => getComputedStyle(document.querySelector('.rl-count'), '::after').content"
    assert "loading" in page.page.evaluate(shown_after)
    widget.send = page._collect
    correct.click()
    page.wait(f"() => document.querySelector('.rl-count').textContent.startsWith('{runs.count()} of')")
    for reply in held:
        page._collect(*reply)
    page.sync()
    page.wait("() => !document.querySelector('.rl-busy')")
    assert page.page.locator(".rl-count").inner_text().startswith(f"{runs.count()} of")
    assert page.errors == []
    page.close()
