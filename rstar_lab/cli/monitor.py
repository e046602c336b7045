"""`rstar-lab monitor`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab monitor --runs-dir runs",
        "rstar-lab monitor --host 0.0.0.0 --port 9400",
    )
)
def monitor(
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Folder of runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines can reach requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 9400,
) -> None:
    """Serve the metrics of all runs in a folder to Prometheus, until stopped.

    The token is read from the environment variable RSTAR_LAB_MONITOR_TOKEN (`openssl rand -hex 32` prints one).
    cluster/monitoring contains a Grafana dashboard and alert rules.
    """
    from rstar_lab.exporter import make_exporter

    server = make_exporter(runs_dir, host, port, os.environ.get("RSTAR_LAB_MONITOR_TOKEN") or None)
    name, number = server.server_address[:2]
    print(f"http://{name!s}:{number}/metrics", flush=True)
    with server:
        server.serve_forever()
