"""`rstar-lab new`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import echo, examples
from rstar_lab.common.errors import UserError

app = typer.Typer()
TEMPLATES = Path(__file__).parent / "templates"


class Part(StrEnum):
    ENVIRONMENT = "environment"
    TOOL = "tool"
    METHOD = "method"
    RULE = "rule"
    LOSS = "loss"
    METRIC = "metric"


@app.command(epilog=examples("rstar-lab new rule my_rule", "rstar-lab new environment my_game"))
def new(
    part: Annotated[Part, typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(help="Name of the module: letters, digits and _.")],
) -> None:
    """Write an environment, tool, method, resampling rule, loss or metric of your own, with its test, into the working directory."""
    if not name.isidentifier():
        raise UserError(f"{name!r} is not a module name: use letters, digits and _, and no digit at the start")
    files = {Path(f"{name}.py"): f"{part}.py.txt", Path(f"test_{name}.py"): f"test_{part}.py.txt"}
    if existing := [str(path) for path in files if os.path.lexists(path)]:
        raise UserError(f"{', '.join(existing)}: exists already; choose another name")
    for path, template in files.items():
        path.write_text((TEMPLATES / template).read_text(encoding="utf-8").replace("{module}", name), encoding="utf-8")
        echo(path)
    echo(f"check it with: python -m pytest test_{name}.py")
