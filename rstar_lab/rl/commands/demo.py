"""`rstar-lab demo`: the whole story on a laptop, from random weights to a tool user, ending in an executed notebook."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.estimates import format_interval
from rstar_lab.memory import PeakMemory
from rstar_lab.progress import Reporter
from rstar_lab.resources import resource_folder
from rstar_lab.rl.pipeline import NOTHING_SAMPLES, evaluate_model, fine_tune, train
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.session import RunSession
from rstar_lab.runs.files import write_json

NOTEBOOK = resource_folder("notebooks") / "00_quickstart.ipynb"


async def run_demo(recipe: Recipe, out: Path, reporter: Reporter) -> dict[str, Any]:
    """Train, evaluate and report; a finished demo gives its result again. Returns what `demo --json` ends with."""
    kept = recipe.runs / ".demo" / f"{recipe.name}.json"
    told = recipe.model_dump(mode="json", exclude={"runs"})
    if kept.exists():
        saved = json.loads(kept.read_text())
        made = [Path(saved["result"][key]) for key in ("report", "run", "model_sft", "model_rl")]
        if saved["recipe"] == told and all(path.exists() for path in made):
            tell(saved["result"], reporter)
            return saved["result"]
    started = time.monotonic()
    with PeakMemory() as memory:
        async with RunSession.open(recipe, reporter) as session:
            session.warm_up()
            base, after_sft = await fine_tune(session)
            problems = [problem for group in session.held_out.values() for problem in group]
            parent = {"run": session.run_id("sft"), "step": None}
            before = await evaluate_model(session, base, problems, "eval-base", samples=NOTHING_SAMPLES)
            imitated = await evaluate_model(session, after_sft, problems, "eval-sft", parent=parent)
            after_rl = await train(session, after_sft, parent=parent)
            last = int(after_rl.name.removeprefix("step="))
            learned = await evaluate_model(
                session, after_rl, problems, "eval-rl", parent={"run": session.run_id("rl"), "step": last}
            )
            reporter.say("writing the report ...")
            writing = asyncio.create_task(asyncio.to_thread(make_report, recipe, out))  # while the engines end
        report = await writing
    result = {
        "pass1_base": before["pass1"],
        "pass1_sft": imitated["pass1"],
        "pass1_rl": learned["pass1"],
        "error_rate_correct_sft": imitated["error_rate_correct"],
        "error_rate_correct_rl": learned["error_rate_correct"],
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_gb": memory.gb,
        "run": str((recipe.runs / f"{recipe.name}-rl").resolve()),
        "report": str(report.resolve()),
        "model_sft": str(after_sft.resolve()),
        "model_rl": str(after_rl.resolve()),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, {"recipe": told, "result": result})
    tell(result, reporter)
    return result


def make_report(recipe: Recipe, out: Path) -> Path:
    """Execute the quickstart notebook on the runs, and keep it as HTML whose figures need no network."""
    out.mkdir(parents=True, exist_ok=True)
    executed = out / f"{recipe.name}.ipynb"
    parameters = {"runs_dir": str(recipe.runs.resolve()), "name": recipe.name}
    flags = [item for key, value in parameters.items() for item in ("-p", key, value)]
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(executed), *flags, "--no-progress-bar"]
    # Figures as JSON for JupyterLab and as HTML with plotly inside for the page.
    environment = os.environ | {"PLOTLY_RENDERER": "plotly_mimetype+notebook"}
    with subprocess.Popen(
        [*command, "--kernel", "python3", "--cwd", str(out)], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as papermill:  # fmt: skip
        from nbconvert import HTMLExporter  # takes seconds, which the notebook takes too

        _, messages = papermill.communicate()
    if papermill.returncode:
        lines = messages.strip().splitlines() or ["no message"]
        raise UserError(f"the notebook could not be executed: {lines[-1]} (see {executed})")
    # The page loads nothing from the network. nbconvert replaces an empty URL of the widget loader by a public server's.
    nothing = "data:text/javascript,"
    exporter = HTMLExporter(
        exclude_input=True, mathjax_url="", require_js_url="", jquery_url="", widget_renderer_url=nothing,
        mermaid_js_url=nothing, mermaid_layout_elk_js_url=nothing,
    )  # fmt: skip
    page, _ = exporter.from_filename(str(executed))
    html = executed.with_suffix(".html")
    # plotly asks a server for MathJax, which no figure here needs.
    html.write_text(re.sub(r'<script src="https?://[^"]*"></script>', "", page))
    return html


def tell(result: dict[str, Any], reporter: Reporter) -> None:
    """The end of the demo, for people."""

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    reporter.say(
        f"\n[bold]held-out pass@1[/]   from nothing {format_interval(result['pass1_base'])}"
        f"   after SFT {format_interval(result['pass1_sft'])}   after GRPO-RoC {format_interval(result['pass1_rl'])}\n"
        f"tool errors inside correct trajectories   {rate(result['error_rate_correct_sft'])} -> "
        f"{rate(result['error_rate_correct_rl'])}\n"
        f"{result['seconds']:.0f} s, peak memory {result['peak_memory_gb']:.1f} GB\n\n"
        f"report     {result['report']}\n"
        f"notebook   {Path(result['report']).with_suffix('.ipynb')}   (make lab opens JupyterLab)\n"
        f"run        {result['run']}\n"
        f"model      {result['model_rl']}\n"
    )
