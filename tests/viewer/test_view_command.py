"""`rstar-lab view`: the inspector in a real Chromium without Jupyter, live while a run grows, and for logs of other trainers."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import comm
import httpx
import pytest
from helpers.analysis_runs import make_run

pytest.importorskip("playwright.sync_api")

from browser.widget_page import clipped_controls
from playwright.sync_api import expect, sync_playwright

from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunWriter
from rstar_lab.viewer.logs import runs_folder
from rstar_lab.viewer.service import Viewer

ROOT = Path(__file__).parents[2]
expect.set_options(timeout=30_000)


@contextmanager
def view(*arguments):
    """Run the command and yield its address."""
    command = [sys.executable, "-m", "rstar_lab.cli", "view", *map(str, arguments), "--no-browser"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.stderr.read()
        yield address
    finally:
        process.terminate()  # while a page is open
        assert process.communicate(timeout=60)[1] == ""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            pytest.skip("Chromium is not installed: the browser tests did NOT run (apt-get install chromium)")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(30_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    yield page
    page.close()


@pytest.mark.slow
def test_rollouts_curves_runs_and_the_diagnosis_are_one_click_away(tmp_path, page):
    with RunWriter.open(tmp_path / "runs", "a-sft", kind="sft", recipe={}, seed=0) as writer:
        writer.write_step("sft", 1, trajectories=[], calls=[], transcripts=[], metrics={"loss": 2.0})
    with view(tmp_path / "runs") as address:
        page.goto(address)
        expect(page.locator(".rl-figure .scatterlayer").first).to_be_visible()  # the loss of the SFT
        make_run(tmp_path / "runs", "a", steps=3)
        expect(page.locator(".rl-count")).to_have_text("96 of 96 trajectories")
        assert page.locator(".rl-app").bounding_box()["height"] > 780  # the whole window
        page.locator(".rl-row[data-index='3']").click()
        opened = page.locator(".rl-detail")
        expect(opened.locator(".rl-seg").first).to_be_visible()
        expect(page.locator(".rl-instead")).to_have_text("Entropy is not recorded (RoC dropped it).")
        clipped = "legend => [...legend.children].filter(part => part.scrollWidth > part.clientWidth).map(part => part.textContent)"
        assert page.locator(".rl-legend").evaluate(clipped) == []
        first = opened.get_attribute("data-traj")
        page.locator(".rl-row[data-index='5']").click()
        expect(opened).not_to_have_attribute("data-traj", first)
        page.get_by_role("button", name="Correct").first.click()
        expect(page.locator(".rl-count")).not_to_have_text("96 of 96 trajectories")
        assert clipped_controls(page) == []
        page.get_by_role("button", name="Curves").click()
        expect(page.locator(".rl-figure .scatterlayer").first).to_be_visible()
        assert page.locator(".rl-figure .scatterlayer .trace").count() > 1 and clipped_controls(page) == []
        page.get_by_role("button", name="Runs", exact=True).click()
        expect(page.get_by_role("row").filter(has_text="finished").first).to_be_visible()
        assert clipped_controls(page) == []
        page.get_by_role("button", name="Doctor").click()
        expect(page.frame_locator("iframe").locator("h1")).not_to_be_empty()
        assert page.problems == []


@pytest.mark.slow
def test_a_click_on_a_curve_lists_its_rollouts_and_new_steps_appear(tmp_path, page):
    run = make_run(tmp_path / "runs", "a", steps=2)
    grown = make_run(tmp_path / "later", "a", steps=3)
    with view(tmp_path / "runs") as address:
        page.goto(address)
        expect(page.locator(".rl-count")).to_have_text("64 of 64 trajectories")
        for file in ("rollup.parquet", "trajectories", "calls", "transcripts", "metrics.jsonl", "run.json"):
            if (grown / file).is_dir():
                shutil.copytree(grown / file, run / file, dirs_exist_ok=True)
            else:
                shutil.copy(grown / file, run / file)
        expect(page.locator(".rl-count")).to_have_text("96 of 96 trajectories")
        page.get_by_role("button", name="Curves").click()
        points = page.locator(".rl-figure .scatterlayer .trace .points path")
        expect(points.first).to_be_visible()
        box = points.nth(1).bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(page.locator(".rl-scope")).to_contain_text("step")
        expect(page.locator(".rl-count")).to_have_text(re.compile(r"^32 of 96"))
        assert page.problems == []


def test_the_page_is_loaded_again_once_when_rollouts_appear(tmp_path, monkeypatch):
    monkeypatch.setattr(comm, "create_comm", comm.create_comm)  # a viewer replaces it
    make_run(tmp_path, "a", steps=1)
    (tmp_path / "b").mkdir()
    viewer = Viewer(tmp_path / "b")

    async def reloads() -> int:
        with viewer._pages.connect() as pending:
            (tmp_path / "a").rename(tmp_path / "b" / "a")
            for _ in range(3):
                viewer._refresh()
            await asyncio.sleep(0)  # messages of other threads arrive in the event loop
            return sum("reload" in pending.get_nowait() for _ in range(pending.qsize()))

    assert ThreadPoolExecutor().submit(asyncio.run, reloads()).result() == 1


def test_every_request_needs_the_token(tmp_path):
    make_run(tmp_path / "runs", "a", steps=1)
    with view(tmp_path / "runs") as address:
        base, token = address.split("?token=")
        for path in ("", "models", "events", "doctor", "static/view.js"):
            assert {httpx.get(f"{base}{path}{query}").status_code for query in ("", f"?token=x{token}")} == {401}
        assert httpx.post(f"{base}message", json={}).status_code == 401
        good = {"params": {"token": token}}
        assert httpx.post(f"{base}message", content=b"x" * 2**23, **good).status_code == 413
        assert httpx.post(f"{base}message", content=b'{"id": "no"}', **good).status_code == 404
        page = httpx.get(base, **good)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "script-src 'self' blob:;" in policy


@pytest.mark.slow
def test_logs_of_other_trainers_are_imported_once(tmp_path, monkeypatch, page):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dump = tmp_path / "verl_rollouts"
    dump.mkdir()
    rows = [{"input": "What is 1+1?", "output": f"It is {i % 2 + 1}.", "score": i % 2, "step": 1} for i in range(8)]
    (dump / "1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = runs_folder(dump)
    assert folder == runs_folder(dump) and folder.is_relative_to(tmp_path / "cache")
    with view(dump) as address:
        page.goto(address)
        expect(page.locator(".rl-count")).to_have_text("8 of 8 trajectories")
        expect(page.locator(".rl-seg").first).to_be_visible()
    (dump / "2.jsonl").write_text(json.dumps(rows[0] | {"step": 2}))
    assert runs_folder(dump) != folder
    for wrong in (tmp_path / "nothing", tmp_path / "cache"):
        with pytest.raises(UserError, match=r"does not exist|no rollouts"):
            runs_folder(wrong)
