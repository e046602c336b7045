"""The screenshots of the README, taken from the golden run in a real JupyterLab. `make screenshots` copies them to docs/images."""

import shutil
from pathlib import Path

import nbformat
import pytest

from browser.lab_page import ROOT, Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GOLDEN = ROOT / "tests" / "golden" / "runs"
CELL = """
from rstar_lab.analysis import inspect, open_runs
runs = open_runs("runs", run_ids=["tiny_fast-rl"])
with_errors = runs.trajectories("kept AND reward > 0 AND errors > 0", columns=["traj_id"], order_by="entropy DESC", limit=1)
inspect(runs, where={"correct": True}, selected=with_errors.traj_id.iloc[0])
"""


def test_the_inspector_shows_a_trajectory_of_the_golden_run(lab: Lab, tmp_path: Path) -> None:
    if not (lab.folder / "runs").exists():
        shutil.copytree(GOLDEN, lab.folder / "runs")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.strip())])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "inspector.ipynb")
    with lab.notebook(tmp_path / "inspector.ipynb", size=(1500, 1000)) as page:
        page.run_all()
        page.wait("() => document.querySelectorAll('.rl-app .rl-turn, .rl-app pre').length > 0")
        shot = page.shot("inspector", ".rl-app")
    assert shot.stat().st_size > 20_000
