"""Tests of the overview of runs in JupyterLab: selection, curves, rollouts behind a point, live rows."""

import json
from pathlib import Path

import pytest
from helpers.inspector_runs import write_run, write_steps

from browser.inspector_page import book, click_point, run_python, wait_for_count, wait_for_python
from browser.lab_page import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_overview_selects_runs_opens_rollouts_and_follows_a_run(lab: Lab, tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    write_run(runs, "grpo", seed=1)
    write_run(runs, "roc")
    cells = f"from rstar_lab.analysis import overview\nshown = overview({str(runs)!r}, selected=['roc'], every_s=0.5)\nshown"
    (tmp_path / "book").mkdir()
    with lab.notebook(book(tmp_path / "book", cells), size=(1600, 1800)) as page:
        page.command("application:toggle-left-area")
        page.run_all()
        page.wait("() => document.querySelectorAll('.rl-overview tbody tr').length === 2")
        wait_for_count(page, 192)
        page.page.get_by_label("show the curves of grpo").check()
        wait_for_python(page, "sorted(shown.selected)", "['grpo', 'roc']")
        wait_for_count(page, 384)
        page.shot("overview")
        shown = "() => [...document.querySelectorAll('.rl-overview tbody tr')].map(row => row.children[1].textContent).join()"
        sort = page.page.locator(".rl-overview th button", has_text="run").first
        for order in ("roc,grpo", "grpo,roc"):
            sort.click()
            page.wait(f"() => ({shown})() === '{order}'")
        sort.click()
        page.page.get_by_label("Filter runs").fill("ro")
        page.wait(f"() => ({shown})() === 'roc'")
        page.page.get_by_label("Filter runs").fill("")
        click_point(page, 1)
        wait_for_count(page, 32)
        writing = write_steps(runs, "live", steps=2)
        next(writing)
        page.wait("() => document.querySelector('.rl-overview tbody tr').textContent.includes('running')")
        list(writing)
        page.wait("() => document.querySelector('.rl-overview tbody tr').textContent.includes('finished')")
        assert run_python(page, "print(len(shown.rows))") == "3"
        write_run(runs, "tested", steps=1, problems=1)
        info = json.loads((runs / "tested" / "run.json").read_text())
        info |= {"kind": "evaluate", "parent": {"run": "roc", "step": 6}}
        (runs / "tested" / "run.json").write_text(json.dumps(info))
        page.wait(f"() => ({shown})().includes('▾roc,tested')")
        page.shot("overview-evaluation")
        page.page.get_by_role("button", name="evaluations and forks of roc: 1").click()
        page.wait(f"() => ({shown})().includes('▸ 1roc') && !({shown})().includes('tested')")
        page.page.get_by_label("Filter runs").fill("tested")
        page.wait(f"() => ({shown})() === 'tested'")


@pytest.mark.soak
def test_the_view_of_a_growing_run_goes_on_after_a_reload_of_the_page(lab: Lab, tmp_path: Path):
    writing = write_steps(tmp_path, "live", steps=3)
    next(writing)
    cell = f"from rstar_lab.analysis import watch\nwatched = watch({str(tmp_path / 'live')!r}, every_s=0.5)\nwatched"
    (tmp_path / "book").mkdir()
    with lab.notebook(book(tmp_path / "book", cell)) as opened:
        opened.run_all()
        wait_for_count(opened, 32)
        opened.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        opened.page.reload(wait_until="domcontentloaded")
        opened.ready()
        wait_for_count(opened, 32)
        next(writing)
        wait_for_count(opened, 64)
        opened.shot("watch-after-reload")
