"""`rstar-lab jobs`: submit, list, status, logs, stop, pull, describe."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.cli.shared import AsJson, Overrides, RecipeName, examples, print_result, print_table
from rstar_lab.untrusted.text import echo

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
BackendOption = Annotated[
    str | None, typer.Option(help="local, ray, slurm, ssh or kuberay. Default: the profile's backend.")
]
AddressOption = Annotated[str | None, typer.Option(help="URL of Ray's dashboard, http://HOST:8265.")]
HostOption = Annotated[
    str | None, typer.Option(help="Run the job on this host over ssh: HOST, USER@HOST or an alias of ~/.ssh/config.")
]
StorageOption = Annotated[Path | None, typer.Option(help="Folder of runs. Default: storage.runs of the profile.")]
Watch = Annotated[bool, typer.Option("--watch", help="Print the job's progress until it ends.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Submit nothing; print the Slurm script, RayJob or Kubernetes manifest, and the job's command.",
    ),
]
JobId = Annotated[str, typer.Argument(help="Id of the job, as `jobs list` shows it.")]


@app.command(
    epilog=examples(
        "rstar-lab jobs submit tiny_fast --watch",
        "rstar-lab jobs submit RECIPE --host HOST",
        "rstar-lab jobs submit RECIPE --profile h100x8 --backend kuberay",
        "rstar-lab jobs submit RECIPE --profile mi300x_8x8 --dry-run",
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
    backend: BackendOption = None,
    address: AddressOption = None,
    host: HostOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run; the job's id begins with it. Default: the recipe's name.")
    ] = None,
    runs_dir: StorageOption = None,
    preflight: Annotated[bool, typer.Option(help="Check the recipe and the profile first.")] = True,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run RECIPE on the hardware of a profile, detached. Submitting the same recipe again resumes its run."""
    _submit(**locals())


@app.command(epilog=examples("rstar-lab jobs evaluate runs/my-rl --problems aime24 --profile mi300x_8x8"))
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|URL...", help="As of `rstar-lab evaluate`. Paths must exist on the node."),
    ],
    problems: Annotated[list[str], typer.Option(help="As of `rstar-lab evaluate`; repeat it for several sets.")],
    samples: Annotated[int | None, typer.Option(help="Rollouts per problem. Default: that of the recipe.")] = None,
    recipe: Annotated[str, typer.Option(help="Recipe with sampling, engine and sandbox settings.")] = "evaluate",
    profile: ProfileOption = None,
    overrides: Overrides = None,
    backend: BackendOption = None,
    address: AddressOption = None,
    host: HostOption = None,
    runs_dir: StorageOption = None,
    watch: Watch = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model as a job on one node of a profile.

    To use several nodes, start `rstar-lab serve MODEL` on each and give the URLs instead of a model.
    """
    arguments = [str(Path(place).absolute()) if not host and Path(place).exists() else place for place in models]
    arguments += [part for name in problems for part in ("--problems", _absolute(name, host))]
    arguments += ["--samples", str(samples)] if samples is not None else []
    _submit(
        recipe, profile, overrides, watch, dry_run, as_json, command="evaluate", arguments=arguments, preflight=False,
        address=address, runs_dir=runs_dir, backend=backend, host=host,
    )  # fmt: skip


def _absolute(problems: str, host: str | None) -> str:
    """Return `FILE` or `NAME=FILE` with an absolute path, for a job of this machine or of one that shares its files."""
    name, equals, file = problems.rpartition("=")
    return f"{name}{equals}{Path(file).absolute()}" if not host and Path(file).exists() else problems


def _submit(
    recipe: str,
    profile: str | None,
    overrides: list[str] | None,
    watch: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a job, or print what would be sent. options: others of `rstar_lab.jobs.submit`."""
    from rstar_lab.jobs import job_row, preview
    from rstar_lab.jobs import submit as submit_job
    from rstar_lab.jobs.prepare import override_pairs

    pairs = override_pairs(overrides or [], "--set")
    if dry_run:
        text = preview(recipe, profile, pairs, **options)
        print_result(as_json, {"dry_run": text}, text)
        return
    job = submit_job(recipe, profile, pairs, log=lambda text: echo(text, err=True), **options)
    print_result(as_json, job_row(job), job.id)
    if watch and (end := job.watch()).value != "finished":
        raise typer.Exit(1 if end.ended else 130)


@app.command("list", epilog=examples("rstar-lab jobs list"))
def list_(runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """List all jobs of a runs folder, oldest first."""
    from rich import box
    from rich.table import Column, Table

    from rstar_lab.jobs import job_row, list_jobs

    rows = [job_row(job) for job in list_jobs(runs_dir)]
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        return
    if not rows:
        echo(f"no jobs in {runs_dir}/ yet: `rstar-lab jobs submit RECIPE` starts one")
        return
    # Ids are never truncated, because `jobs logs` and `jobs stop` need them. The other columns wrap.
    names = Column("id", no_wrap=True, min_width=max(len(row["id"]) for row in rows))
    table = Table(names, Column("status", no_wrap=True), "backend", "profile", box=box.SIMPLE, padding=(0, 1))
    print_table(table, ((row["id"], row["status"], row["backend"], Path(row["profile"]).name) for row in rows))
    for row in rows:
        if row["error"]:
            echo(f"{row['id']}: {row['error']}", err=True)


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
        echo(job.logs(tail), end="")


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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Copy new steps until the job ends.")] = False,
) -> None:
    """Copy the runs of a job from its host.

    `jobs submit --host` starts a process that does this while the job runs; `pull` copies at once, and can also copy
    checkpoints. With --follow, it ends when the host does not answer for ten minutes.
    """
    from rstar_lab.jobs import attach
    from rstar_lab.jobs.ssh import mirror

    job = attach(job_id, runs_dir=runs_dir)
    if follow:
        mirror.follow(job, log=echo, checkpoints=checkpoints)
        return
    for pulled in mirror.pull(job.spec, checkpoints=checkpoints):
        echo(pulled)


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
