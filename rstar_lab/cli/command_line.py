"""All commands of `rstar-lab`. Heavy imports wait until a command needs them, so `--help` is fast and needs no extra."""

import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from rstar_lab import __version__
from rstar_lab.cli.shared import fail, print_error
from rstar_lab.common.errors import UserError, install_hint, os_error_message
from rstar_lab.common.resources import load_benchmark
from rstar_lab.hardware.ends import STOPPED, end_now, exit_code, output_is_closed
from rstar_lab.untrusted.text import printable


class Interrupted(Exception):
    """Ctrl-C ended a command. Typer turns KeyboardInterrupt into an exit code that a command can also return itself."""


class Commands(typer.core.TyperGroup):
    """The commands. Ctrl-C raises Interrupted."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)  # fmt: skip

# The extra that installs each package, for the error of a command that requires the package.
EXTRA_OF = {
    "duckdb": "analysis", "pandas": "analysis", "plotly": "analysis", "pyarrow": "analysis", "anywidget": "analysis",
    "papermill": "notebooks", "nbconvert": "notebooks", "jupytext": "notebooks",
    "fastapi": "sandbox", "httpx": "sandbox", "math_verify": "sandbox", "redis": "sandbox", "mpmath": "sandbox",
    "uvicorn": "sandbox", "uvloop": "sandbox", "numpy": "sandbox", "scipy": "sandbox",
    "torch": "cpu", "transformers": "cpu", "tokenizers": "cpu", "safetensors": "cpu", "vllm": "cpu", "prometheus_client": "cpu",
    "ray": "verl", "verl": "verl", "transfer_queue": "verl", "datasets": "hub", "huggingface_hub": "hub", "inspect_ai": "inspect",
    "mcp": "mcp",
}  # fmt: skip
# Every command and group, in the order and under the headings of `--help`. A module without a help text holds commands of
# the same level; one with a help text is a group. Groups import their packages, which may need an extra.
COMMANDS: dict[str, dict[str, str | None]] = {
    "Start here": {"demo": None, "init": None, "run": None, "doctor": None, "evaluate": None},
    "Train": {"recipes": None, "preflight": None, "train": None, "rewind": None},
    "Evaluate and serve": {"chat": None, "serve": None, "audit": None, "rescore": None, "explain": None},
    "Inspect runs": {
        "view": None,
        "report": None,
        "runs": "List, show and compact runs.",
        "ablation": "Compare the arms of an ablation.",
        "mcp": None,
    },
    "Data": {"data": "Synthesize problems; prepare problems and conversations."},
    "Sandbox": {"sandbox": "Run untrusted Python: serve the sandbox, start workers, check this machine."},
    "Cluster": {
        "profiles": None,
        "jobs": "Submit recipes as jobs: on this machine, to Ray, Slurm or Kubernetes, or over ssh.",
        "plan": None,
        "rehearse": None,
    },
    "Share": {"export": None, "notebooks": None},
    "Measure": {"bench": None, "inject": None},
}

MEASURES = ("plan", "rehearse", "bench", "inject")  # in benchmarks/commands, which only the repository contains


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A workbench for reinforcement learning with a Python tool. Start with `rstar-lab demo --fast`.

    Install from a clone of the repository: everything with `make setup`, or an extra with `pip install '.[analysis]'`.
    """


def _mount() -> None:
    """Add all commands of `COMMANDS`.

    If the packages that a group requires are not installed, the group becomes a command that fails and names the extra to install.
    """
    for panel, modules in COMMANDS.items():
        for name, text in modules.items():
            try:
                home = "commands" if name in MEASURES else "rstar_lab.cli"
                commands = (load_benchmark if name in MEASURES else import_module)(f"{home}.{name}").app
            except (ModuleNotFoundError, UserError) as error:
                settings = {"allow_extra_args": True, "ignore_unknown_options": True}
                missing = _missing_command(error)
                app.command(name, help=text or str(error), context_settings=settings, rich_help_panel=panel)(missing)
                continue
            if text is None:
                for command in commands.registered_commands:
                    command.rich_help_panel = panel
                app.add_typer(commands)
            else:
                app.add_typer(commands, name=name, help=text, no_args_is_help=True, rich_help_panel=panel)


def _missing_command(error: ModuleNotFoundError | UserError) -> Callable[[], None]:
    def missing() -> None:
        raise error

    return missing


_mount()


# Typer prints `--fast <bool>` in the help, which reads as if the flag took a value. Other versions of Typer print no type.
_Option: Any = typer.core.TyperOption
if _display_type := getattr(_Option, "display_type_rich", None):
    _Option.display_type_rich = lambda self, ctx: None if self.is_flag else _display_type(self, ctx=ctx)


def _fail_usage(error: Any) -> NoReturn:
    """Print a wrong command, option or argument as one line, which names the help, and end the process."""
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help())
        sys.exit(error.exit_code)
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    message = re.sub(r"(argument|for) '([a-z_]+)'", lambda found: f"{found[1]} '{found[2].upper()}'", message)
    hint = ""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    options = {name: option for option in command.params for name in option.opts if name.startswith("--")}
    if context is not None and "did you mean" not in message.lower():
        hint = f"; `{context.command_path} --help` lists what is possible"
        takes_keys = any("--set" in option.opts for option in context.command.params)
        if takes_keys and ("unexpected extra" in message or message.startswith("No such option")):
            hint += "; a recipe key is set with --set KEY=VALUE, as in --set rl.lr=1e-4"
    if option := options.get(getattr(error, "option_name", "")):  # without its value
        hint = f": {option.help}"
    elif options and message.startswith("No such option") and "Possible options" not in message:
        hint = f"; there are {', '.join(options)}{hint}"
    fail(f"{message[:1].lower()}{message[1:]}{hint}", error.exit_code)


def _make_messages_printable() -> None:
    """Warnings and log lines may contain text of a run, a model or a tool."""
    warning, formatter = warnings.formatwarning, logging.Formatter()
    warnings.formatwarning = lambda *arguments, **options: printable(warning(*arguments, **options))
    if logging.lastResort is not None:
        logging.lastResort.format = lambda record: printable(formatter.format(record))  # type: ignore[method-assign]


def run() -> None:
    """Run the command line; print errors that a user can fix as one line instead of a traceback."""
    _make_messages_printable()
    try:
        try:
            code = app(standalone_mode=False)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in EXTRA_OF:
                raise
            raise UserError(f"this command requires {package}: {install_hint(EXTRA_OF[package])}") from error
        except Exception as error:
            if not hasattr(error, "format_message"):  # of Typer, whose classes differ between its versions
                raise
            _fail_usage(error)
        if isinstance(code, int):
            sys.exit(code)
    except UserError as error:
        fail(str(error), 1)
    except (KeyboardInterrupt, Interrupted):
        if not output_is_closed():  # as in `rstar-lab runs list | head -1`
            print_error(STOPPED)
        end_now(exit_code())
    except typer.Abort:
        fail("aborted", 1)
    except OSError as error:
        fail(os_error_message(error), 1)
    finally:
        # All results are written. Libraries print tracebacks if a signal interrupts their exit.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
