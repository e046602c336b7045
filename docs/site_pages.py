"""mkdocs hook: generate the pages that would otherwise repeat the code: the command line and one page per notebook."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks" / "py").glob("[0-9]*.py"))
# Links out of docs/ lead into the source tree, which is not part of the site.
# Picture of a tutorial page: file in docs/images, and caption. The SVG files are figures of the executed notebooks.
_TRAINING = (
    "Pass@1, tool errors in correct trajectories, length and reflection words over the 34 RL steps of `make demo`"
)
_INSPECTOR = "The inspector: a list of rollouts, and one rollout with its group, the entropy of every token, code and tool output"
_GOLDEN = "8 RL steps of a tiny model on two CPU cores"
PICTURES = {
    "00_quickstart": ("demo.png", _TRAINING),
    "01_sandbox": ("tutorial-sandbox.svg", "Latency of 50 sandbox calls, by program, on two CPU cores"),
    "02_sft": ("tutorial-sft.svg", "Loss of the SFT of `tiny_fast`, 240 steps on two CPU cores"),
    "03_train": ("demo.png", _TRAINING),
    "04_evaluate": ("tutorial-evaluate.svg", f"Pass@k of three models with 95% intervals, {_GOLDEN}"),
    "05_inspect": ("inspector.png", _INSPECTOR),
    "06_ablation": ("frontier.png", "Pass@1 and tool-error rate over tokens, seven arms with 95% intervals over seeds"),
    "07_tokens": ("tutorial-tokens.svg", f"Words whose first token has the highest entropy, {_GOLDEN}"),
    "09_cluster": (
        "tutorial-cluster.png",
        "The job board on a laptop: a selected job that trains, and one that has finished",
    ),
    "10_recipe": (
        "tutorial-recipe.svg",
        "Memory of an update of each stage on one GPU, predicted by a dry run on a CPU",
    ),
    "11_own_tools": ("inspector.png", _INSPECTOR),
    "12_async": ("tutorial-async.svg", "Learning curves of synchronous and asynchronous training"),
    "13_environment": ("inspector.png", _INSPECTOR),
    "14_counterfactual": ("tutorial-counterfactual.svg", f"What other rules would have trained on, {_GOLDEN}"),
    "15_doctor": (
        "tutorial-doctor.svg",
        "Two runs of `tiny_fast`: with a learning rate of 1e-9, which the doctor names, and with that of the recipe",
    ),
    "16_own_model": (
        "tutorial-own-model.svg",
        "SmolLM2-135M-Instruct, 10 RL steps of `rstar-lab demo --real` with seed 1",
    ),
    "18_paper": ("demo.png", _TRAINING),
    "17_own_loop": (
        "tutorial-own-loop.svg",
        "A loop by hand: 64 rollouts of `tiny_fast` a step; in the second half a shorter right answer is worth more",
    ),
}
SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?:rstar_lab|cluster|notebooks|tests|[A-Z.])[^)]*\)")


def command_line() -> str:
    """Return the command line reference in Markdown, from the help texts of the commands."""
    from rstar_lab.cli.command_line import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="rstar-lab")
    for short, whole in summaries(command, typer.Context(command)):
        text = text.replace(f": {short}\n", f": {whole}\n")
    return (
        "# Command line\n\nGenerated from the help texts: `rstar-lab --help` prints the same.\n\n"
        + text.partition("\n")[2]
    )


def summaries(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Yield the shortened and the whole first sentence of the help of each command."""
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        yield inner.get_short_help_str(), inner.get_short_help_str(limit=10_000)
        if hasattr(inner, "list_commands"):
            yield from summaries(inner, context)


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text, its code and a picture of what it shows, without other outputs."""
    notebook = jupytext.read(path)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\]\((\d\d_\w+)\.ipynb\)", r"](\1.md)", cell.source.replace("](../docs/", "](../")))
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
    first, *rest = [part for part in parts if part.strip()]
    note = f"*This is the notebook `notebooks/{path.stem}.ipynb`; `make lab` opens it.*"
    name, caption = PICTURES.get(path.stem, ("", ""))
    picture = [f"![{caption}](../images/{name})\n\n*{caption}*"] if name else []
    return "\n\n".join([first, note, *picture, *rest]) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, "cli.md", content=command_line()))
    for path in NOTEBOOKS:
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=notebook_page(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links into the source tree by their text."""
    return SOURCE_LINK.sub(r"\1", markdown)
