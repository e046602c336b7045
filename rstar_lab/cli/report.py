"""`rstar-lab report`: write the report of a run, or check the text of a notebook."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.cli.shared import AsJson, RunsFolder, check_output, examples, find_run, print_result
from rstar_lab.common.errors import UserError

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab report tiny_fast-rl",
        "rstar-lab report tiny-rl --compare tiny_fast-rl --out report.html",
        "rstar-lab report tiny-rl --dataset out/tiny-rl-rollouts",
        "rstar-lab report tiny-rl --dry-run one_gpu",
        "rstar-lab report --lab executed.ipynb --json",
    )
)
def report(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run id, as `runs list` shows it, or a run's folder.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another run, for curves of both and a paired comparison.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: out/RUN.html.")] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write the run as a Hugging Face data set to this new folder: Parquet tables and README.md, as `push` sends.",
        ),
    ] = None,
    dry_run: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Also show memory and time of an update of the recipe on this hardware profile, from a dry run (no GPU needed).",
        ),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Number of trajectories to include.")] = 60,
    runs_dir: RunsFolder = Path("runs"),
    lab: Annotated[
        Path | None,
        typer.Option(
            metavar="NOTEBOOK", help="Check the text of this executed notebook instead; exit code 1 if it fails."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as one HTML file that needs no kernel and no network.

    It has a summary, curves, intervals, a searchable sample of trajectories with token values, the recipe and its provenance.

    With --lab, no report is written: the command lists every number and every block quote in the Markdown cells of an executed
    notebook that no output of the notebook contains. A number may be rounded, and a percentage may be a fraction of 1.
    """
    if (run is None) == (lab is None):
        raise UserError("report: give a RUN to report, or --lab NOTEBOOK to check a notebook")
    if lab is not None:
        _check(lab, as_json)
        return
    from rstar_lab.analysis.report import report_html
    from rstar_lab.runs.files import atomic_write

    folder = find_run(str(run), runs_dir)
    other = find_run(compare, runs_dir) if compare else None
    target = out or Path("out") / f"{folder.name}.html"
    check_output(target)
    rows = _dry_run(folder, dry_run) if dry_run else []
    page = report_html(folder, compare_with=other, sample=sample, dry_run=rows)
    with atomic_write(target) as file:
        file.write(page.encode())
    written: dict[str, Any] = {"report": str(target), "bytes": target.stat().st_size}
    lines = [f"{target} ({written['bytes'] / 1e6:.1f} MB)"]
    if dataset is not None:
        from rstar_lab.runs.hub import prepare, write_folder

        upload = prepare(folder)
        write_folder(upload, dataset)
        written |= {"dataset": str(dataset), "dataset_bytes": upload.size}
        lines.append(f"{dataset} ({upload.size / 1e6:.1f} MB)")
    print_result(as_json, written, "\n".join(lines))


def _dry_run(folder: Path, profile: str) -> list[dict[str, Any]]:
    from rstar_lab.hardware.profiles import load_profile
    from rstar_lab.rl.models.sources import SMOLLM2, is_named
    from rstar_lab.rl.overrides import parse_recipe, parse_stored_recipe
    from rstar_lab.rl.preflight.dry_run import dry_run_rows
    from rstar_lab.runs import RunReader

    info = RunReader(folder).info
    if not (info.get("recipe") or {}).get("stages"):
        raise UserError(f"--dry-run: the recipe of run {folder.name} has no RL stage")
    # The other sections are not used, and those of an older version may have keys that no longer exist.
    recipe = parse_stored_recipe(info, ("name", "model", "seed", "rl", "stages", "engine"))
    if is_named(recipe.model) and recipe.model != SMOLLM2:  # known by name, or in the cache; nothing is downloaded
        recipe = parse_recipe(recipe.model_dump(mode="json") | {"model": _local_model(recipe.model)})
    return list(dry_run_rows(recipe, load_profile(profile)))


def _local_model(name: str) -> str:
    """Return the folder of a model in the cache of the Hub; if it has none, the last part of its name."""
    from huggingface_hub import try_to_load_from_cache

    from rstar_lab.rl.models.sources import hub_name

    repository, revision = hub_name(name) or ("", None)
    found = try_to_load_from_cache(repository, "config.json", revision=revision) if repository else None
    return str(Path(found).parent) if isinstance(found, str) else Path(name).name


def _check(notebook: Path, as_json: bool) -> None:
    from rstar_lab.doctor.notebook_check import check_notebook

    found = check_notebook(notebook)
    lines = []
    for missing in found.missing:
        source = "" if missing.kind == "quotation" else f": {missing.context}"
        lines.append(
            f"cell {missing.cell}, line {missing.line}: {missing.kind} {missing.text!r} is in no output{source}"
        )
    checked = f"{found.numbers} numbers and {found.quotations} quotations"
    lines.append(f"{notebook}: {checked} checked, {len(found.missing)} in no output")
    print_result(as_json, {"notebook": str(notebook), "ok": not found.missing, **asdict(found)}, "\n".join(lines))
    if found.missing:
        raise typer.Exit(1)
