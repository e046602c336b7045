"""`rstar-lab sandbox soak`."""

from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples, print_result

app = typer.Typer()


@app.command(epilog=examples("rstar-lab sandbox soak --calls 2000 --kills 10"))
def soak(
    calls: Annotated[int, typer.Option(min=1, help="Calls to run.")] = 10_000,
    kills: Annotated[
        int, typer.Option(min=0, help="Processes to kill: supervisors, zygotes, workers, the server, Redis, in turn.")
    ] = 50,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; each runs one call at a time.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed for the order of calls and the choice of processes to kill.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run mixed calls over Redis while processes are killed. Exit status 1 if a result is lost or wrong, or a process is left."""
    from benchmarks.soak import print_progress
    from benchmarks.soak import soak as run

    result = run(calls, kills, workers=workers, seed=seed, report=print_progress)
    values = result.to_dict()
    print_result(as_json, values, "\n".join(f"{name:16} {value}" for name, value in values.items()))
    if not result.passed:
        raise typer.Exit(1)
