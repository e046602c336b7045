"""`rstar-lab demo`: train and evaluate a small model on a laptop (SFT, GRPO-RoC), and write a report."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import format_interval
from rstar_lab.common.progress import Reporter
from rstar_lab.common.resources import resource_folder
from rstar_lab.hardware.processes import PeakMemory
from rstar_lab.rl.pipeline import evaluate_model, fine_tune, model_samples, train
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.files import write_json
from rstar_lab.untrusted.files import read_json

NOTEBOOK = resource_folder("notebooks") / "00_quickstart.ipynb"


async def run_demo(recipe: Recipe, out: Path, reporter: Reporter) -> dict[str, Any]:
    """Train, evaluate and write the report. Return the last line of `demo --json`.

    If the demo is already finished with the same settings, return its stored result.

    Args:
        recipe: Recipe with an `sft` section and stages.
        out: Folder of the report.
        reporter: Prints progress.
    """
    for package in ("papermill", "nbconvert"):  # for the report; better missed now than after the training
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    stored = recipe.runs / ".demo" / f"{recipe.name}.json"
    settings = recipe.model_dump(mode="json", exclude={"runs"})
    if stored.exists():
        saved = read_json(stored, dict)
        outputs = [Path(saved["result"][key]) for key in ("report", "run", "model_sft", "model_rl")]
        if saved["recipe"] == settings and all(path.exists() for path in outputs):
            print_result(saved["result"], reporter)
            return saved["result"]
    started = time.monotonic()
    with PeakMemory() as memory:
        async with RunSession.open(resolve(recipe), reporter) as session:
            session.spawn_processes()
            base, after_sft = await fine_tune(session)
            problems = [problem for group in session.held_out.values() for problem in group]
            parent = {"run": session.run_id("sft"), "step": None}
            samples = model_samples(recipe, "base")
            before = await evaluate_model(session, base, problems, "eval-base", samples=samples)
            fine_tuned = await evaluate_model(session, after_sft, problems, "eval-sft", parent=parent)
            after_rl = await train(session, after_sft, parent=parent)
            last = int(after_rl.name.removeprefix("step="))
            trained = await evaluate_model(
                session, after_rl, problems, "eval-rl", parent={"run": session.run_id("rl"), "step": last}
            )
            reporter.print_line("writing the report ...")
            # The report is written while the session stops the engines.
            writing = asyncio.create_task(asyncio.to_thread(make_report, recipe, out))
        report = await writing
    result = {
        "pass1_base": before["pass1"],
        "pass1_sft": fine_tuned["pass1"],
        "pass1_rl": trained["pass1"],
        "error_rate_correct_sft": fine_tuned["error_rate_correct"],
        "error_rate_correct_rl": trained["error_rate_correct"],
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_gb": memory.gb,
        "run": str((recipe.runs / f"{recipe.name}-rl").resolve()),
        "report": str(report.resolve()),
        "model_sft": str(after_sft.resolve()),
        "model_rl": str(after_rl.resolve()),
    }
    stored.parent.mkdir(parents=True, exist_ok=True)
    write_json(stored, {"recipe": settings, "result": result})
    print_result(result, reporter)
    return result


def make_report(recipe: Recipe, out: Path) -> Path:
    """Execute the quickstart notebook on the runs and write it as an HTML file that needs no network. Return the file."""
    out.mkdir(parents=True, exist_ok=True)
    executed = out / f"{recipe.name}.ipynb"
    parameters = {"runs_dir": str(recipe.runs.resolve()), "name": recipe.name}
    flags = [item for key, value in parameters.items() for item in ("-p", key, value)]
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(executed), *flags, "--no-progress-bar"]
    # Figures as JSON for JupyterLab and as HTML with plotly inside for the page.
    environment = os.environ | {"PLOTLY_RENDERER": "plotly_mimetype+notebook"}
    with subprocess.Popen(
        [*command, "--kernel", "python3", "--cwd", str(out), "--execution-timeout", "900"], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as papermill:  # fmt: skip
        from nbconvert import HTMLExporter  # takes seconds to import; the notebook runs meanwhile

        _, messages = papermill.communicate()
    if papermill.returncode:
        lines = messages.strip().splitlines() or ["no message"]
        raise UserError(f"the notebook could not be executed: {lines[-1]} (see {executed})")
    # A data URL, because nbconvert replaces an empty URL of the widget loader with that of a public server.
    empty_script = "data:text/javascript,"
    exporter = HTMLExporter(
        exclude_input=True, mathjax_url="", require_js_url="", jquery_url="", widget_renderer_url=empty_script,
        mermaid_js_url=empty_script, mermaid_layout_elk_js_url=empty_script,
    )  # fmt: skip
    page, _ = exporter.from_filename(str(executed))
    html = executed.with_suffix(".html")
    # plotly loads MathJax from a server; the figures do not need it.
    html.write_text(re.sub(r'<script src="https?://[^"]*"></script>', "", page))
    return html


def print_result(result: dict[str, Any], reporter: Reporter) -> None:
    """Print the result of the demo."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    reporter.print_line(
        f"\nheld-out pass@1   before {format_interval(result['pass1_base'])}"
        f"   after SFT {format_interval(result['pass1_sft'])}   after GRPO-RoC {format_interval(result['pass1_rl'])}\n"
        f"tool errors inside correct trajectories   {rate(result['error_rate_correct_sft'])} -> "
        f"{rate(result['error_rate_correct_rl'])}\n"
        f"{result['seconds']:.0f} s, peak memory {result['peak_memory_gb']:.1f} GB\n\n"
        f"report     {result['report']}\n"
        f"notebook   {Path(result['report']).with_suffix('.ipynb')}   (make lab opens JupyterLab)\n"
        f"run        {result['run']}   (rstar-lab view {Path(result['run']).parent} opens it in the browser)\n"
        f"model      {result['model_rl']}\n"
    )
