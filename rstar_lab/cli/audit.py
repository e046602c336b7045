"""`rstar-lab audit`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rstar_lab.cli.shared import AsJson, examples
from rstar_lab.untrusted.text import counted, echo

app = typer.Typer()


@app.command(
    epilog=examples(
        "rstar-lab audit verify --problems problems.jsonl",
        "rstar-lab audit my_rewards:close_enough --problems problems.jsonl",
    )
)
def audit(
    reward: Annotated[str, typer.Argument(metavar="REWARD", help="Reward: verify, released or module:function.")],
    problems: Annotated[Path, typer.Option(help="Problem file with true answers (.jsonl, .json or .parquet).")],
    fields: Annotated[str, typer.Option(help="Column names of the file: question=problem,answer=solution.")] = "",
    answer: Annotated[str, typer.Option(help="Place of the answer: tagged, boxed or last_number.")] = "tagged",
    limit: Annotated[int, typer.Option(help="Number of problems that are used, drawn at random.", min=2)] = 50,
    as_json: AsJson = False,
) -> None:
    """Try a reward on answers whose reward is known: true, reformatted, wrong, empty, echoed, hedged, listed, injected, long.

    Also reports crashes, slow calls, and rewards that differ between calls. The exit code is 1 if a check fails. With --json, one
    line per check, and at last {"reward", "passed", "problems", "slowest_s"}. `rstar-lab rescore RUN --dry-run` lists the stored
    rollouts whose reward another function changes.
    """
    from rstar_lab.common.errors import UserError
    from rstar_lab.doctor.audit import CHECKS
    from rstar_lab.doctor.audit import audit as compute
    from rstar_lab.rl.data.sources import load_problems, parse_fields
    from rstar_lab.verify import ANSWER_FORMATS

    if answer not in ANSWER_FORMATS:
        raise UserError(f"--answer {answer}: choose from {', '.join(ANSWER_FORMATS)}")
    found = compute(reward, load_problems(problems, fields=parse_fields(fields)), answer=answer, limit=limit)  # type: ignore[arg-type]
    code = 0 if found.passed else 1
    if as_json:
        summary = {"reward": reward, "passed": found.passed, "problems": found.problems}
        summary["slowest_s"] = round(found.slowest_s, 3)
        echo("\n".join(map(json.dumps, [*map(asdict, found.checks), summary])))
        raise typer.Exit(code)
    for check in found.checks:
        meaning = f" ({CHECKS[check.check][1]})" if check.check in CHECKS else ""
        echo(f"{'FAIL' if check.failed else 'pass'}  {check.check}{meaning}: {check.n - check.failed} of {check.n}")
        if check.example:
            echo(f"      {json.dumps(check.example, ensure_ascii=False)}")
    echo(f"{reward}: {'passed' if found.passed else 'failed'} on {counted(found.problems, 'problem')}")
    raise typer.Exit(code)
