"""`rstar-lab preflight`."""

from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, Overrides, ProfileName, RecipeName, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab preflight qwen3_14b_mi300x --profile mi300x_8x8",
        "rstar-lab preflight qwen3_14b_mi300x --profile mi300x_8x8 --dry-run",
    )
)
def preflight(
    recipe: RecipeName,
    profile: ProfileName = "laptop",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail also for checks that cannot run on this machine.")
    ] = False,
    trainer: Annotated[str | None, typer.Option(help="local or verl. Default: the profile's trainer.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run one update on fake tensors instead; print memory, kernels, times per GPU."),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check a recipe on a hardware profile without using a GPU, and estimate memory, disk and time.

    Exits with 1 if a check fails.
    """
    from rstar_lab.rl.overrides import parse_overrides
    from rstar_lab.rl.preflight.run import run_preflight

    pairs = parse_overrides(overrides or [])
    if dry_run:
        from rstar_lab.dry_run.run import run_dry_run

        raise typer.Exit(run_dry_run(recipe, profile, pairs, trainer=trainer, as_json=as_json))
    raise typer.Exit(run_preflight(recipe, profile, pairs, trainer=trainer, strict=strict, as_json=as_json))
