"""Tests of the check of a notebook's text: numbers and quotations that no output contains, and the command's result."""

import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import papermill
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor.notebook_check import check_notebook

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
OUTPUT = (
    "pass@1 0.3542 [0.291, 0.42]\nchange -0.127\nrollouts 1,536\ntokens 23456\nerrors 12.5%\nkl 1.6e-04\nfirst step 3"
)


def write(folder: Path, text: str, data: dict[str, Any] | None = None) -> Path:
    """Write an executed notebook with this text and an output. data: of the output by MIME type; default: OUTPUT as text."""
    shown = [new_output("display_data", data)] if data else [new_output("stream", name="stdout", text=OUTPUT)]
    book = new_notebook(
        cells=[new_markdown_cell(text), new_code_cell("show()", execution_count=1, outputs=shown)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(book, folder / "book.ipynb")
    return folder / "book.ipynb"


@pytest.mark.parametrize(
    "text",
    [
        "35%, 35.4%, 35.42% or 0.354 of the answers are right, between 29.1% and 42%.",
        "0.35 (0.29–0.42), [0.291,0.42] and 0.29-0.42.",
        "It falls by 0.13, which is −0.127 or -12.7%, or 12.7 percent.",
        "1,536 rollouts, 1536 rollouts, 1.5k rollouts, 1.54 thousand, with n=1536 and 23k tokens.",
        "12.5% errors, 0.125 errors, about 13% errors; KL 0.00016, 1.6e-4 and 1.6e-04; step 3.",
        "| pass@1 | n |\n|---|---|\n| **0.354** | _1,536_ |",
    ],
)
def test_numbers_that_an_output_rounds_to_are_found(tmp_path, text):
    assert check_notebook(write(tmp_path, text)).missing == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("36% of the answers are right.", ["36%"]),
        ("0.355 and 0.35421 differ; 0.3542 is right.", ["0.355", "0.35421"]),
        ("It rises by +0.127, not by 0.128.", ["+0.127", "0.128"]),
        ("1,537 rollouts, 1.6k rollouts and 24k tokens.", ["1,537", "1.6k", "24k"]),
        ("35 of the answers: 0.354 is no percentage.", ["35"]),
        ("12.5% is there, 1.25% is not, nor 1.7e-4.", ["1.25%", "1.7e-4"]),
        ("Mean 0.21 (interval 0.29 to 0.42) \nin 2 parts.", ["0.21", "2"]),
    ],
)
def test_numbers_in_no_output_are_missing(tmp_path, text, missing):
    assert [found.text for found in check_notebook(write(tmp_path, text)).missing] == missing


def test_text_that_is_no_result_is_not_checked(tmp_path):
    text = """## 2. Results of pass@8 with Qwen3-14B and p07

1. See [notebook 99](99_book.ipynb#cell-98), Figure 97, section 9.6, #95 and https://example.org/94.
2. `temperature = 0.93` and the 95% intervals (DAPO, arXiv:2503.14476, 2025-03-18, version 1.92.0, Yu (2025)), per 1,000 tokens.

<span style="width: 91px">none</span> <!-- 90 -->

```python
k = 89
```
"""
    found = check_notebook(write(tmp_path, text))
    assert found.numbers == 0 and found.missing == []
    assert check_notebook(write(tmp_path, "A stray ` mark.\n\n88 stays, ` checked.")).numbers == 1


def test_place_and_context_of_a_missing_number(tmp_path):
    (found,) = check_notebook(write(tmp_path, "# Title\n\nPass@1 is 0.354.\nThe other run has 0.777 of it.")).missing
    assert (found.cell, found.line, found.kind, found.text) == (0, 4, "number", "0.777")
    assert found.context == "The other run has 0.777 of it."


@pytest.mark.parametrize(
    ("data", "right", "wrong"),
    [
        ({"text/html": "<table><tr><td>0.5</td><td>17</td></tr></table><style>p { width: 44px }</style>"}, "17", "44"),
        ({"text/html": '<p title="> 7">0.5 and 1<b title="<7>">7</b></p><script>7'}, "17", "7"),
        ({"application/json": {"pass1": [0.25, 17]}}, "25%", "35%"),
        ({"application/vnd.plotly.v1+json": {"data": [{"y": [0.25], "marker": {"size": 35}}]}}, "25%", "35"),
        ({"application/vnd.plotly.v1+json": go.Figure(go.Bar(y=np.array([0.25, 17.5]))).to_plotly_json()}, "17.5", "35"),
        ({"application/vnd.plotly.v1+json": {"data": [], "layout": {"title": {"text": "n = 17"}}}}, "17", "35"),
        ({"image/svg+xml": "<svg><text>35</text></svg>", "text/plain": "17"}, "17", "35"),
    ],
)  # fmt: skip
def test_values_of_tables_and_figures_count_as_output(tmp_path, data, right, wrong):
    data = json.loads(json.dumps(data, default=lambda array: {"bdata": _base64(array), "dtype": "f8"}))
    missing = check_notebook(write(tmp_path, f"First {right}, then {wrong}.", data)).missing
    assert [found.text for found in missing] == [wrong]


def _base64(array: np.ndarray) -> str:
    import base64

    return base64.b64encode(array.astype("f8").tobytes()).decode()


def test_quotations_must_be_in_an_output(tmp_path):
    html = "<div>Wait, the <span>call</span> <b>failed</b>.</div><pre>print(x &lt; 3)\nprint(2)</pre>"
    text = "It says:\n\n> Wait, the **call** failed.\n\nand\n\n> `print(x < 3)`\n> … print(2)\n\nand\n\n> Wait, the call worked with 99."
    found = check_notebook(write(tmp_path, text, {"text/html": html}))
    assert found.quotations == 3 and found.numbers == 0
    (missing,) = found.missing
    assert (missing.kind, missing.text, missing.line) == ("quotation", "Wait, the call worked with 99.", 12)


def test_notebooks_that_were_not_executed_or_failed_are_errors(tmp_path):
    path = write(tmp_path, "text")
    book = nbformat.read(path, 4)
    book.cells[1].execution_count = None
    nbformat.write(book, path)
    with pytest.raises(UserError, match="cell 1 was not executed"):
        check_notebook(path)
    book.cells[1].execution_count = 1
    book.cells[1].outputs = [new_output("error", ename="ValueError", evalue="no runs", traceback=[])]
    nbformat.write(book, path)
    with pytest.raises(UserError, match="cell 1 failed: ValueError: no runs"):
        check_notebook(path)
    for content in ("no JSON", "[]", '{"worksheets": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match="not a notebook"):
            check_notebook(path)
    with pytest.raises(UserError, match="No such file"):
        check_notebook(tmp_path / "none.ipynb")


def test_command_prints_what_is_missing_and_exits_with_1(tmp_path):
    path = write(tmp_path, "Pass@1 is 0.354, not 0.9.\n\n> never said")
    result = CliRunner().invoke(app, ["report", "--lab", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "notebook": str(path), "ok": False, "numbers": 2, "quotations": 1,
        "missing": [
            {"cell": 0, "line": 3, "kind": "quotation", "text": "never said", "context": "> never said"},
            {"cell": 0, "line": 1, "kind": "number", "text": "0.9", "context": "Pass@1 is 0.354, not 0.9."},
        ],
    }  # fmt: skip
    result = CliRunner().invoke(app, ["report", "--lab", str(path)])
    assert result.exit_code == 1 and "cell 0, line 1: number '0.9' is in no output: Pass@1" in result.output
    good = CliRunner().invoke(app, ["report", "--lab", str(write(tmp_path, "Pass@1 is 0.354.")), "--json"])
    assert good.exit_code == 0
    assert json.loads(good.output) | {"notebook": ""} == {
        "notebook": "", "ok": True, "numbers": 1, "quotations": 0, "missing": [],
    }  # fmt: skip


@pytest.mark.parametrize("arguments", [[], ["tiny-rl", "--lab", "book.ipynb"]])
def test_command_needs_a_run_or_a_notebook(arguments):
    with pytest.raises(UserError, match="give a RUN to report, --paper RUNS, or --lab NOTEBOOK"):
        CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_an_executed_notebook_with_values_and_a_rollout_of_a_run(tmp_path):
    text = "The run has **1,536** rollouts; 32.7% are right.\n\n> Let me compute this. … print(math.gcd(212, 72))"
    code = (
        "from rstar_lab.analysis import inspect, open_runs, plot_heatmap\n"
        f"runs = open_runs({str(GOLDEN)!r}, run_ids=['tiny_fast-rl'])\n"
        "display(runs.sql('SELECT count(*) AS n, avg((reward > 0)::INT) AS pass1 FROM trajectories'), plot_heatmap(runs, 'tiny_fast-rl'))\n"
        "inspect(runs, selected='tiny_fast-rl-000008-0000-00')"
    )
    source, out = write(tmp_path, text), tmp_path / "executed.ipynb"
    book = nbformat.read(source, 4)
    book.cells[1] = new_code_cell(code)
    nbformat.write(book, source)
    papermill.execute_notebook(source, out, kernel_name="python3", progress_bar=False, store_widget_state=False)
    found = check_notebook(out)
    assert (found.numbers, found.quotations, found.missing) == (2, 1, [])
    book = nbformat.read(out, 4)
    book.cells[0].source = text.replace("1,536", "1,537").replace("32.7%", "33.7%").replace("212", "213")
    nbformat.write(book, out)
    assert [found.text.split()[0] for found in check_notebook(out).missing] == ["Let", "1,537", "33.7%"]
