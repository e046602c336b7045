"""Tests of the inspector in JupyterLab and Chromium."""

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from helpers.inspector_runs import HOSTILE, write_run
from helpers.notebooks import execute

from browser.inspector_page import (
    APP,
    axe_violations,
    book,
    box_select,
    click_point,
    run_python,
    wait_for_count,
    wait_for_head,
    wait_for_python,
    wait_for_sample,
)
from browser.lab_page import ROOT, Lab
from rstar_lab.analysis.inspector.inspector import Inspector, inspect
from rstar_lab.analysis.inspector.notes import read_notes
from rstar_lab.analysis.inspector.palette import SCALES, join_modules
from rstar_lab.untrusted.text import visible

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GOLDEN = ROOT / "tests" / "golden" / "runs"
HOSTILE_ID = "roc/6/p0/1"
PLOTLY = "application/vnd.plotly.v1+json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path, "grpo", seed=1)
    write_run(path, "roc")
    return path


def test_notebook_05_from_curve_to_transcript_and_after_a_restart(lab: Lab, folder: Path):
    with lab.notebook("05_inspect.ipynb", parameters={"runs_dir": str(folder)}, size=(1600, 1200)) as opened:
        page = opened.page
        opened.command("application:toggle-left-area")
        opened.run_all()
        wait_for_head(opened, "step 6")
        wait_for_count(opened, 384)
        page.locator(APP).first.scroll_into_view_if_needed()
        opened.shot("inspector-light", APP)

        # Filter the list.
        page.locator(f"{APP} .rl-toggle", has_text="Wrong").first.click()
        page.locator(f"{APP} .rl-toggle", has_text="Tool errors").first.click()
        opened.wait(f"() => parseInt(document.querySelector('{APP} .rl-count').textContent) < 384")
        wait_for_count(opened, int(run_python(opened, "print(runs.count('errors > 0 and not reward > 0'))")))
        wait_for_python(opened, "sorted(inspector.filters.items())", "[('correct', False), ('errors', True)]")
        page.locator(f"{APP} .rl-sql").first.fill("reword > 1")
        page.keyboard.press("Enter")
        opened.wait(f"() => document.querySelector('{APP} .rl-alert').textContent.includes('reword')")
        page.locator(f"{APP} button", has_text="Clear filters").first.click()
        wait_for_count(opened, 384)

        # Curve -> trajectories: a box around two steps of both runs, then one point.
        box_select(opened, 0, 1)
        wait_for_count(opened, 128)
        chosen = run_python(
            opened,
            "print(*sorted(inspector.rows()[['run_id', 'step']].agg('{0[run_id]} {0[step]}'.format, axis=1).unique()))",
        )
        assert chosen == "grpo 1 grpo 2 roc 1 roc 2"
        page.locator(f"{APP} button", has_text="Show all").first.click()
        wait_for_count(opened, 384)
        click_point(opened, 2)
        wait_for_count(opened, 32)
        label = page.locator(f"{APP} .rl-scope .rl-chip").first.inner_text()
        assert label == "run grpo, step 3"
        page.locator(f"{APP} .rl-list").first.click(position={"x": 60, "y": 42})
        wait_for_head(opened, "step 3")
        wait_for_sample(opened, 0)

        # Siblings, by keyboard; the ribbon, by keyboard.
        page.keyboard.press("]")
        wait_for_sample(opened, 1)
        wait_for_python(opened, "inspector.selected", "grpo/3/p0/1")
        colours = "() => [...CSS.highlights.keys()].filter(name => /^rl-[elm]\\d/.test(name) && CSS.highlights.get(name).size).join()"
        page.keyboard.press("2")
        opened.wait(f"() => ({colours})().startsWith('rl-l') || ({colours})().includes('rl-l')")
        page.keyboard.press("4")
        opened.wait(f"() => ({colours})().includes('rl-m1')")
        page.locator(f"{APP} .rl-ribbon").first.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        tip = page.locator(f"{APP} .rl-tip").first
        assert "token" in tip.inner_text() and "entropy" in tip.inner_text()
        page.locator(f"{APP} .rl-list").first.focus()
        page.keyboard.press("j")
        wait_for_sample(opened, 2)

        # Group and side by side.
        page.keyboard.press("1")
        page.keyboard.press("g")
        page.wait_for_selector(f"{APP} .rl-group table")
        assert "kept (mean penalty" in page.locator(f"{APP} .rl-summary").first.inner_text()
        page.keyboard.press("c")
        page.wait_for_selector(f"{APP} .rl-pane-head")
        opened.wait(f"() => document.querySelector('{APP} .rl-status').textContent.includes('underlined')")
        opened.shot("inspector-group", APP)
        page.locator(f"{APP} .rl-list").first.focus()
        page.keyboard.press("g")
        opened.shot("inspector-side-by-side", APP)
        page.keyboard.press("c")

        # Search across, find inside, a note, a link.
        page.keyboard.press("s")
        page.keyboard.type("call failed")
        page.keyboard.press("Enter")
        opened.wait(f"() => document.querySelector('{APP} .rl-scope').textContent.includes('call failed')")
        opened.wait(f"() => document.querySelector('{APP} .rl-found').textContent.startsWith('1 of')")
        page.locator(f"{APP} .rl-list").first.focus()
        page.keyboard.press("n")
        page.keyboard.type("recovers from its error")
        page.keyboard.press("Enter")
        opened.wait(f"() => document.querySelector('{APP} .rl-status').textContent.includes('saved')")
        noted = {traj_id: note for run_id in ("grpo", "roc") for traj_id, note in read_notes(folder / run_id).items()}
        assert [note["note"] for note in noted.values()] == ["recovers from its error"]
        chosen = next(iter(noted))
        wait_for_python(opened, "inspector.selected", chosen)
        page.locator(f"{APP} button", has_text="Copy link").first.click()
        opened.wait(f"() => document.querySelector('{APP} .rl-status').textContent.includes('Link copied')")
        assert page.evaluate("navigator.clipboard.readText()").endswith(chosen.replace("/", "%2F"))

        # After a restart, running the cells again opens the same trajectory.
        opened.restart()
        opened.run_all()
        wait_for_head(opened, f"sample {chosen.rsplit('/', 1)[1]}")
        wait_for_python(opened, "inspector.selected", chosen)
        opened.wait(f"() => document.querySelector('{APP} .rl-note-text').value === 'recovers from its error'")


def test_axe_finds_no_accessibility_violation(lab: Lab, folder: Path, tmp_path: Path, axe: Path):
    """axe-core's rules for WCAG 2.2 AA, light and dark, with all panels open."""
    cells = (
        f"from rstar_lab.analysis import inspect\ninspector = inspect({str(folder)!r}, selected='grpo/3/p0/1')",
        "inspector",
    )
    with lab.notebook(book(tmp_path, *cells), size=(1600, 1100)) as opened:
        opened.run_all()
        wait_for_head(opened, "sample 1")
        page = opened.page
        page.locator(f"{APP} .rl-list").first.focus()
        page.keyboard.press("g")
        page.keyboard.press("c")
        page.wait_for_selector(f"{APP} .rl-pane-head")
        page.keyboard.press("a")  # the run has no checkpoint, so the panel shows an error
        page.wait_for_selector(f"{APP} .rl-alternatives .rl-missing")
        page.add_script_tag(path=axe)
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            opened.theme(theme)
            opened.shot(f"inspector-{theme.split()[1].lower()}-group", APP)
            assert axe_violations(opened) == [], theme
            for key in "v?":  # dialogs
                page.locator(f"{APP} .rl-list").first.focus()
                page.keyboard.press(key)
                page.wait_for_selector(f"{APP} dialog[open]")
                assert axe_violations(opened) == [], (theme, key)
                page.keyboard.press("Escape")


def test_a_hostile_transcript_is_shown_as_text(lab: Lab, folder: Path, tmp_path: Path):
    cells = (
        f"from rstar_lab.analysis import compare, inspect, open_runs\ninspector = inspect({str(folder)!r})",
        "inspector",
        f"before, after = (open_runs({str(folder)!r}, run_ids=[name]) for name in ('grpo', 'roc'))\n"
        "card = compare(before, after, ['pass1'], where='step = 2')\ncard",
    )
    with lab.notebook(book(tmp_path, *cells), fragment=f"#rstar={quote(HOSTILE_ID, safe='')}") as opened:
        opened.run_all()
        wait_for_head(opened, "sample 1")  # the link's trajectory is open
        page = opened.page
        text = visible(HOSTILE)
        opened.wait(
            f"() => [...document.querySelectorAll('{APP} pre')].some(pre => pre.textContent.includes({json.dumps(text[:200])}))",
            30,
        )
        state = page.evaluate(
            f"() => [window.hacked ?? null, document.querySelectorAll('{APP} pre *').length,"
            f" document.querySelectorAll('{APP} :is(script, img, style)').length,"
            f" document.querySelector('{APP} .rl-turns').scrollWidth <= document.querySelector('{APP} .rl-turns').clientWidth]"
        )
        assert state == [None, 0, 0, True], "markup was parsed, or a long line broke the page"
        opened.shot("inspector-hostile", APP)
        with page.expect_download() as saved:
            page.locator(f"{APP} button", has_text="HTML").click()
        exported = tmp_path / "exported.html"
        saved.value.save_as(exported)
        # A link in a comparison opens its trajectory in the inspector.
        page.locator("details summary", has_text="problems won").click()
        page.locator("details a code").first.click()
        wait_for_python(opened, "inspector.selected == card.flips.traj_a[0]", "True")
        wait_for_head(opened, "step 2")
    assert_inert(lab, exported, "inspector-export")
    exported.write_text(inspect(folder).html("roc/6/p1/2"), encoding="utf-8")
    assert_inert(lab, exported, "inspector-export-plain")


def assert_inert(lab: Lab, exported: Path, name: str) -> None:
    """Assert that the page runs only its own script, loads nothing, and applies its own style."""
    context = lab.browser.new_context(viewport={"width": 1000, "height": 1100})
    page, requested, errors = context.new_page(), [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(exported.as_uri())
    assert page.evaluate("() => window.hacked ?? null") is None
    assert page.locator("pre").count() > 3 and page.locator("img, a").count() == 0
    assert page.evaluate("() => getComputedStyle(document.querySelector('pre')).whiteSpace") == "pre-wrap", (
        "the page's own style sheet was blocked"
    )
    if page.locator(".rl-channels").is_visible():
        page.get_by_label("Mask").check(force=True)
        assert page.evaluate("() => CSS.highlights.get('rl-m1').size") > 0
        page.locator(".rl-ribbon").focus()
        page.keyboard.press("ArrowRight")
        assert "token" in page.locator(".rl-tip").inner_text()
    page.screenshot(path=ROOT / "out" / "screenshots" / f"{name}.png")
    # A script inserted into the page is blocked by the content security policy.
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 3'; document.body.append(s); }"
    )
    assert page.evaluate("() => window.hacked ?? null") is None
    assert requested == [exported.as_uri()] and not [
        error for error in errors if "Content Security Policy" not in error
    ]
    context.close()


@pytest.fixture
def load() -> Iterator[None]:
    """Two processes that keep two cores busy."""
    busy = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(2)]
    for process in busy:
        process.start()
    yield
    for process in busy:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


# anywidget aborts a model start after two seconds; this aborts the first start at once.
LATE = """(() => {
  const timeout = AbortSignal.timeout.bind(AbortSignal);
  let late = 1;
  AbortSignal.timeout = ms => timeout(ms === 2000 && late-- > 0 ? 0 : ms);
})();"""


@pytest.mark.soak
def test_a_widget_recovers_from_a_late_start(lab: Lab, folder: Path, tmp_path: Path, load: None):
    cells = (
        f"from rstar_lab.analysis import inspect\ninspector = inspect({str(folder)!r}, selected='roc/3/p1/2')",
        "inspector",
    )
    with lab.notebook(book(tmp_path, *cells), init=LATE) as opened:
        opened.run_all()
        wait_for_head(opened, "sample 2")
        assert opened.late_starts, "no start was aborted, so this test checks nothing"
        run_python(opened, "inspector.show('one step', step=2, run_id='roc')")
        wait_for_count(opened, 32)


def test_notebook_05_is_readable_without_a_kernel(lab: Lab, tmp_path: Path):
    executed = execute("05_inspect.ipynb", tmp_path, {"runs_dir": str(GOLDEN)})
    out = tmp_path / "05_inspect.ipynb"
    assert out.stat().st_size < 2_000_000
    shown = [output.get("data", {}) for cell in executed.cells for output in cell.get("outputs", [])]
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in shown)
    figures = [data[PLOTLY]["data"] for data in shown if PLOTLY in data]
    # Curves, heat map, outcomes, failures, timeline, the watched run, and the overview.
    assert len(figures) == 7 and "kept by RoC" in str(figures[3])
    assert ">tool errors in correct</th>" in "".join("".join(data.get("text/html", "")) for data in shown)
    drawn = [trace["customdata"] for trace in figures[0] if "customdata" in trace]
    assert len(drawn) == 2 and len(drawn[0]) == 8, "one training run, two metrics, eight steps"
    with lab.notebook(out) as opened:
        page = opened.page
        opened.wait("() => document.querySelectorAll('.jp-OutputArea-output').length > 5")
        page.locator("text=1,920 trajectories").first.scroll_into_view_if_needed()
        opened.wait(
            "() => [...document.querySelectorAll('.jp-OutputArea-output .rl-page pre')].some(pre => pre.textContent.includes('math.gcd('))",
            30,
        )
        assert page.locator("text=model not found").count() == 0
        # JupyterLab's styles of tables do not apply: no cell overflows.
        crowded = (
            "() => [...document.querySelectorAll('.rl-page td')].filter(td => td.scrollWidth > td.clientWidth).length"
        )
        assert page.evaluate(crowded) == 0
        opened.shot("inspector-static")


DRAW = (Path(__file__).parent / "draw_transcript.js").read_text()


def test_a_transcript_of_10000_tokens_is_drawn_within_150_ms(browser: Any):
    """Draw and recolour 10,000 tokens. CPU time of the page is measured, which does not depend on other processes."""
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.evaluate(DRAW, [join_modules("dom", "python", "tokens", "transcript"), Inspector._css, SCALES])
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    for action in ("drawn", "recoloured"):
        took = []
        for _ in range(3):
            before = busy_ms()
            page.evaluate(f"() => window.{action}()")
            took.append(busy_ms() - before)
        print(f"10,000 tokens {action} in {min(took):.0f} ms")
        assert min(took) < 150, f"{action}: {took} ms"
    assert page.evaluate("() => window.ranges()") > 5000
    page.close()
