"""`rstar-lab runs`: list runs, show one run, merge the files of a run."""

import json
from pathlib import Path
from typing import Any

import typer

from rstar_lab.cli.shared import AsJson, RunName, RunsFolder, examples, find_run, print_result, print_table
from rstar_lab.untrusted.text import echo

app = typer.Typer(no_args_is_help=True, help="List, show and compact runs.")


@app.command("list", epilog=examples("rstar-lab runs list --runs-dir runs"))
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
            echo(json.dumps(row))
        return
    from rich.table import Column, Table

    # Other commands need the complete id, so it is wrapped and never truncated.
    names = ("stage", "status", "steps", "trajectories", "reward", "created")
    table = Table(Column("run", overflow="fold"), *names, box=None, padding=(0, 1, 0, 0))
    if not rows:
        echo(f"no runs in {runs_dir}/ yet: `rstar-lab demo --fast` creates one")
        return
    cells = (
        (row["run_id"], row.get("stage") or row.get("kind", ""), row["status"],
         row.get("last_step") or row.get("steps", ""), row.get("trajectories", ""),  # SFT does not store every step
         "" if row.get("reward") is None else f"{row['reward']:.3f}", (row.get("created") or "")[5:16].replace("T", " "))
        for row in rows
    )  # fmt: skip
    print_table(table, cells)
    for row in rows:
        if "error" in row:
            echo(row["error"])


@app.command(epilog=examples("rstar-lab runs show tiny_fast-rl"))
def show(run: RunName, runs_dir: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Show one run: recipe, versions, status and the metrics of its last step."""
    import yaml

    from rstar_lab.runs.info import plain_info
    from rstar_lab.runs.reader import RunReader

    reader = RunReader(find_run(run, runs_dir))
    lines, info = reader.metrics(), plain_info(reader.info) | _summary(reader.run_dir)
    known = [(key, value) for key, value in info.items() if value not in (None, {}, [])]
    # The longest entries first: the end of the output is what a terminal shows.
    known.sort(key=lambda entry: -len(str(entry[1])))
    text = yaml.safe_dump(dict(known), sort_keys=False, allow_unicode=True)
    damaged = [str(damage.error) for damage in reader.damages()]
    text = "".join(f"damaged: {message}\n" for message in damaged) + text
    if lines:
        text += f"metrics of the last step:\n{yaml.safe_dump(lines[-1], sort_keys=False)}"
    print_result(as_json, info | {"metrics": lines[-1] if lines else None, "damaged": damaged}, text.rstrip())


@app.command(epilog=examples("rstar-lab runs compact tiny_fast-rl"))
def compact(run: RunName, runs_dir: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """Merge the step files of a run into few files, so that readers open it faster. No process may be writing the run."""
    from rstar_lab.runs.compact import compact as merge

    done = merge(find_run(run, runs_dir))
    result = {"run_id": run, "files_before": done.before, "files_after": done.after}
    print_result(as_json, result, f"{run}: {done.before} files are now {done.after}")


def _summary(folder: Path) -> dict[str, Any]:
    from rstar_lab.runs.reader import RunReader

    reader = RunReader(folder)
    info, steps = reader.info, reader.steps()
    rollup = reader.rollup(steps, ("step", "rows_trajectories", "reward_mean")).to_pylist()
    rewards = [row["reward_mean"] for row in rollup if row["reward_mean"] is not None]
    return {
        "run_id": info["run_id"], "kind": info["kind"], "status": reader.status, "created": info.get("created"),
        "attempts": info.get("attempts"), "stage": list(steps.values())[-1] if steps else None, "steps": len(steps),
        "last_step": max(steps, default=None), "trajectories": sum(row["rows_trajectories"] for row in rollup),
        "reward": rewards[-1] if rewards else None, "checkpoints": list(reader.checkpoints()), "path": str(folder),
    }  # fmt: skip
