"""`rstar-lab bench`."""

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.cli.shared import AsJson, echo, examples
from rstar_lab.common.errors import UserError

app = typer.Typer()
MODULES = {
    "trainer": "trainer", "sandbox": "sandbox", "rollout": "rollout", "scheduler": "scheduler", "store": "store",
    "verl": "verl", "gpu": "gpu", "async": "asynchronous", "scale": "scale", "intervals": "intervals",
}  # fmt: skip
ROW = "{:30} {:>10} {:24} {:>8}   {:20} {}".format


@app.command(epilog=examples("rstar-lab bench store", "rstar-lab bench sandbox --against http://127.0.0.1:8088"))
def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(MODULES)}.")],
    against: Annotated[
        str | None, typer.Option(help="URL of a running code-judge server, for `bench sandbox`.")
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="File of regimes, for `bench scheduler`.")] = None,
    verl: Annotated[
        bool | None, typer.Option("--verl", help="For `bench rollout`: compare the policies on the servers of verl.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=200_000, help="Trajectories, for `bench store`. Default: 8,000,000.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For `bench trainer` and `bench rollout`: folder or name of a pretrained model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure one part of the system against a peer in the same run. `ratio` says how many times better it is."""
    if name not in MODULES:
        raise UserError(f"bench {name}: unknown; choose from {', '.join(MODULES)}")
    given = {
        "against": (against, "sandbox"), "grid": (grid, "scheduler"), "verl": (verl, "rollout"), "rows": (rows, "store"),
        "model": (model, name if name == "rollout" else "trainer"),
    }  # fmt: skip
    options = {key: value for key, (value, _) in given.items() if value is not None}
    if wrong := next((key for key in options if given[key][1] != name), None):
        raise UserError(f"bench {name}: --{wrong} is an option of `bench {given[wrong][1]}` only")
    if not as_json:
        echo(ROW("bench", "value", "unit", "ratio", "against", "n"))
    # Lines are printed as they are measured: some benches take a quarter of an hour.
    for line in import_module(f"benchmarks.{MODULES[name]}").bench(**options):
        echo(json.dumps(line) if as_json else _row(line))


def _row(line: dict[str, Any]) -> str:
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}x"
    return ROW(line["name"], _number(line["value"]), line["unit"], ratio, _number(line["against"]), line["n"])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
