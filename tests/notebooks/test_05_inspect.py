"""Tests of notebook 05 on the golden runs: readable output without a kernel, escaped transcripts."""

import nbformat
import pytest
from helpers.notebooks import GOLDEN, execute

pytestmark = pytest.mark.slow


def html(notebook: nbformat.NotebookNode) -> str:
    bundles = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any("application/vnd.jupyter.widget-view+json" in bundle for bundle in bundles)
    return "\n".join("".join(bundle.get("text/html", "")) for bundle in bundles)


def test_output_of_the_golden_runs_is_readable_without_a_kernel(tmp_path):
    notebook = execute("05_inspect.ipynb", tmp_path, {"runs_dir": str(GOLDEN)}, timeout_s=250)
    shown_text = html(notebook)
    assert "1,920 trajectories of" in shown_text and "rl-page" in shown_text
    assert shown_text.count('class="rl-seg') >= 3, "the transcript is not there"
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) == 8  # curves, heat map, outcomes, map and bars of failures, timeline, the watched run, and the overview
    assert ">tool errors in correct</th>" in shown_text, "the table of all runs is not there"
    assert "kept by RoC" in str(figures[4]["data"]["application/vnd.plotly.v1+json"]["data"])
    curves = figures[0]["data"]["application/vnd.plotly.v1+json"]["data"]
    drawn = [trace["customdata"] for trace in curves if "customdata" in trace]
    assert len(drawn) == 2 and len(drawn[0]) == 8, "one training run, two metrics, eight steps"
    assert (tmp_path / "05_inspect.ipynb").stat().st_size < 2_000_000


def test_hostile_transcripts_are_escaped_in_a_saved_notebook(tmp_path):
    from helpers.inspector_runs import write_run

    write_run(tmp_path / "runs", "evil", steps=2, problems=1)
    parameters = {"runs_dir": str(tmp_path / "runs"), "selected": "evil/2/p0/1"}
    shown_text = html(execute("05_inspect.ipynb", tmp_path, parameters, timeout_s=250))
    assert "window.hacked" in shown_text, "the hostile transcript is not the one shown"
    assert "<script" not in shown_text.lower() and "<img" not in shown_text.lower()
