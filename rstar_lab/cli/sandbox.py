"""`rstar-lab sandbox serve | worker | check`."""

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.cli.shared import AsJson, examples, print_result
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import load_benchmark
from rstar_lab.untrusted.text import counted, echo

app = typer.Typer(
    no_args_is_help=True,
    help="Run model-written code as a service or as a worker, or check the isolation of this machine.",
)

TOKEN = "RSTAR_LAB_SANDBOX_TOKEN"

Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Calls that can use CPU time at the same time (default: one per core), and one more while all are short.",
    ),
]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=0.1, max=600, help="Default time limit of a call, in CPU seconds.")
]
MemoryMb = Annotated[int, typer.Option(min=64, help="Default memory limit of a call (all its processes), in MiB.")]
QueueTimeout = Annotated[
    float, typer.Option("--queue-timeout", min=1, help="Seconds a call may wait before its outcome is queue_timeout.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse to start if this machine does not support an isolation layer.")
]
Readable = Annotated[
    list[Path] | None,
    typer.Option(help="File or folder of this machine that programs can read. Repeat it for several."),
]
Preload = Annotated[
    list[str] | None,
    typer.Option(help="Module to import once, for all programs whose code names it. Repeat it for several."),
]
Isolation = Annotated[
    str, typer.Option(help="namespaces, or gvisor: a container with gVisor's kernel for every call. Requires runsc.")
]
Drain = Annotated[float, typer.Option("--drain", min=0, help="Seconds that running calls may continue after SIGTERM.")]
# The text of the commands names the variables: the column of option texts is too narrow for them.
Redis = typer.Option(envvar="RSTAR_LAB_REDIS_URL", show_envvar=False, metavar="URL", help="Redis server.")


@app.command(epilog=examples("rstar-lab sandbox serve --port 8088 --workers 8"))
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address other than loopback requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")] = 8088,
    workers: Workers = None,
    time_limit_s: TimeLimit = 10.0,
    memory_mb: MemoryMb = 2048,
    queue_timeout_s: QueueTimeout = 600.0,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Largest number of calls in flight; more are refused with status 429.")
    ] = 65536,
    redis: Annotated[str | None, Redis] = None,
    token_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the bearer token.")
    ] = None,
    own_token: Annotated[
        bool,
        typer.Option(
            "--token/--no-token",
            help="Without a token: make one and store it in a file where SandboxClient finds it. "
            "--no-token: serve every user of this machine.",
        ),
    ] = True,
    drain_s: Drain = 30.0,
    strict: Strict = False,
    readable: Readable = None,
    preload: Preload = None,
    isolation: Isolation = "namespaces",
    as_json: AsJson = False,
) -> None:
    """Serve the sandbox and the APIs of code-judge and SandboxFusion over HTTP. Code runs here, or on workers with --redis.

    Set RSTAR_LAB_REDIS_URL (redis://:PASSWORD@HOST:PORT/0) instead of --redis to keep the password out of the process list,
    and RSTAR_LAB_SANDBOX_TOKEN instead of --token-file.
    """
    options = {name: value for name, value in locals().items() if name not in ("as_json", "token_file")}
    from rstar_lab.sandbox.serve import Options, run_server

    token = token_file.read_text().strip() if token_file else os.environ.get(TOKEN) or None
    run_server(
        Options(**options, token=token),
        lambda ready: print_result(as_json, ready, _ready_text(ready, token_file, own=bool(token))),
    )


def _ready_text(ready: dict[str, Any], token_file: Path | None, *, own: bool) -> str:
    """Return the ready message, with a command to try. own: the clients need a token that the user has chosen."""
    from rstar_lab.sandbox.server import example_request

    file = token_file or ready["token_file"]
    token = f"$(cat {shlex.quote(str(file))})" if file else "TOKEN" if own else ""
    lines = [f"sandbox: {ready['url']} ({counted(ready['workers'], 'worker')})"]
    lines += [f"token: {ready['token_file']}"] if ready["token_file"] else []
    return "\n".join([*lines, f"try: {example_request(ready['url'], token)}"])


@app.command(epilog=examples("RSTAR_LAB_REDIS_URL=redis://:PASSWORD@HOST:6379/0 rstar-lab sandbox worker"))
def worker(
    redis: Annotated[str, Redis],
    workers: Workers = None,
    time_limit_s: TimeLimit = 10.0,
    memory_mb: MemoryMb = 2048,
    queue_timeout_s: QueueTimeout = 600.0,
    drain_s: Drain = 30.0,
    strict: Strict = False,
    readable: Readable = None,
    preload: Preload = None,
    isolation: Isolation = "namespaces",
    as_json: AsJson = False,
) -> None:
    """Take calls from Redis and run them on this machine. Any number of workers can share a Redis.

    Set RSTAR_LAB_REDIS_URL instead of --redis to keep the password out of the process list.
    """
    options = {name: value for name, value in locals().items() if name != "as_json"}
    from rstar_lab.sandbox.serve import Options, run_worker

    run_worker(Options(**options), lambda ready: print_result(as_json, ready, f"sandbox worker: {ready['worker']}"))


@app.command(epilog=examples("rstar-lab sandbox check --strict"))
def check(
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if a layer is missing.")] = False,
    isolation: Isolation = "namespaces",
    guarantees: Annotated[
        bool, typer.Option("--guarantees", help="Print what the sandbox guarantees on this machine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print which isolation layers this machine supports, and the risk of each missing one."""
    from dataclasses import asdict

    from rstar_lab.sandbox.check import GUARANTEES, NOT_PROVIDED, holds
    from rstar_lab.sandbox.check import check as find_layers

    layers = find_layers(isolation)
    absent = {layer.name.replace(" ", "_") for layer in layers if layer.detail[:7] != "present"}
    missing = absent | NOT_PROVIDED[isolation]
    if guarantees:
        for name in GUARANTEES:
            kept = holds(name, missing)
            print_result(as_json, {"guarantee": name, "holds": kept}, f"{'yes' if kept else 'NO':4} {name}")
    for layer in [] if guarantees else layers:
        state = "yes" if layer.present else f"NO   {layer.detail}"
        risk = f"\n{'':21}risk: {layer.leaves_open}" if layer.leaves_open else ""
        print_result(as_json, asdict(layer), f"{layer.name:20} {state}{risk}")
    if not guarantees and not as_json:
        for name in (name for name in GUARANTEES if not holds(name, missing)):
            echo(f"not guaranteed: a program {name}")
    if strict and not all(layer.present for layer in layers):
        raise typer.Exit(1)


with contextlib.suppress(UserError):  # `sandbox soak` is in the repository only
    app.add_typer(load_benchmark("commands.soak").app)


def main() -> None:
    """Run only the sandbox commands, without importing the rest of the package."""
    try:
        app()
    except UserError as error:
        echo(f"error: {error}", err=True)
        sys.exit(2)
