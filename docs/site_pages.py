"""mkdocs hook: generate the pages that would otherwise repeat the code: the command line and one page per notebook."""

import re
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
SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?:rstar_lab|cluster|notebooks|tests|[A-Z.])[^)]*\)")


def command_line() -> str:
    """Return the command line reference in Markdown, from the help texts of the commands."""
    from rstar_lab.cli.command_line import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="rstar-lab")
    return (
        "# Command line\n\nGenerated from the help texts: `rstar-lab --help` prints the same.\n\n"
        + text.partition("\n")[2]
    )


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text and its code, without outputs."""
    notebook = jupytext.read(path)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../docs/", "](../"))
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
    first, *rest = [part for part in parts if part.strip()]
    note = f"*This is the notebook `notebooks/{path.stem}.ipynb`; `make lab` opens it.*"
    return "\n\n".join([first, note, *rest]) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    files.append(File.generated(config, "cli.md", content=command_line()))
    for path in NOTEBOOKS:
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=notebook_page(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links into the source tree by their text."""
    return SOURCE_LINK.sub(r"\1", markdown)
