"""Tests of what the inspector shows after clicks, keys, searches, errors, growth of the run and a kernel restart."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.inspector_runs import write_run, write_steps
from helpers.tiny_models import make_model

from browser.inspector_page import (
    APP,
    book,
    box_select,
    click_point,
    run_python,
    select,
    wait_for_count,
    wait_for_head,
    wait_for_python,
    wait_for_trajectory,
)
from browser.lab_page import Lab, LabPage
from rstar_lab.analysis.figure_theme import template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path, "roc")
    return path


@pytest.fixture(scope="module")
def opened(lab: Lab, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabPage]:
    """A notebook with a linked figure and an inspector."""
    cells = (
        "from rstar_lab.analysis import inspect, link, open_runs\nfrom rstar_lab.analysis.figures import plot_curves\n"
        f"runs = open_runs({str(folder)!r})\ninspector = inspect(runs)\nlink(plot_curves(runs, ['pass1']), inspector)",
        "inspector",
    )
    with lab.notebook(book(tmp_path_factory.mktemp("book"), *cells), size=(1600, 1300)) as page:
        page.command("application:toggle-left-area")
        page.run_all()
        wait_for_count(page, 192)
        wait_for_head(page, "step 6")
        yield page


@pytest.fixture(autouse=True)
def reset(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "opened" in request.fixturenames:
        page = request.getfixturevalue("opened")
        run_python(page, "inspector.filters = {}; inspector.sort = []; inspector.show()")
        wait_for_count(page, 192)


def text(opened: LabPage, selector: str) -> str:
    return opened.page.locator(f"{APP} {selector}").first.inner_text()


def chosen_is_open(opened: LabPage) -> bool:
    """Return whether the highlighted row is the open trajectory."""
    index = opened.page.evaluate(f"() => Number(document.querySelector('{APP} .rl-chosen')?.dataset.index ?? -1)")
    place = run_python(opened, "print(inspector.source.index_of(inspector.selected, inspector.where, inspector.sort))")
    return str(index) == place


def test_rows_show_the_beginning_of_the_question(opened: LabPage):
    opened.wait(f"() => document.querySelector('{APP} .rl-rows')?.textContent.includes('What is the sum of the first')")
    assert text(opened, ".rl-dhead h2").startswith("What is the sum of the first")


def test_an_sql_error_is_shown_in_view_and_removes_the_rows(opened: LabPage):
    page = opened.page
    page.locator(f"{APP} .rl-sql").fill("reword > 1")
    page.keyboard.press("Enter")
    opened.wait(f"() => document.querySelector('{APP} .rl-alert').textContent.includes('reword')")
    assert text(opened, ".rl-count") == "–"
    assert page.locator(f"{APP} .rl-rows .rl-row").count() == 0
    assert "reword" in text(opened, ".rl-empty")
    alert, rows = (page.locator(f"{APP} {name}").bounding_box() for name in (".rl-alert", ".rl-rows"))
    assert alert["y"] < rows["y"], "the error must be above the list"
    page.locator(f"{APP} button", has_text="Clear filters").click()
    wait_for_count(opened, 192)
    assert text(opened, ".rl-alert") == ""


def test_search_repeated_without_matches_and_cleared(opened: LabPage):
    page, field = opened.page, opened.page.locator(f"{APP} .rl-across")
    for _ in range(2):
        field.fill("call failed")
        field.press("Enter")
        opened.wait(f"() => document.querySelector('{APP} .rl-scope').textContent.includes('call failed')")
        opened.wait(f"() => !document.querySelector('{APP} .rl-status').textContent.includes('Searching')", 20)
    field.fill("no such words")
    field.press("Enter")
    wait_for_count(opened, 0)
    assert "No transcript contains" in text(opened, ".rl-scope")
    field.fill("")
    wait_for_count(opened, 192)
    assert page.locator(f"{APP} .rl-find").input_value() == ""


def test_next_row_after_leaving_the_filter_continues_in_the_list(opened: LabPage):
    page = opened.page
    run_python(opened, "inspector.filters = {'sql': 'sample = 3'}")
    wait_for_count(opened, 24)
    page.locator(f"{APP} .rl-list").focus()
    for index in range(3):
        page.keyboard.press("j")
        opened.wait(f"() => document.querySelector('{APP} .rl-chosen')?.dataset.index === '{index}'", 20)
    wait_for_python(opened, "inspector.rows(3).traj_id[2] == inspector.selected", "True")
    wait_for_head(opened, "sample 3")
    opened.page.wait_for_timeout(300)
    page.keyboard.press("]")
    wait_for_head(opened, "sample 4")
    opened.wait(f"() => !document.querySelector('{APP} .rl-chosen')")
    page.keyboard.press("j")
    opened.wait(f"() => Number(document.querySelector('{APP} .rl-chosen')?.dataset.index) === 3", 20)


def test_labels_and_values_of_tooltip_and_help_do_not_overlap(opened: LabPage):
    page = opened.page
    page.locator(f"{APP} .rl-ribbon").focus()
    page.keyboard.press("ArrowRight")
    page.locator(f"{APP} .rl-tip dl").wait_for()
    overlaps = """selector => [...document.querySelectorAll(selector)].filter(row => {
      const [label, value] = [...row.children].map(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getBoundingClientRect();
      });
      return label.right > value.left || Math.abs(label.top - value.top) > 6;
    }).map(row => row.textContent)"""
    assert page.evaluate(overlaps, f"{APP} .rl-tip dl > div") == []
    page.locator(f"{APP} .rl-list").focus()
    page.keyboard.press("?")
    page.locator(f"{APP} .rl-help[open]").wait_for()
    assert page.evaluate(overlaps, f"{APP} .rl-help dl > div") == []
    page.keyboard.press("Escape")


def test_a_dropped_rollout_shows_log_probs_and_the_reason(opened: LabPage):
    run_python(opened, "inspector.selected = runs.sql('SELECT traj_id FROM trajectories WHERE NOT kept').traj_id[0]")
    opened.wait(f"() => document.querySelector('{APP} .rl-legend').textContent.includes('RoC dropped it')")
    legend = text(opened, ".rl-legend")
    assert "Entropy is not recorded" in legend and "≥ 8" in legend
    assert opened.page.evaluate(
        "() => [...CSS.highlights.keys()].some(name => /^rl-l\\d/.test(name) && CSS.highlights.get(name).size)"
    )


def test_a_click_on_a_curve_reveals_the_list_and_opens_the_first_row(opened: LabPage):
    opened.page.evaluate("() => document.querySelector('.jp-WindowedPanel-outer')?.scrollTo(0, 0)")
    run_python(opened, "inspector.selected = 'roc/6/p1/2'")
    wait_for_head(opened, "step 6")
    click_point(opened, 2)
    wait_for_count(opened, 32)
    wait_for_head(opened, "step 3")
    box = opened.page.locator(APP).bounding_box()
    assert box["y"] < 1300 - 200, "the list must be in view"
    wait_for_python(opened, "inspector.rows(1).traj_id[0] == inspector.selected", "True")


@pytest.mark.parametrize("names", [("reveal", "scope"), ("scope", "reveal")])
def test_a_click_opens_the_first_row_in_any_order_of_its_changes(opened: LabPage, names: tuple[str, str]):
    run_python(opened, "inspector.selected = 'roc/6/p1/2'")
    wait_for_head(opened, "step 6")
    run_python(
        opened,
        "state = {'reveal': inspector.reveal + 1, 'scope': {'label': 'one step', 'filter': {'step': 3}}}\n"
        f"state = {{name: state[name] for name in {names}}}\n"
        "inspector._send({'method': 'update', 'state': state, 'buffer_paths': []})",
    )
    wait_for_count(opened, 32)
    wait_for_head(opened, "step 3")
    run_python(opened, "inspector.set_trait('reveal', state['reveal']); inspector.set_trait('scope', state['scope'])")


def test_a_double_click_in_a_figure_removes_the_selection(opened: LabPage):
    page = opened.page
    box_select(opened, 0, 1)
    wait_for_count(opened, 64)
    assert page.locator(".rl-figure .selectionlayer path").count() > 0
    area = page.locator(".rl-figure .nsewdrag").first.bounding_box()
    page.mouse.dblclick(area["x"] + area["width"] * 0.5, area["y"] + 8)
    wait_for_count(opened, 192)
    opened.wait("() => !document.querySelector('.rl-figure .selectionlayer path')", 20)
    dimmed = (
        "() => [...document.querySelectorAll('.rl-figure .point')].filter(p => Number(p.style.opacity || 1) < 1).length"
    )
    opened.wait(f"() => ({dimmed})() === 0", 20)


def test_figures_follow_the_theme_of_the_page(opened: LabPage):
    for theme, mode in (("JupyterLab Dark", "dark"), ("JupyterLab Light", "light")):
        opened.theme(theme)
        red, green, blue = (int(template(mode).layout.font.color[i : i + 2], 16) for i in (1, 3, 5))
        colour = f"rgb({red}, {green}, {blue})"
        opened.wait(f"() => getComputedStyle(document.querySelector('.rl-figure .xtick text')).fill === '{colour}'")
        opened.shot(f"figure-{mode}", ".rl-figure")


def test_side_by_side_transcripts_scroll_together(opened: LabPage):
    page = opened.page
    run_python(opened, "inspector.selected = 'roc/6/p0/1'")  # long tool output
    wait_for_head(opened, "sample 1")
    page.locator(f"{APP} .rl-list").focus()
    page.keyboard.press("c")
    page.locator(f"{APP} .rl-pane-head").first.wait_for()
    page.locator(f"{APP} .rl-pane .rl-turns").first.hover()
    page.mouse.wheel(0, 100_000)
    opened.wait(f"() => document.querySelectorAll('{APP} .rl-pane .rl-turns')[1].scrollTop > 0", 20)
    page.locator(f"{APP} .rl-list").focus()
    page.keyboard.press("c")


def test_group_and_side_by_side_together_do_not_overlap(opened: LabPage):
    page = opened.page
    run_python(opened, "inspector.selected = runs.sql('SELECT traj_id FROM trajectories WHERE NOT kept').traj_id[0]")
    opened.wait(f"() => document.querySelector('{APP} .rl-legend').textContent.includes('RoC dropped it')")
    for key in "cg":
        page.locator(f"{APP} .rl-list").focus()
        page.keyboard.press(key)
    page.locator(f"{APP} .rl-pane-head").first.wait_for()
    page.locator(f"{APP} .rl-group tr").first.wait_for()
    covered = page.evaluate(
        """app => [...document.querySelectorAll(`${app} .rl-pane`)].flatMap(pane => {
          const parts = ['.rl-pane-head', '.rl-legend', '.rl-ribbon', '.rl-turns'].map(part => pane.querySelector(part));
          return parts.slice(1).filter((part, i) => {
            const range = document.createRange();
            range.selectNodeContents(parts[i]);
            const a = range.getBoundingClientRect(), b = part.getBoundingClientRect();  // side by side or one below the other
            return a.bottom > b.top + 1 && a.top < b.bottom - 1 && a.right > b.left + 1 && a.left < b.right - 1;
          }).map(part => part.className);
        })""",
        APP,
    )
    opened.shot("inspector-group-side-by-side", APP)
    for key in "cg":
        page.locator(f"{APP} .rl-list").focus()
        page.keyboard.press(key)
    assert covered == []


def test_keys_go_to_failed_calls_and_forking_tokens(opened: LabPage):
    page = opened.page
    query = "SELECT traj_id FROM trajectories WHERE errors = 2 AND kept ORDER BY 1"
    select(opened, f"runs.sql({query!r}).traj_id[0]")
    page.locator(f"{APP} .rl-list").focus()
    shown = []
    for key in ("e", "e", "e", "E"):
        page.keyboard.press(key)
        shown.append(text(opened, ".rl-status"))
    assert shown == [f"Failed call {at} of 2: {name}." for at, name in ((1, "exception"), (2, "timeout"))] * 2
    for key in "bbB":
        page.keyboard.press(key)
        shown.append(text(opened, ".rl-status"))
    first, second, back = shown[-3:]
    assert first.startswith("Forking token 1 of ") and second.startswith("Forking token 2 of ") and back == first
    code = "import numpy as np\nr = runs.record(inspector.selected)\nknown = np.array(r['loss_mask'], bool)"
    count = run_python(opened, f"{code} & (np.array(r['entropy'], float) > 0)\nprint(int(np.ceil(known.sum() / 5)))")
    assert f" of {count}: token " in first  # without ties


def test_keys_pressed_before_a_rollout_is_shown_act_on_it(opened: LabPage):
    query = "SELECT * FROM trajectories WHERE sample = 2 AND errors > 0 ORDER BY 1"
    code = f"row = runs.sql({query!r}).iloc[0]; print(row.traj_id, row.errors, row.outcomes[0])"
    traj_id, errors, outcome = run_python(opened, code).split()
    select(opened, "row.traj_id[:-1] + '0'")
    opened.page.locator(f"{APP} .rl-list").focus()
    for key in "]]e":
        opened.page.keyboard.press(key)
    wait_for_trajectory(opened, traj_id)
    assert text(opened, ".rl-status") == f"Failed call 1 of {errors}: {outcome}."
    opened.page.keyboard.press("]")
    wait_for_trajectory(opened, f"{traj_id[:-1]}3")
    assert text(opened, ".rl-status") == "", "the message is about the other rollout"


def test_alternatives_of_a_token_by_keyboard(opened: LabPage, tmp_path: Path):
    page = opened.page
    make_model(tmp_path / "model")
    run_python(opened, "inspector.show(); inspector.selected = 'roc/1/p0/0'")
    wait_for_head(opened, "step 1")
    page.locator(f"{APP} .rl-ribbon").focus()
    for key in ("ArrowRight", "ArrowRight", "a"):
        page.keyboard.press(key)
    page.wait_for_selector(f"{APP} .rl-alternatives .rl-missing")
    assert "no checkpoint" in text(opened, ".rl-alternatives .rl-missing")
    page.locator(f"{APP} .rl-alternatives .rl-weights").fill(str(tmp_path / "model"))
    page.keyboard.press("Enter")
    opened.wait(f"() => document.querySelector('{APP} .rl-alternatives :is(tr.rl-this, .rl-missing)')")
    opened.shot("alternatives", APP)
    assert text(opened, ".rl-alternatives-head span").startswith("Token 2: most likely tokens of")
    page.set_viewport_size({"width": 900, "height": 1300})
    page.wait_for_timeout(300)
    boxes = [page.locator(f"{APP} {name}").bounding_box() for name in (".rl-alternatives", ".rl-ribbon", ".rl-foot")]
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in itertools.pairwise(boxes)), boxes
    page.set_viewport_size({"width": 1600, "height": 1300})
    shown = page.locator(f"{APP} .rl-alternatives tbody tr td:nth-child(4)").all_inner_texts()
    wanted = f"inspector.alternatives(2, model={str(tmp_path / 'model')!r})"
    stored = run_python(opened, f"t = {wanted}; print(' '.join(f'{{x:.3f}}' for x in t.log_prob))").split()
    assert [value.replace("−", "-") for value in shown] == stored
    page.keyboard.press("Escape")
    assert page.locator(f"{APP} .rl-alternatives").is_hidden()
    assert page.evaluate("document.activeElement.className") == "rl-ribbon"
    page.locator(f"{APP} .rl-turns .rl-code pre").first.click(position={"x": 60, "y": 10})
    page.keyboard.press("a")
    opened.wait(f"() => !document.querySelector('{APP} .rl-alternatives').hidden")
    assert not text(opened, ".rl-alternatives-head span").startswith("Token 2:"), "a click selects a token"
    page.keyboard.press("j")
    opened.wait(f"() => document.querySelector('{APP} .rl-alternatives').hidden")


def test_a_view_is_saved_and_chosen_again_by_keyboard(opened: LabPage):
    page = opened.page
    page.locator(f"{APP} .rl-toggles button", has_text="Wrong").click()
    page.locator(f"{APP} .rl-header [data-column=errors] button").click()
    page.locator(f"{APP} .rl-list").focus()
    page.keyboard.press("v")
    page.locator(f"{APP} dialog[open] .rl-column-boxes input[value=truth]").press("Space")
    page.locator(f"{APP} dialog[open] input[type=text]").fill("wrong, most errors")
    page.keyboard.press("Enter")
    saved = page.locator(f"{APP} dialog[open] .rl-views button", has_text="wrong, most errors")
    saved.first.wait_for()
    opened.shot("views", APP)
    page.keyboard.press("Escape")
    assert page.locator(f"{APP} .rl-header [data-column=truth]").count() == 0
    run_python(opened, "inspector.filters = {}; inspector.sort = []; inspector.columns = []")
    wait_for_count(opened, 192)
    page.locator(f"{APP} .rl-header [data-column=truth]").wait_for()

    page.locator(f"{APP} .rl-list").focus()
    page.keyboard.press("v")
    saved.first.press("Enter")
    page.locator(f"{APP} .rl-header [data-column=truth]").wait_for(state="detached")
    opened.wait(
        f"() => document.querySelector('{APP} .rl-header [data-column=errors]').getAttribute('aria-sort') === 'descending'"
    )
    wait_for_python(opened, "inspector.filters, inspector.sort", "{'correct': False} ['errors', True]")
    assert (
        run_python(opened, "print(list(inspector.views), 'truth' in inspector.columns)")
        == "['wrong, most errors'] False"
    )
    page.keyboard.press("v")
    delete = page.locator(f"{APP} dialog[open] .rl-views button", has_text="delete").element_handle()
    run_python(opened, "1")  # the dialog has asked for the views before
    delete.press("Enter")  # the answer keeps the button, and its focus
    opened.wait(f"() => document.querySelector('{APP} dialog[open] .rl-views').textContent.includes('No view')")
    page.keyboard.press("Escape")
    run_python(opened, "inspector.columns = []")


def test_a_link_to_an_unknown_trajectory_shows_a_message(opened: LabPage):
    opened.page.evaluate(
        "() => { const a = document.body.appendChild(document.createElement('a')); a.href = '#rstar=other%2F1'; a.click(); a.remove(); }"
    )
    opened.wait(f"() => document.querySelector('{APP} .rl-alert').textContent.includes('other/1 is not in the runs')")


def test_a_growing_run_keeps_the_open_row_highlighted(lab: Lab, tmp_path: Path):
    steps = write_steps(tmp_path / "runs", "live", steps=4)
    next(steps)
    cells = (
        "from rstar_lab.analysis import inspect\n"
        f"inspector = inspect({str(tmp_path / 'runs')!r}, selected='live/1/p1/2')",
        "inspector",
    )
    with lab.notebook(book(tmp_path, *cells)) as opened:
        opened.run_all()
        wait_for_count(opened, 32)
        wait_for_head(opened, "sample 2")
        opened.wait(f"() => document.querySelector('{APP} .rl-chosen')")
        next(steps)
        next(steps)
        run_python(opened, "inspector.refresh()")
        wait_for_count(opened, 96)
        opened.wait(f"() => document.querySelector('{APP} .rl-count').textContent === '96 of 96 trajectories'", 20)
        opened.wait(f"() => document.querySelectorAll('{APP} .rl-step')[1].placeholder === '3'", 20)
        opened.page.locator(f"{APP} .rl-list").focus()
        opened.wait(f"() => Number(document.querySelector('{APP} .rl-chosen')?.dataset.index ?? 99) > 31", 20)
        opened.page.keyboard.press("j")
        wait_for_head(opened, "sample 3")
        assert chosen_is_open(opened)
    for _ in steps:
        pass


def test_a_kernel_restart_is_shown_and_clicks_do_not_move_the_list(lab: Lab, folder: Path, tmp_path: Path):
    cells = (f"from rstar_lab.analysis import inspect\ninspector = inspect({str(folder)!r})", "inspector")
    with lab.notebook(book(tmp_path, *cells)) as opened:
        opened.run_all()
        wait_for_head(opened, "sample 1")
        opened.restart()
        opened.wait(f"() => document.querySelector('{APP} .rl-alert').textContent.includes('Run this cell again')", 30)
        opened.page.locator(f"{APP} .rl-list").click(position={"x": 60, "y": 28 * 4 + 14})
        opened.page.wait_for_timeout(500)
        assert opened.page.locator(f"{APP} .rl-chosen").get_attribute("data-index") == "1"
        assert "sample 1" in text(opened, ".rl-dhead")
