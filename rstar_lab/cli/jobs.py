"""`rstar-lab jobs`: submit, list, status, logs, stop, pull, describe."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RecipeName, examples, print_result, print_table
from rstar_lab.untrusted.text import printable

app = typer.Typer(
    no_args_is_help=True,
    help="Run recipes as jobs on this machine, on Ray, Slurm or Kubernetes, or on another machine over ssh.",
)
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder of runs; jobs are stored in its .jobs folder.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        help="Hardware profile: a name from cluster/profiles, or a file. Default: laptop; with --host: rstar-lab/profile.yaml there."
    ),
]
JobId = Annotated[str, typer.Argument(help="Id of the job, as `jobs list` shows it.")]


@app.command(
    epilog=examples(
        "rstar-lab jobs submit tiny_fast --watch",
        "rstar-lab jobs submit RECIPE --host HOST",
        "rstar-lab jobs submit RECIPE --profile h100x8 --backend kuberay",
    )
)
def submit(
    recipe: RecipeName,
    profile: ProfileOption = None,
    overrides: Overrides = None,
    command: Annotated[
        str | None,
        typer.Option(help="run, train or sft with the profile's trainer, or verl (run with verl). Default: run."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="local, ray, slurm, ssh or kuberay. Default: the profile's backend.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="URL of Ray's dashboard, http://HOST:8265.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Run the job on this host over ssh: HOST, USER@HOST or an alias of ~/.ssh/config."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; the job's id begins with it. Default: the recipe's name.")
    ] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Folder of runs. Default: storage.runs of the profile.")] = None,
    preflight: Annotated[bool, typer.Option(help="Check the recipe and the profile first.")] = True,
    watch: Annotated[bool, typer.Option(help="Print the job's progress until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run RECIPE on the hardware of a profile, detached. Submitting the same recipe again resumes its run."""
    from rstar_lab.jobs import job_row
    from rstar_lab.jobs import submit as submit_job
    from rstar_lab.jobs.prepare import override_pairs

    pairs = override_pairs(overrides or [], "--set")
    job = submit_job(
        recipe, profile, pairs, command=command, runs_dir=runs_dir, name=name, backend=backend, address=address, host=host,
        preflight=preflight, log=lambda text: typer.echo(printable(text), err=True),
    )  # fmt: skip
    print_result(as_json, job_row(job), job.id)
    if watch and (end := job.watch()).value != "finished":
        raise typer.Exit(1 if end.ended else 130)


@app.command("list", epilog=examples("rstar-lab jobs list"))
def list_(runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """List all jobs of a runs folder, oldest first."""
    from rich import box
    from rich.table import Table

    from rstar_lab.jobs import job_row, list_jobs

    rows = [job_row(job) for job in list_jobs(runs_dir)]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    if not rows:
        typer.echo(f"no jobs in {runs_dir}/ yet: `rstar-lab jobs submit RECIPE` starts one")
        return
    # Ids are never truncated, because `jobs logs` and `jobs stop` need them. The other columns wrap.
    table = Table("id", "status", "backend", "profile", box=box.SIMPLE, padding=(0, 1))
    table.columns[0].no_wrap, table.columns[0].min_width = True, max((len(row["id"]) for row in rows), default=2)
    table.columns[1].no_wrap = True
    print_table(table, ((row["id"], row["status"], row["backend"], Path(row["profile"]).name) for row in rows))
    for row in rows:
        if row["error"]:
            typer.echo(printable(f"{row['id']}: {row['error']}"), err=True)


@app.command(epilog=examples("rstar-lab jobs logs tiny_fast-20260101-120000-ab12 --follow"))
def logs(
    job_id: JobId,
    runs_dir: RunsDir = Path("runs"),
    tail: Annotated[int | None, typer.Option(help="Print only the last N lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the job ends.")] = False,
) -> None:
    """Print the log of a job."""
    from rstar_lab.jobs import attach

    job = attach(job_id, runs_dir=runs_dir)
    if follow:
        if not job.watch().ended:
            raise typer.Exit(130)
    else:
        typer.echo(printable(job.logs(tail)), nl=False)


@app.command(epilog=examples("rstar-lab jobs stop tiny_fast-20260101-120000-ab12"))
def stop(job_id: JobId, runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """End a job and every process it started."""
    from rstar_lab.jobs import attach, job_row

    job = attach(job_id, runs_dir=runs_dir)
    status = job.stop()
    print_result(as_json, job_row(job), f"{job.id}: {status}")


@app.command(epilog=examples("rstar-lab jobs status tiny_fast-20260101-120000-ab12 --json"))
def status(job_id: JobId, runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Print the status of a job, its run and its last step."""
    from rstar_lab.jobs import attach, job_row
    from rstar_lab.jobs.progress import last_metrics

    job = attach(job_id, runs_dir=runs_dir)
    row = job_row(job) | {"last": last_metrics(job.run_dir)}
    last = row["last"] or {}
    shown = {**row, "last": None, "step": last.get("step"), "reward": last.get("reward")}
    print_result(as_json, row, "\n".join(f"{key:<10} {value}" for key, value in shown.items() if value is not None))


@app.command(epilog=examples("rstar-lab jobs pull tiny_fast-20260101-120000-ab12 --checkpoints"))
def pull(
    job_id: Annotated[str, typer.Argument(help="Id of a job that was submitted with --host.")],
    runs_dir: RunsDir = Path("runs"),
    checkpoints: Annotated[bool, typer.Option(help="Also copy checkpoints and models.")] = False,
    transcripts: Annotated[
        bool | None, typer.Option(help="Also copy messages and tokens. Default: ssh.transcripts of the profile.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Copy new steps until the job ends.")] = False,
) -> None:
    """Copy the runs of a job from its host.

    `jobs submit --host` starts a process that does this while the job runs; `pull` copies at once, and can also copy
    checkpoints and transcripts.
    """
    from rstar_lab.jobs import attach
    from rstar_lab.jobs.ssh.follow import follow as follow_runs
    from rstar_lab.jobs.ssh.mirror import pull as pull_runs

    job = attach(job_id, runs_dir=runs_dir)
    if follow:
        follow_runs(job, log=lambda text: typer.echo(printable(text)), checkpoints=checkpoints, transcripts=transcripts)
        return
    for pulled in pull_runs(job.spec, checkpoints=checkpoints, transcripts=transcripts):
        typer.echo(printable(pulled))


@app.command(epilog=examples("rstar-lab jobs describe qwen3_14b_mi300x --profile mi300x_8x8"))
def describe(
    recipe: RecipeName,
    profile: ProfileOption = None,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Describe the job on this host, reached over ssh.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a job without submitting it: time per stage, GPU-hours, cost, disk space, failed checks, queue.

    The cost needs `hardware.price_per_gpu_hour` in the profile. Exits with 1 if a check fails.
    """
    from rstar_lab.jobs.job import describe as describe_job
    from rstar_lab.jobs.prepare import override_pairs

    description = describe_job(recipe, profile, override_pairs(overrides or [], "--set"), host=host)
    print_result(as_json, description.to_json(), str(description))
    if not description.ready:
        raise typer.Exit(1)
