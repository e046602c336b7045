"""`rstar-lab mcp`: a read-only server over a runs folder, for assistants."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import echo, examples
from rstar_lab.hardware.ends import end_now, exit_code

app = typer.Typer()


@app.command(epilog=examples("rstar-lab mcp --runs-dir runs", "rstar-lab mcp --skill"))
def mcp(
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Folder of runs.")] = Path("runs"),
    skill: Annotated[bool, typer.Option("--skill", help="Print SKILL.md, the guide for assistants.")] = False,
) -> None:
    """Let an assistant read runs: a server of the Model Context Protocol (MCP) on standard input and output.

    Its tools list and describe runs, and return curves with intervals, SQL results, rollouts, transcripts, comparisons, the doctor's
    verdict and recipe keys. Nothing is written. An assistant's program starts this command; docs/assistants.md has the configuration.
    """
    from rstar_lab.exchange.mcp_server import SKILL, make_server

    if skill:
        return echo(SKILL.read_text(encoding="utf-8"), end="")
    signal.signal(signal.SIGINT, lambda *_: end_now(exit_code()))  # a thread of the server waits for its input
    make_server(runs_dir).run("stdio")
