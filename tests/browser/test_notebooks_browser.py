"""Every notebook in JupyterLab and Chromium runs without error or warning; at three widths, light and dark, nothing is cut off."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.notebooks import NOTEBOOKS, SMALL, SMALL_OWN_MODEL

from browser.lab_page import FAULTS, Lab, LabPage

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
        "overrides": SMALL | {"evaluate.during.every": 1, "evaluate.sets.held_out.synthetic.count": 8},
    },
    "09_cluster": {"overrides": SMALL | {"name": "small", "stages.0.steps": 1, "evaluate.sets": {}}},
    "10_recipe": {"overrides": SMALL | STAGES | {"evaluate.samples": 1}},
    "11_own_tools": {"examples": 120, "steps": 1, "overrides": {"rl.problems_per_step": 2, "rl.group_size": 2}},
    "16_own_model": {"overrides": SMALL_OWN_MODEL},
    "17_own_loop": {"steps": 1, "problems_per_step": 4, "overrides": SMALL},
    "13_environment": {"examples": 120, "steps": 1, "overrides": {"rl.problems_per_step": 2, "rl.group_size": 2}},
}


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
