"""`rstar-lab monitor`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import RunsFolder, echo, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab monitor --runs-dir runs",
        "rstar-lab monitor --host 0.0.0.0 --port 9400",
    )
)
def monitor(
    runs_dir: RunsFolder = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines can reach requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 9400,
) -> None:
    """Serve the metrics of all runs in a folder to Prometheus, until stopped.

    The token is read from the environment variable RSTAR_LAB_MONITOR_TOKEN (`openssl rand -hex 32` prints one). Without it, a
    token is made and stored in a file that only you can read; its path is printed (`credentials_file` of Prometheus).
    cluster/monitoring contains a Grafana dashboard and alert rules.
    """
    from rstar_lab.cli.exporter import serve_metrics

    def announce(url: str, token_file: Path | None) -> None:
        if not runs_dir.is_dir():
            echo(f"there is no folder {runs_dir} yet: its runs appear when they are written", err=True)
        if token_file is not None:
            echo(f"token: {token_file}", err=True)
        echo(url)

    serve_metrics(runs_dir, host, port, os.environ.get("RSTAR_LAB_MONITOR_TOKEN") or None, announce)
