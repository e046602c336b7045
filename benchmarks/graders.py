"""Compare our verification of answers with other graders: `python -m benchmarks.graders FOLDER`.

It writes benchmarks/data/graders.csv, from which the table of docs/evaluation.md is computed, and prints the table.

FOLDER holds problem sets (JSON lines). Three kinds of responses are graded against the true answer of each problem: the answer
itself in a box, the answer of the next problem in a box, and the reference solution if the set has one. Graders: ours
(`reward: verify`), that of microsoft/rStar (`reward: released`), and its two parts, verl's prime_math and math-verify.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.data.sources import load_problems, parse_fields
from rstar_lab.rl.reward.boxed import RELEASED, WORKERS, released_grade
from rstar_lab.verify import AnswerFormat, verify

OTHERS = ("released", "prime_math", "math_verify_response")
# name -> (`fields` of `load_problems`, field of the reference solution, format of the answer in the solution)
SETS: dict[str, tuple[str, str | None, AnswerFormat]] = {
    "aime24": ("question=problem", "solution", "boxed"),
    "gsm8k": ("", "answer", "last_number"),
    "olympiadbench": ("answer=final_answer", None, "boxed"),
    "minerva_math": ("question=problem,answer=solution", "solution", "boxed"),
    "college_math": ("", None, "boxed"),
}


@dataclass(frozen=True, slots=True)
class Graded:
    """A response, and whether each grader accepts it. kind: answer, other answer, or solution."""

    dataset: str
    kind: str
    response: str
    truth: str
    accepted: dict[str, bool]


def responses(path: Path) -> Iterator[tuple[str, str, str, AnswerFormat]]:
    """Yield (kind, response, true answer, where our verification reads the answer) for a problem set of SETS."""
    fields, solution, answer_format = SETS[path.stem]
    problems = load_problems(path, fields=parse_fields(fields))
    answers = [problem.answer for problem in problems]
    for answer, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        yield "answer", f"The answer is \\boxed{{{answer}}}.", answer, "boxed"
        if other.strip() != answer.strip():
            yield "other answer", f"The answer is \\boxed{{{other}}}.", answer, "boxed"
    if solution:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for row, answer in zip(rows, answers, strict=True):
            yield "solution", str(row[solution]), answer, answer_format


def grade(path: Path) -> list[Graded]:
    """Return the results of all graders for the responses of a problem set."""

    def grade_response(item: tuple[str, str, str, AnswerFormat]) -> Graded:
        kind, response, truth, answer_format = item
        ours = verify(response, truth, answer_format=answer_format)
        prime_math, math_verify = (released_grade(response, truth, graders=(name,)) for name in RELEASED)
        # The release asks math-verify if prime_math rejects a response, within one limit of CPU time.
        released = prime_math or (math_verify and released_grade(response, truth))
        accepted = {"ours": ours, "released": released, "prime_math": prime_math, "math_verify_response": math_verify}
        return Graded(path.stem, kind, response, truth, accepted)

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(grade_response, responses(path)))


def table(graded: list[Graded]) -> pd.DataFrame:
    """Return one row per set and kind: number of responses, how many each grader accepts, and how often `released` agrees with ours."""
    rows = pd.DataFrame(
        {"set": item.dataset, "kind": item.kind, "responses": 1}
        | {f"accepted_{name}": int(item.accepted[name]) for name in ("ours", *OTHERS)}
        | {"agree_released": int(item.accepted["released"] == item.accepted["ours"])}
        for item in graded
    )
    return rows.groupby(["set", "kind"], sort=False, as_index=False).sum()


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `table`, summed over the sets, as in docs/evaluation.md."""
    return rows.groupby("kind", sort=False).sum(numeric_only=True).reset_index().assign(set="all")[rows.columns]


def markdown(rows: pd.DataFrame) -> str:
    """Return the rows of `table` as Markdown."""
    return "\n".join(
        f"| {row.set} | {row.kind} | " + " | ".join(f"{value:,}" for value in row.iloc[2:]) + " |"
        for _, row in rows.iterrows()
    )


def main(
    folder: Annotated[Path, typer.Argument(help=f"Folder with {', '.join(SETS)} as .jsonl files.")],
    disagreements: Annotated[
        Path | None, typer.Option(help="Write the responses on which our grader and the release's differ.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the table.")] = benchmark_file("graders.csv"),
) -> None:
    """Measure how often each grader accepts a response, and how often the release's agrees with `reward: verify`."""
    paths = [folder / f"{name}.jsonl" for name in SETS if (folder / f"{name}.jsonl").is_file()]
    if not paths:
        raise UserError(f"{folder} has none of the files {', '.join(f'{name}.jsonl' for name in SETS)}")
    graded: list[Graded] = []
    for path in paths:
        graded += grade(path)
        rows = table(graded)
        rows.to_csv(out, index=False)
    print(markdown(rows))
    if disagreements:
        differing = (item for item in graded if item.accepted["ours"] != item.accepted["released"])
        disagreements.write_text("".join(json.dumps(asdict(item)) + "\n" for item in differing))


if __name__ == "__main__":
    typer.run(main)
