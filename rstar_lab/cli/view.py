"""`rstar-lab view`: the inspector in the browser, without Jupyter."""

import os
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import echo, examples, fail

app = typer.Typer()


@app.command(epilog=examples("rstar-lab view runs", "rstar-lab view tiny_fast-rl", "rstar-lab view verl_rollouts"))
def view(
    path: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A run, a folder of runs, or a log of verl, TRL and others.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port on this machine. Default: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the browser, or print the address only.")] = True,
) -> None:
    """Open the rollouts, curves and diagnosis of runs in the browser, live while a run trains.

    Nothing but this machine can connect, and the address contains a token. Logs of other trainers are imported into a cache.
    """
    from rstar_lab.viewer.logs import runs_folder
    from rstar_lab.viewer.service import Viewer, serve

    folder = runs_folder(path)
    viewer = Viewer(folder, logs=None if folder == path else path)
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        fail(f"--port {port}: {os.strerror(error.errno or 0)}; leave it out to use a free port", 1)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={viewer.token}"
    echo(f"{address}\nStop with Ctrl+C.")
    if browser:
        webbrowser.open(address)
    serve(viewer, listener)
