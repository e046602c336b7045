"""Every widget, page and figure of a run whose texts are all hostile: no script runs, no request leaves, nothing is broken."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_run import hostile, make_hostile_run

import rstar_lab.analysis as analysis
from browser.inspector_page import book
from browser.widget_page import WidgetPage
from rstar_lab.analysis import explore, inspect, open_runs, overview
from rstar_lab.analysis.inspector.link import LinkedFigure
from rstar_lab.analysis.inspector.overview import render_overview
from rstar_lab.analysis.report import report_html
from rstar_lab.jobs.store import JobFolder, JobSpec

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


def check(page: Any, errors: list[str], requests: list[str], inside: str = "", own: str = "about:") -> None:
    """inside: selector of the part of the page that is ours. own: start of the addresses that the page may ask for."""
    provoke(page)
    found = page.evaluate(
        """([names, inside]) => ({
          hacked: window.hacked ?? 0,
          elements: [...document.querySelectorAll(names)].filter(e => e.closest(inside)).map(e => e.outerHTML.slice(0, 80)),
          handlers: [...document.querySelectorAll(`${inside} *`)]
            .filter(e => [...e.attributes].some(a => a.name.startsWith('on'))).length,
          links: [...document.querySelectorAll('[href], [src], [action]')].map(
            e => e.getAttribute('href') ?? e.getAttribute('src') ?? '').filter(t => /^\\s*javascript:/i.test(t)),
          hidden: getComputedStyle(document.body).display === 'none',
        })""",
        [
            "img:not(.plot-img), iframe, object, link, form:not([method=dialog]), meta[http-equiv=refresh], base, embed",
            inside or "html",
        ],
    )
    assert found == {"hacked": 0, "elements": [], "handlers": 0, "links": [], "hidden": False}
    assert [url for url in requests if not url.startswith(("about:", "blob:", "data:", "file:", own))] == []
    assert errors == []


def test_the_inspector_shows_every_rollout(browser, run, runs):
    shown = WidgetPage(browser, inspect(runs), (1400, 900))
    shown.wait("() => document.querySelectorAll('.rl-seg').length > 1")
    for traj_id in list(runs.trajectories("step = 3", columns=["traj_id"]).traj_id)[:3]:
        shown.widget.selected = traj_id
        shown.sync()
        shown.wait(f"() => document.querySelector('.rl-detail')?.dataset.traj === {json.dumps(traj_id)}")
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
        "ablation": analysis.plot_curves(runs, ["pass1"], by="label"),
        "environment": analysis.plot_curves(runs, ["pass1"], by="environment"),
        "lengths": analysis.plot_lengths(runs),
        "outcomes": analysis.plot_outcomes(runs),
        "pass_at_k": analysis.plot_pass_at_k(runs, (1, 2)),
        "heatmap": analysis.plot_heatmap(runs, "hostile"),
        "failures": analysis.plot_failures(failed),
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
        "overview": render_overview(overview(run.parent).rows),
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


def make_hostile_jobs(runs_dir: Path) -> None:
    """Write jobs whose files have hostile texts: own ones, and damaged ones that others could have written."""
    for number in range(6):
        text = hostile(number)
        folder = JobFolder.of(runs_dir, f"job-{number}")
        spec = JobSpec(
            f"job-{number}", text, text, "local", [sys.executable, text], "/", str(runs_dir), {text: text}, text,
            run="hostile", environment={text: text},
        )  # fmt: skip
        folder.save(spec)
        folder.log.write_text(
            json.dumps({"event": text, "done": 1, "total": 9, "line": text, "reward": text}) + f"\n{text}"
        )
        folder.write("exit.json", {"code": number % 2, "stopped": False, "ended": 1.0})
        damaged = runs_dir / ".jobs" / f"{number}{text.replace('/', '')}"[:120].replace("\0", "")
        damaged.mkdir(mode=0o700)
        (damaged / "job.json").write_text(json.dumps(dataclasses.asdict(spec) | {"backend": text, "id": text}))


CELLS = """
from rstar_lab.analysis import inspect, overview, watch
from rstar_lab.doctor import doctor
from rstar_lab.jobs import JobBoard
board = JobBoard(runs, inspect=inspect)
board
---
for job in board.rows():
    board._widget.chosen.value = job.id
    for name in ("Logs", "Inspect"):
        board._widget.buttons[name].click()
---
display(doctor(run))
watch(run)
---
overview(runs)
---
inspect(run)
"""


def test_board_watch_and_diagnosis_in_jupyterlab(lab, tmp_path):
    run = make_hostile_run(tmp_path / "runs", long_text=False)
    make_hostile_jobs(tmp_path / "runs")
    names = f"runs, run = {str(run.parent)!r}, {str(run)!r}"
    with lab.notebook(book(tmp_path, names, *CELLS.split("\n---\n")), size=(1400, 1600)) as opened:
        requests: list[str] = []
        opened.page.on("request", lambda request: requests.append(request.url))
        opened.run_all()
        opened.wait("() => document.querySelectorAll('.jp-OutputArea table').length >= 3")
        check(opened.page, [], requests, ".jp-OutputArea-output", lab.url)
        opened.page.mouse.wheel(0, 10_000)
        opened.page.wait_for_timeout(1000)
        check(opened.page, [], requests, ".jp-OutputArea-output", lab.url)
        assert "onerror" in opened.page.locator(".jp-OutputArea").all_inner_texts().__str__()
