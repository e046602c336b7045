"""Execute the notebooks of the project with papermill and read their outputs."""

import re
from pathlib import Path
from typing import Any

import nbformat
import papermill

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
GOLDEN = ROOT / "tests" / "golden" / "runs"
# Recipe keys with which a training notebook takes seconds.
SMALL = {
    "sft.problems.synthetic.count": 400,
    "rl.problems_per_step": 4,
    "rl.group_size": 4,
    "rl.limits.max_response_tokens": 64,
    "evaluate.max_response_tokens": 64,
    "engine.kind": "transformers",  # vLLM takes longer to start than the rest of the test
    "processes": 1,
}
# The same for the recipe that `rstar-lab init` writes for SmolLM2.
SMALL_OWN_MODEL = {
    "sft.problems.synthetic.count": 16, "sft.batch_size": 8, "stages.0.steps": 2, "rl.problems_per_step": 2,
    "rl.group_size": 2, "rl.limits.max_response_tokens": 64, "evaluate.max_response_tokens": 64,
    "evaluate.samples": 1, "evaluate.sets.held_out.limit": 2,
}  # fmt: skip


def execute(
    name: str, folder: Path, parameters: dict[str, Any] | None = None, *, cwd: Path | None = None, timeout_s: int = 400
) -> nbformat.NotebookNode:
    """Execute a notebook, write the result to `folder`, and return it.

    name: file name, such as 01_sandbox.ipynb. cwd: working directory; default: `folder`. timeout_s: limit of one cell.
    """
    out = folder / name
    papermill.execute_notebook(
        NOTEBOOKS / name, out, parameters=parameters or {}, kernel_name="python3", cwd=str(cwd or folder),
        progress_bar=False, start_timeout=300, execution_timeout=timeout_s, store_widget_state=False,
    )  # fmt: skip
    return nbformat.read(out, as_version=4)


def outputs(notebook: nbformat.NotebookNode, source: str = "") -> str:
    """Return the output of the code cells that contain `source`, as text without colours. Fails if there is no such cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    assert cells, f"no cell contains {source!r}"
    found = "\n".join(output.get("text", "") + str(output.get("data", {})) for cell in cells for output in cell.outputs)
    return re.sub(r"\x1b\[[0-9;]*m", "", found)
