"""`rstar-lab rescore`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunName, RunsFolder, examples, find_run
from rstar_lab.visible_text import printable

app = typer.Typer()
SHOWN = 20


@app.command(
    epilog=examples(
        "rstar-lab rescore tiny_fast-eval-rl --answer boxed --dry-run",
        "rstar-lab rescore tiny_fast-eval-rl --reward my_rewards:close_enough",
    )
)
def rescore(
    run: RunName,
    reward: Annotated[
        str, typer.Option(help="Reward: verify, released or module:function, as in the recipe key rl.reward.")
    ] = "verify",
    answer: Annotated[
        str, typer.Option(help="Where `verify` reads the answer: tagged, boxed or last_number (recipe key rl.answer).")
    ] = "tagged",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; list the trajectories whose reward changes.")
    ] = False,
    runs_dir: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Compute the rewards of a stored run again, without sampling.

    Writes a new run, RUN-rescored-..., with the new rewards; the old run is not changed. Runs with
    trajectories of `rl.environments` are rejected: each environment has a reward of its own. With --json the last line is
    {"run", "trajectories", "correct_before", "correct", "changes", "result"}, after one line per changed trajectory.
    """
    from rstar_lab.rl.rescore import rescore as compute

    found = compute(find_run(run, runs_dir), reward=reward, answer=answer, dry_run=dry_run)  # type: ignore[arg-type]
    for number, change in enumerate(found.changes):
        if as_json:
            print(json.dumps(asdict(change)))
        elif number < SHOWN:
            before = "none" if change.reward_before is None else f"{change.reward_before:g}"
            line = (
                f"{change.traj_id}: reward {before} -> {change.reward:g}, answer {change.answer_before!r} -> "
                f"{change.answer!r}, truth {change.truth!r}"
            )
            print(printable(line))
    if as_json:
        summary = {"run": str(found.run) if found.run else None, "trajectories": found.trajectories,
                   "correct_before": found.correct_before, "correct": found.correct, "changes": len(found.changes)}  # fmt: skip
        print(json.dumps(summary | {"result": found.result}))
        return
    if len(found.changes) > SHOWN:
        print(f"... and {len(found.changes) - SHOWN} more; --json lists all")
    print(
        f"{len(found.changes)} of {found.trajectories} rewards change; correct: {found.correct_before} -> {found.correct}"
    )
    if found.run:
        print(printable(f"run {found.run}"))
