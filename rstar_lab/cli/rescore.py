"""`rstar-lab rescore`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, RunName, RunsFolder, examples, find_run, print_result

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
        before = "none" if change.reward_before is None else f"{change.reward_before:g}"
        answers = f"answer {change.answer_before!r} -> {change.answer!r}, truth {change.truth!r}"
        if as_json or number < SHOWN:
            line = f"{change.traj_id}: reward {before} -> {change.reward:g}, {answers}"
            print_result(as_json, asdict(change), line)
    summary = {
        "run": str(found.run) if found.run else None, "trajectories": found.trajectories, "correct_before": found.correct_before,
        "correct": found.correct, "changes": len(found.changes), "result": found.result,
    }  # fmt: skip
    more = len(found.changes) - SHOWN
    lines = [f"... and {more} more; --json lists all"] if more > 0 else []
    rewards = f"{len(found.changes)} of {found.trajectories} rewards change"
    lines.append(f"{rewards}; correct: {found.correct_before} -> {found.correct}")
    print_result(as_json, summary, "\n".join([*lines, *([f"run {found.run}"] if found.run else [])]))
