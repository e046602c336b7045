"""All commands of `rstar-lab`. Heavy imports wait until a command needs them, so `--help` is fast and needs no extra."""

import signal
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from rstar_lab import __version__
from rstar_lab.commands import (
    bench,
    chat,
    demo,
    evaluate,
    hub,
    inject,
    monitor,
    new,
    notebooks,
    plan,
    preflight,
    recipes,
    rehearse,
    report,
    rescore,
    rewind,
    serve,
    train,
)
from rstar_lab.commands.shared import fail
from rstar_lab.errors import UserError, os_error_message

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)  # fmt: skip

# The extra that installs each package, for the error of a command that requires the package.
EXTRA_OF = {
    "duckdb": "analysis", "pandas": "analysis", "plotly": "analysis", "pyarrow": "analysis", "anywidget": "analysis",
    "papermill": "notebooks", "nbconvert": "notebooks", "jupytext": "notebooks",
    "fastapi": "sandbox", "httpx": "sandbox", "math_verify": "sandbox", "redis": "sandbox", "sympy": "sandbox",
    "uvicorn": "sandbox", "uvloop": "sandbox", "numpy": "sandbox", "scipy": "sandbox", "prometheus_client": "sandbox",
    "torch": "cpu", "transformers": "cpu", "tokenizers": "cpu", "safetensors": "cpu", "vllm": "cpu",
    "ray": "verl", "verl": "verl", "transfer_queue": "verl", "datasets": "hub", "huggingface_hub": "hub", "inspect_ai": "inspect",
    "verifiers": "verifiers",
}  # fmt: skip
GROUPS = {
    "sandbox": ("rstar_lab.sandbox.cli", "Run untrusted Python: serve the sandbox, start workers, check this machine."),
    "runs": ("rstar_lab.runs.cli", "List, show and compact runs."),
    "ablation": ("rstar_lab.analysis.cli", "Compare the arms of an ablation."),
    "jobs": (
        "rstar_lab.jobs.cli",
        "Submit recipes as jobs: on this machine, to Ray, Slurm or Kubernetes, or over ssh.",
    ),
    "data": ("rstar_lab.rl.commands.data", "Synthesize problems; prepare problems and conversations."),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A workbench for reinforcement learning with a Python tool. Start with `rstar-lab demo --fast`.

    Install rstar_lab[sandbox], [analysis], [notebooks] or, with `make setup`, everything.
    """


for command in (
    demo,
    recipes,
    train,
    evaluate,
    inject,
    rescore,
    rewind,
    report,
    hub,
    serve,
    chat,
    preflight,
    plan,
    rehearse,
    bench,
    monitor,
    notebooks,
    new,
):
    app.add_typer(command.app)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def mount() -> None:
    """Add the command groups of the other packages. A second call does nothing.

    If the packages that a group requires are not installed, the group becomes a command that fails and names the extra to install.
    """
    if any(group.name in GROUPS for group in app.registered_groups):
        return
    for name, (module, text) in GROUPS.items():
        try:
            app.add_typer(import_module(module).app, name=name, help=text, no_args_is_help=True)
        except ModuleNotFoundError as error:
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, help=text, context_settings=settings)(_command_without_extra(error))


def _command_without_extra(error: ModuleNotFoundError) -> Callable[[], None]:
    def missing() -> None:
        _raise_missing_extra(error)

    return missing


def _raise_missing_extra(error: ModuleNotFoundError) -> None:
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        raise error
    raise UserError(f"this command requires {package}: pip install 'rstar_lab[{EXTRA_OF[package]}]'") from error


def run() -> None:
    """Run the command line; print errors that a user can fix as one line instead of a traceback."""
    try:
        try:
            app()
        except ModuleNotFoundError as error:
            _raise_missing_extra(error)
        except SystemExit as end:
            if end.__context__ is not None and isinstance(end.__context__.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from None  # Typer exits with 130 and prints nothing
            raise
    except UserError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("stopped; run the same command again to continue", 130)
    except OSError as error:
        fail(os_error_message(error), 1)
    finally:
        # All results are written. Libraries print tracebacks if Ctrl-C interrupts their exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
