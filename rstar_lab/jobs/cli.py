"""`rstar-lab jobs`: submit, list, logs, stop."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Send recipes away to train, and find them again.")
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder of runs; jobs are kept under it.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@app.command()
def submit(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    profile: Annotated[str, typer.Option(help="Hardware profile: a name of cluster/profiles or a file.")] = "laptop",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value: overrides a recipe key.")] = None,
    command: Annotated[str | None, typer.Option(help="run or verl; default: what the profile says.")] = None,
    backend: Annotated[str | None, typer.Option(help="local, ray or slurm; default: what the profile says.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of Ray's dashboard, http://host:8265.")] = None,
    name: Annotated[str | None, typer.Option(help="Begins the job's id.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Folder of runs; default: the profile's.")] = None,
    preflight: Annotated[bool, typer.Option(help="Check recipe and machine first.")] = True,
    watch: Annotated[bool, typer.Option(help="Print the job's lines until it ends.")] = False,
    as_json: Json = False,
) -> None:
    """Run RECIPE on the hardware of a profile, detached; the same recipe again resumes its run."""
    from rstar_lab.errors import UserError
    from rstar_lab.jobs import submit as submit_job

    pairs = {}
    for item in overrides or []:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"--set {item}: write key=value")
        pairs[key] = value
    job = submit_job(
        recipe, profile, pairs, command=command, runs_dir=runs_dir, name=name, backend=backend, address=address,
        preflight=preflight, say=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(_row(job)))
    else:
        typer.echo(job.id)
    if watch and not job.watch().value == "finished":
        raise typer.Exit(1)


@app.command("list")
def list_(runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """All jobs of a runs folder, oldest first."""
    from rich.console import Console
    from rich.table import Table

    from rstar_lab.jobs import list_jobs

    rows = [_row(job) for job in list_jobs(runs_dir)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    columns = ["id", "status", "recipe", "profile", "backend", "created", "run"]
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column] or "") for column in columns))
    Console().print(table)


@app.command()
def logs(
    job_id: Annotated[str, typer.Argument(help="As `jobs list` shows it.")],
    runs_dir: RunsDir = Path("runs"),
    tail: Annotated[int | None, typer.Option(help="The last lines only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """What a job printed."""
    from rstar_lab.jobs import attach

    job = attach(job_id, runs_dir=runs_dir)
    if follow:
        job.watch()
    else:
        typer.echo(job.logs(tail), nl=False)


@app.command()
def stop(job_id: str, runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """End a job and every process it started."""
    from rstar_lab.jobs import attach

    job = attach(job_id, runs_dir=runs_dir)
    status = job.stop()
    typer.echo(json.dumps(_row(job)) if as_json else f"{job.id}: {status}")


def _row(job: Any) -> dict[str, Any]:
    spec = job.spec
    return {
        "id": job.id, "status": str(job.status()), "recipe": spec.recipe, "profile": spec.profile,
        "backend": spec.backend, "created": spec.created, "exit_code": job.exit_code,
        "run": str(job.run_dir) if job.run_dir else None,
    }  # fmt: skip
