"""Every widget, page and figure of a run whose texts are all hostile: no script runs, no request leaves, nothing is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_run import make_hostile_run
from widget_page import WidgetPage

import rstar_lab.analysis as analysis
from rstar_lab.analysis import explore, inspect, open_runs, overview
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.report import report_html

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_hostile_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(run):
    return open_runs(run)


def provoke(page: Any) -> None:
    """Send the events of handlers in markup to all elements, and move the mouse over the page."""
    page.evaluate(
        """() => {
          for (const element of document.querySelectorAll('*'))
            for (const name of ['error', 'load', 'toggle', 'animationstart']) element.dispatchEvent(new Event(name));
        }"""
    )
    for x in range(50, 1300, 150):
        page.mouse.move(x, 300)
    page.wait_for_timeout(100)


def check(page: Any, errors: list[str], requests: list[str]) -> None:
    provoke(page)
    found = page.evaluate(
        """names => ({
          hacked: window.hacked ?? 0,
          elements: [...document.querySelectorAll(names)].map(e => e.outerHTML.slice(0, 80)),
          handlers: [...document.querySelectorAll('*')].filter(e => [...e.attributes].some(a => a.name.startsWith('on'))).length,
          links: [...document.querySelectorAll('[href], [src], [action]')].map(
            e => e.getAttribute('href') ?? e.getAttribute('src') ?? '').filter(t => /^\\s*javascript:/i.test(t)),
          hidden: getComputedStyle(document.body).display === 'none',
        })""",
        "img, iframe, object, link, form:not([method=dialog]), meta[http-equiv=refresh], base, embed",
    )
    assert found == {"hacked": 0, "elements": [], "handlers": 0, "links": [], "hidden": False}
    assert [url for url in requests if not url.startswith(("about:", "blob:", "data:", "file:"))] == []
    assert errors == []


def test_the_inspector_shows_every_rollout(browser, run, runs):
    shown = WidgetPage(browser, inspect(runs), (1400, 900))
    shown.wait("() => document.querySelectorAll('.rl-seg').length > 1")
    for traj_id in list(runs.trajectories("step = 3", columns=["traj_id"]).traj_id)[:3]:
        shown.widget.selected = traj_id
        shown.sync()
        shown.wait(f"() => document.querySelector('.rl-detail').dataset.traj === {json.dumps(traj_id)}")
        for key in "grcv":  # the group, raw tokens, comparison, views
            shown.page.locator(".rl-list").focus()
            shown.page.keyboard.press(key)
            shown.page.wait_for_timeout(50)
        shown.page.keyboard.press("Escape")
        shown.page.evaluate("() => document.querySelectorAll('dialog').forEach(box => box.close())")
    shown.page.fill(".rl-across", "onerror")
    shown.page.keyboard.press("Enter")
    shown.wait("() => document.querySelector('.rl-scope .rl-chip')")
    check(shown.page, shown.errors, shown.requests)
    assert shown.page.evaluate(
        "() => document.querySelector('.rl-app').scrollWidth <= document.querySelector('.rl-app').clientWidth + 2"
    )
    shown.close()


def test_a_view_of_the_folder_is_text_too(browser, runs):
    widget = inspect(runs)
    widget.show_view(next(iter(widget.views)))
    shown = WidgetPage(browser, widget)
    shown.wait("() => document.querySelector('.rl-scope .rl-chip')")
    check(shown.page, shown.errors, shown.requests)
    shown.close()


def figures(runs) -> dict[str, Any]:
    failed = analysis.failed_rollouts(runs)
    return {
        "curves": analysis.plot_curves(runs, ["pass1", "turns"]),
        "ablation": analysis.plot_ablation(runs, "label", ["pass1"]),
        "environment": analysis.plot_curves(runs, ["pass1"], by="environment"),
        "lengths": analysis.plot_lengths(runs),
        "outcomes": analysis.plot_outcomes(runs),
        "pass_at_k": analysis.plot_pass_at_k(runs, (1, 2)),
        "heatmap": analysis.plot_heatmap(runs, "hostile"),
        "failures": analysis.plot_failures(failed),
        "failure map": analysis.plot_failure_map(failed),
        "tool use": analysis.plot_tool_use(runs),
        "timeline": analysis.plot_timeline(runs, "hostile", 2),
    }


def test_figures_draw_hostile_names(browser, runs):
    for name, figure in figures(runs).items():
        shown = WidgetPage(browser, LinkedFigure(figure, None), (900, 500))
        shown.wait("() => document.querySelector('.main-svg')")
        box = shown.page.locator(".main-svg").first.bounding_box()
        for x in range(100, 900, 100):
            shown.page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)
        check(shown.page, [f"{name}: {error}" for error in shown.errors], shown.requests)
        shown.close()


def test_explore_and_overview(browser, run, runs):
    shown = WidgetPage(browser, explore([analysis.plot_curves(runs, ["pass1"])], runs), (1400, 1000))
    shown.wait("() => document.querySelectorAll('.rl-seg').length > 1 && document.querySelector('.main-svg')")
    check(shown.page, shown.errors, shown.requests)
    shown.close()
    table = overview(run.parent)
    shown = WidgetPage(browser, table.table)
    shown.wait("() => document.querySelectorAll('.rl-overview tbody tr').length === 1")
    check(shown.page, shown.errors, shown.requests)
    shown.close()


def static_pages(run: Path, runs) -> dict[str, str]:
    widget = inspect(runs)
    traj_id = runs.trajectories(columns=["traj_id"]).traj_id[0]
    return {
        "static": widget.static_html(),
        "export": widget.html(traj_id),
        "report": report_html(run, sample=8),
        "overview": overview(run.parent).to_html(),
        "comparison": analysis.compare(runs, runs)._repr_html_(),
    }


def test_static_pages(browser, run, runs, tmp_path):
    for name, text in static_pages(run, runs).items():
        file = tmp_path / f"{name}.html"
        file.write_text(
            text if "<html" in text else f"<!doctype html><meta charset=utf-8><body>{text}", encoding="utf-8"
        )
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        errors, requests = [], []
        page.on("pageerror", lambda error, name=name, errors=errors: errors.append(f"{name}: {error}"))
        page.on(
            "console",
            lambda message, name=name, errors=errors: (
                errors.append(f"{name}: {message.text}") if message.type == "error" else None
            ),
        )
        page.on("request", lambda request, requests=requests: requests.append(request.url))
        page.goto(f"file://{file}", wait_until="domcontentloaded", timeout=120_000)
        page.wait_for_timeout(300)
        check(page, errors, requests)
        assert page.evaluate("() => document.body.innerText").count("onerror") >= (name != "comparison")
        page.close()
        assert "\x1b" not in text and "\u202e" not in text
