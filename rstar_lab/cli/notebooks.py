"""`rstar-lab notebooks`."""

from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import check_output, echo, examples

app = typer.Typer()


@app.command(epilog=examples("rstar-lab notebooks my_notebooks"))
def notebooks(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the notebooks.")]) -> None:
    """Copy the notebooks into a folder, to use them outside of a clone of the repository."""
    from rstar_lab.common.resources import copy_notebooks

    check_output(folder, folder=True)
    for path in copy_notebooks(folder):
        echo(path)
