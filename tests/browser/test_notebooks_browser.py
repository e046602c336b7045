"""Test of every notebook in JupyterLab and Chromium: it runs without error or warning, and at three widths, light and dark,
no output is cut off and no text covers another one.

    RSTAR_LAB_DEMO=runs pytest -m soak tests/browser/test_notebooks_browser.py      # after `make demo`

Screenshots of the whole notebooks: out/screenshots.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.notebooks import NOTEBOOKS, SMALL, SMALL_OWN_MODEL
from lab_page import Lab, LabPage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
WIDTHS = (1920, 1400, 900)
STAGES = {
    "stages.one.steps": 1,
    "stages.two.steps": 1,
    "stages.three.steps": 1,
    "stages.three.limits.max_response_tokens": 64,
}
# Notebooks that are not here run with their defaults.
PARAMETERS: dict[str, dict[str, Any]] = {
    "02_sft": {"recipe": "tiny_fast", "name": "small", "overrides": SMALL},
    "03_train": {"recipe": "tiny_fast", "name": "small", "overrides": SMALL | {"stages.0.steps": 4}},
    "06_ablation": {
        "arms": {"GRPO": {"rl.method.roc.rule": "none"}, "RoC (paper)": {"rl.method.roc.rule": "paper"}},
        "seeds": [0, 1],
        "steps": 2,
        "overrides": SMALL | {"evaluate.every": 1, "evaluate.sets.held_out.synthetic.count": 8},
    },
    "09_cluster": {"overrides": SMALL | {"stages.0.steps": 1, "evaluate.sets": {}}},
    "10_recipe": {"overrides": SMALL | STAGES | {"evaluate.samples": 1}},
    "11_own_tools": {"examples": 120, "steps": 1, "overrides": {"rl.problems_per_step": 2, "rl.group_size": 2}},
    "16_own_model": {"overrides": SMALL_OWN_MODEL},
    "17_own_loop": {"steps": 1, "problems_per_step": 4, "overrides": SMALL},
    "13_environment": {"examples": 120, "steps": 1, "overrides": {"rl.problems_per_step": 2, "rl.group_size": 2}},
}

# Returns a line for each fault in the outputs and texts of the open notebook.
FAULTS = """() => {
  const notebook = [...document.querySelectorAll('.jp-NotebookPanel')].find(panel => panel.getClientRects().length);
  const faults = [];
  const scrolls = value => value === 'auto' || value === 'scroll';
  // The visible part of a box, null if there is none, and the element that cuts it off where nobody can scroll.
  const visible = (element, box, root) => {
    let { left, right, top, bottom } = box, cutter = null;
    for (let outer = element; outer && outer !== root.parentElement; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (style.visibility === 'hidden' || style.display === 'none' || Number(style.opacity) === 0) return { box: null };
      if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
      const frame = outer.getBoundingClientRect();
      const ellipsis = style.textOverflow === 'ellipsis' && !outer.matches('.widget-label');
      if (!cutter && style.overflowX === 'hidden' && !ellipsis && (left < frame.left - 2 || right > frame.right + 2)) cutter = outer;
      if (!cutter && outer.tagName === 'svg' && (top < frame.top - 2 || bottom > frame.bottom + 2)) cutter = outer;
      left = Math.max(left, frame.left); right = Math.min(right, frame.right);
      top = Math.max(top, frame.top); bottom = Math.min(bottom, frame.bottom);
      if (right - left < 3 || bottom - top < 3) return { box: null };
    }
    return { box: { left, right, top, bottom }, cutter };
  };
  // Texts of different layers may cover each other: a head that stays above a list, a menu.
  const layer = element => {
    for (let outer = element; outer; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (['sticky', 'fixed', 'absolute'].includes(style.position) && style.backgroundColor !== 'rgba(0, 0, 0, 0)') return outer;
    }
    return null;
  };
  const slanted = element => /rotate\\((?!0|-?90)/.test(element.closest('text')?.getAttribute('transform') || '');
  const nameOf = element => element.className.baseVal ?? element.className;
  notebook.querySelectorAll('.jp-OutputArea-output, .jp-MarkdownOutput').forEach((output, number) => {
    const where = `output ${number}`;
    if (output.dataset.mimeType === 'application/vnd.jupyter.stderr') faults.push(`${where}: ${output.textContent.slice(0, 300)}`);
    if (output.scrollWidth > output.clientWidth + 1 && !scrolls(getComputedStyle(output).overflowX))
      faults.push(`${where} is wider than its cell: ${output.scrollWidth} > ${output.clientWidth}: ${output.textContent.slice(0, 60)}`);
    const texts = [];
    const walker = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement, text = node.textContent.trim();
      if (!text || element.closest('style, script, option, .jp-mod-hidden, .MathJax, mjx-container')) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) {
        if (box.width < 2 || box.height < 2) continue;
        const found = visible(element, box, output);
        if (found.cutter) faults.push(`${where}: ${text.slice(0, 60)} is cut off by ${nameOf(found.cutter)}`);
        if (found.box && !slanted(element)) texts.push({ text: text.slice(0, 40), element, ...found.box });
      }
    }
    texts.sort((a, b) => a.top - b.top);
    texts.forEach((a, i) => {
      for (let j = i + 1; j < texts.length && texts[j].top < a.bottom - 3; j++) {
        const b = texts[j];
        if (a.element === b.element || Math.min(a.right, b.right) - Math.max(a.left, b.left) <= 3) continue;
        if (Math.min(a.bottom, b.bottom) - b.top <= 3 || layer(a.element) !== layer(b.element)) continue;
        faults.push(`${where}: ${a.text} and ${b.text} overlap`);
      }
    });
  });
  return [...new Set(faults)];
}"""


@pytest.fixture
def project(lab: Lab, demo_runs: Path) -> Lab:
    """JupyterLab in a folder with only the runs of `make demo`."""
    shutil.rmtree(lab.folder / "runs", ignore_errors=True)
    shutil.copytree(demo_runs, lab.folder / "runs")
    return lab


def show_all(opened: LabPage, width: int) -> None:
    """Make the page so high that it shows the whole notebook: JupyterLab draws only cells in view."""
    for _ in range(4):
        height = opened.page.evaluate(
            "() => Math.max(...[...document.querySelectorAll('.jp-WindowedPanel-inner')].map(inner => inner.scrollHeight))"
        )
        opened.page.set_viewport_size({"width": width, "height": min(max(height + 200, 1000), 16_000)})
        opened.page.wait_for_timeout(1000)


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs_and_is_readable_at_all_widths(project: Lab, name: str):
    faults = []
    with project.notebook(f"{name}.ipynb", parameters=PARAMETERS.get(name, {}), size=(WIDTHS[0], 6000)) as opened:
        opened.command("application:toggle-left-area")
        opened.run_all(timeout_s=1500)
        for width in WIDTHS:
            show_all(opened, width)
            for theme in ("Light", "Dark"):
                opened.theme(f"JupyterLab {theme}")
                opened.page.wait_for_timeout(1000)
                opened.shot(f"{name}-{width}-{theme.lower()}")
                faults += [f"{width} {theme}: {fault}" for fault in opened.page.evaluate(FAULTS)]
    assert not faults, "\n".join(faults)
