"""Options shared by several commands, and helpers that run a command and print its errors."""

import difflib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from rstar_lab.common.errors import UserError, as_called
from rstar_lab.hardware.ends import STOPPED, end_now, exit_code, output_is_closed
from rstar_lab.untrusted.text import echo, printable

if TYPE_CHECKING:
    from rich.table import Table

    from rstar_lab.rl.recipe import Recipe

RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Folder of runs. Default: runs/, or the recipe's.")]
RunsFolder = Annotated[Path, typer.Option("--runs-dir", help="Folder of runs.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run id, as `runs list` shows it, or a run's folder.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, such as rl.lr=1e-4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or a name that `rstar-lab recipes` lists.")
]
ProfileName = Annotated[str, typer.Option(help="Hardware profile: a name from cluster/profiles, or a file.")]


def examples(*lines: str) -> str:
    """Return the end of a command's help: one command line per paragraph."""
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *(as_called(f"`{line}`") for line in lines)])


def read_recipe(recipe: str, overrides: list[str] | None, runs_dir: Path | None) -> "Recipe":
    """Return the recipe with the overrides of the command line. Raises UserError for an unknown recipe or key."""
    from rstar_lab.rl.overrides import load_recipe, parse_overrides

    pairs = parse_overrides(overrides or [])
    if runs_dir:
        existing = next(path for path in (runs_dir, *runs_dir.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise UserError(f"--runs-dir {runs_dir}: {existing} is a file; give a folder")
        pairs["runs"] = str(runs_dir)
    return load_recipe(recipe, pairs)


def find_run(run: str, runs_dir: Path) -> Path:
    """Return the folder of a run, which is given by its folder or its id. Raises UserError."""
    places = (Path(run), runs_dir / run)
    if found := [folder for folder in places if (folder / "run.json").exists()]:
        return found[0]
    for folder in places:
        if inside := sorted(folder.glob("*/run.json")):
            raise UserError(f"{folder} is a folder of runs: give one of them, such as {inside[-1].parent}")
    if not runs_dir.is_dir():
        raise UserError(
            f"no run {run} in {runs_dir}/: there is no folder {runs_dir}; set the folder of the runs with --runs-dir"
        )
    if (runs_dir / "run.json").exists():
        raise UserError(f"--runs-dir {runs_dir}: this is a run, not a folder of runs; give its folder as RUN")
    names = sorted(path.parent.name for path in runs_dir.glob("*/run.json"))
    near = difflib.get_close_matches(run, names, n=1)
    meant = f"did you mean {near[0]}?" if near else f"existing runs: {', '.join(names[-8:]) or 'none'};"
    raise UserError(f"no run {run} in {runs_dir}/: {meant} `rstar-lab runs list` shows the runs")


def check_output(path: Path, *, folder: bool = False) -> None:
    """Raise UserError, before any work, if a file (or a folder) cannot be written there."""
    if path.exists() and path.is_dir() != folder:
        raise UserError(f"{path} is a {'file; give a folder' if folder else 'folder; give the name of a file'}")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not (existing.is_dir() or existing == path):
        raise UserError(f"{path}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{path}: {existing} cannot be written to; change its permissions, or choose another place")


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result. Ctrl-C ends the process with one line and code 130, a signal or a closed output alike."""
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        # Caught here because Typer would print only "Aborted!".
        print_error(f"the output was closed: {STOPPED}" if output_is_closed() else STOPPED)
        end_now(exit_code())


def print_result(as_json: bool, value: Mapping[str, Any], text: str) -> None:
    """Print the result of a command: one JSON object for programs, text for people."""
    echo(json.dumps(value) if as_json else text)


def print_shipped(
    name: str | None, file_of: Callable[[str], Path], as_json: bool, summaries: Mapping[str, str]
) -> None:
    """Print a shipped file, or without a name the names and summaries of all."""
    if name is not None:
        text = file_of(name).read_text(encoding="utf-8")
        print_result(as_json, {"name": name, "text": text}, text.rstrip("\n"))
    else:
        for each, summary in summaries.items():
            print_result(as_json, {"name": each, "summary": summary}, f"{each:22} {summary}")


def print_table(table: "Table", rows: Iterable[Iterable[object]]) -> None:
    """Print rows as a table. Names and errors of runs and jobs are no markup and control no terminal."""
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False, markup=False).print(table)


def print_error(message: str) -> None:
    """Print an error line."""
    line = Text.assemble(("error", "bold red"), f": {printable(as_called(message))}")
    Console(stderr=True, highlight=False, emoji=False).print(line, soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    """Print an error line and end the process."""
    print_error(message)
    sys.exit(code)
