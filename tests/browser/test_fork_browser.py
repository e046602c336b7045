"""Test of the panel that forks a rollout at a turn, in JupyterLab, with a random model."""

import shutil
from pathlib import Path

import pytest
from helpers.notebooks import GOLDEN

from browser.inspector_page import APP, axe_violations, book, run_python, wait_for_trajectory
from browser.lab_page import Lab
from rstar_lab.rl.models.model import build_tiny, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.renderers.paper import SPECIAL_TOKENS
from rstar_lab.runs import RunReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PANEL = f"{APP} .rl-fork"
QUERY = (
    "SELECT traj_id FROM trajectories JOIN (SELECT traj_id FROM transcripts WHERE response_ids IS NOT NULL) USING (traj_id) "
    "WHERE turns = 2 AND reward > 0 ORDER BY 1"
)


def make_random_model(folder: Path, run: Path) -> None:
    """Write a random model with the vocabulary of the run."""
    vocabulary = RunReader(run).vocabulary()
    base = 256 + len(SPECIAL_TOKENS)
    tokenizer = train_tokenizer(["text"], base, single_tokens=[])
    tokenizer.add_tokens(vocabulary[base:])
    assert len(tokenizer) == len(vocabulary)
    tiny = build_tiny(tokenizer, seed=0, hidden_size=32, layers=1, heads=2, kv_heads=1, max_length=2048)
    save_model(folder, tiny, tokenizer)


def test_a_rollout_is_forked_at_an_edited_turn_by_keyboard(lab: Lab, tmp_path: Path, axe: Path):
    run = tmp_path / "runs" / "tiny_fast-rl"
    shutil.copytree(GOLDEN / "tiny_fast-rl", run)
    make_random_model(tmp_path / "model", run)
    cells = (
        "from rstar_lab.analysis import inspect, open_runs\n"
        f"runs = open_runs({str(run)!r})\ninspector = inspect(runs, selected=runs.sql({QUERY!r}).traj_id[0])\ninspector",
    )
    with lab.notebook(book(tmp_path, *cells), size=(1400, 1300)) as opened:
        page = opened.page
        opened.run_all()
        wait_for_trajectory(opened, run_python(opened, "print(inspector.selected)"))
        page.locator(f"{APP} .rl-list").focus()
        page.keyboard.press("t")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the run has no checkpoint
        page.wait_for_selector(f"{PANEL} .rl-missing[role=alert]")
        assert "no checkpoint" in page.locator(f"{PANEL} .rl-missing[role=alert]").inner_text()
        assert page.locator(f"{PANEL} option").all_inner_texts() == ["every turn", "turn 1", "turn 2"]
        assert page.locator(f"{PANEL} textarea").is_disabled(), "an edit needs a turn"

        page.keyboard.type(str(tmp_path / "model"))
        page.locator(f"{PANEL} select").select_option("1")
        page.locator(f"{PANEL} input[type=number]").fill("3")
        page.get_by_role("button", name="Insert original text").click()
        opened.wait(f"() => document.querySelector('{PANEL} textarea').value.includes('</answer>')")
        page.locator(f"{PANEL} textarea").fill("I doubt\nthis result.")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(f"{PANEL} tbody tr")
        assert page.locator(f"{PANEL} tbody td").all_inner_texts()[:3] == ["2", "0% of 3", "0% to 56%"]
        summary = page.locator(f"{PANEL} .rl-summary").inner_text()
        assert summary.startswith("The original rollout is correct.") and "Stored as run" in summary
        cells_of_turn = page.locator(f"{PANEL} .rl-cell")
        assert cells_of_turn.all_inner_texts() == ["✗"] * 3
        assert run_python(opened, "print(inspector.forks[-1].values.n.tolist(), len(inspector.forks))") == "[3] 1"

        cells_of_turn.nth(1).focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{APP} .rl-pane-head")
        heads = page.locator(f"{APP} .rl-pane-head").all_inner_texts()
        assert "Continuation 1" in heads[1] and "from the start of turn 2" in heads[1]
        assert cells_of_turn.nth(1).get_attribute("aria-pressed") == "true"
        assert page.locator(f"{APP} .rl-pane .rl-turns").nth(1).evaluate("element => element.scrollTop") > 0
        assert "I doubt\nthis result." in page.locator(f"{APP} .rl-pane").nth(1).inner_text()
        page.add_script_tag(path=axe)
        for theme in ("JupyterLab Light", "JupyterLab Dark"):
            opened.theme(theme)
            page.wait_for_timeout(300)
            opened.shot(f"fork-{theme.split()[1].lower()}", APP)
            assert axe_violations(opened) == [], theme

        page.locator(f"{PANEL} select").focus()
        page.keyboard.press("Escape")
        assert page.locator(PANEL).is_hidden()
        assert page.evaluate("document.activeElement.className") == "rl-ribbon"
        page.keyboard.press("t")
        assert page.locator(PANEL).is_visible()
        page.locator(f"{APP} .rl-list").focus()
        page.keyboard.press("j")
        opened.wait(f"() => document.querySelector('{PANEL}').hidden")
        page.keyboard.press("k")
        wait_for_trajectory(opened, run_python(opened, "print(inspector.forks[-1].traj_id)"))
        page.keyboard.press("t")
        page.wait_for_selector(f"{PANEL} tbody tr")
        assert page.locator(f"{PANEL} .rl-summary").inner_text() == summary, "the continuations are shown again"
