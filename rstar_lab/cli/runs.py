"""`rstar-lab runs`: list runs, show one run, merge the files of a run."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.cli.shared import AsJson, RunsFolder
from rstar_lab.visible_text import printable

app = typer.Typer(no_args_is_help=True, help="List, show and compact runs.")

RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run id, as `runs list` shows it.")]


@app.command("list", epilog="Example:\n\n`rstar-lab runs list --runs-dir runs`")
def list_(runs_dir: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """List all runs, oldest first, with status, steps and the latest mean reward. Unreadable runs are listed too."""
    from rstar_lab.runs.errors import READ_ERRORS
    from rstar_lab.runs.reader import run_folders

    rows = []
    for folder in run_folders(runs_dir):
        try:
            rows.append(_summary(folder))
        except READ_ERRORS as error:
            rows.append({"run_id": folder.name, "status": "unreadable", "error": str(error) or type(error).__name__})
    rows.sort(key=lambda row: row.get("created") or "")
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    # Other commands need the complete id, so it is wrapped and never truncated.
    names = ("stage", "status", "steps", "trajectories", "reward", "created")
    table = Table(Column("run", overflow="fold"), *names, box=None, padding=(0, 1, 0, 0))
    for row in rows:
        reward = row.get("reward")
        cells = [
            row["run_id"],
            row.get("stage") or row.get("kind", ""),
            row["status"],
            row.get("last_step") or row.get("steps", ""),  # SFT does not store every step
            row.get("trajectories", ""),
            "" if reward is None else f"{reward:.3f}",
            (row.get("created") or "")[5:16].replace("T", " "),
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console = Console(markup=False)
    console.print(table if rows else f"no runs in {runs_dir}/ yet: `rstar-lab demo --fast` creates one")
    for row in rows:
        if "error" in row:
            console.print(printable(row["error"]), style="red")


@app.command(epilog="Example:\n\n`rstar-lab runs show tiny_fast-rl`")
def show(run: RunId, runs_dir: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Show one run: recipe, versions, status and the metrics of its last step."""
    from rstar_lab.runs.reader import RunReader

    reader = RunReader(_folder(runs_dir, run))
    lines = reader.metrics()
    if as_json:
        print(json.dumps(reader.info | _summary(reader.run_dir) | {"metrics": lines[-1] if lines else None}))
        return
    import yaml
    from rich.console import Console

    console = Console()
    summary = _summary(reader.run_dir)
    found = reader.info | summary
    # The longest entries first: the end of the output is what a terminal shows.
    info = {
        key: found[key]
        for key in sorted(found, key=lambda key: -len(str(found[key])))
        if found[key] not in (None, {}, [])
    }
    console.print(printable(yaml.safe_dump(info, sort_keys=False, allow_unicode=True)), markup=False, end="")
    if lines:
        console.print("metrics of the last step:")
        console.print(printable(yaml.safe_dump(lines[-1], sort_keys=False)), markup=False, end="")


@app.command(epilog="Example:\n\n`rstar-lab runs compact tiny_fast-rl`")
def compact(run: RunId, runs_dir: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Merge the step files of a run into few files, so that readers open it faster. No process may be writing the run."""
    from rstar_lab.runs.compact import compact as merge

    done = merge(_folder(runs_dir, run))
    if as_json:
        print(json.dumps({"run_id": run, "files_before": done.before, "files_after": done.after}))
    else:
        print(f"{run}: {done.before} files are now {done.after}")


def _folder(runs_dir: Path, run: str) -> Path:
    from rstar_lab.runs.errors import RunStoreError
    from rstar_lab.runs.reader import run_folders

    folder = runs_dir / run
    if not (folder / "run.json").exists():
        names = [path.name for path in run_folders(runs_dir)]
        near = get_close_matches(run, names, n=3) if len(names) > 8 else []
        existing = ", ".join(near or names[-8:]) or "none"
        more = f" and {len(names) - 8} older; `rstar-lab runs list` shows them" if len(names) > 8 and not near else ""
        raise RunStoreError(
            f"no run {run!r} in {runs_dir}/; {'similar' if near else 'existing'} runs: {existing}{more}"
        )
    return folder


def _summary(folder: Path) -> dict[str, Any]:
    from rstar_lab.runs.reader import RunReader

    reader = RunReader(folder)
    info, steps = reader.info, reader.steps()
    rollup = reader.rollup().select(["rows_trajectories", "reward_mean"]).to_pylist()
    rewards = [row["reward_mean"] for row in rollup if row["reward_mean"] is not None]
    return {
        "run_id": info["run_id"],
        "kind": info["kind"],
        "status": reader.status,
        "created": info.get("created"),
        "attempts": info.get("attempts"),
        "stage": list(steps.values())[-1] if steps else None,
        "steps": len(steps),
        "last_step": max(steps, default=None),
        "trajectories": sum(row["rows_trajectories"] for row in rollup),
        "reward": rewards[-1] if rewards else None,
        "checkpoints": list(reader.checkpoints()),
        "path": str(folder),
    }
