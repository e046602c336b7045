"""Compare our verification of answers with other graders: `python -m benchmarks.graders FOLDER`.

FOLDER holds problem sets (JSON lines). Three kinds of responses are graded against the true answer of each problem: the answer
itself in a box, the answer of the next problem in a box, and the reference solution if the set has one. Graders: ours
(`reward: verify`), that of microsoft/rStar (`reward: released`), and its two parts, verl's prime_math and math-verify.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar_lab.errors import UserError
from rstar_lab.rl.problems import load_problems, parse_fields
from rstar_lab.rl.reward.boxed import RELEASED, released_grade
from rstar_lab.verify import AnswerFormat, verify, warm_up
from rstar_lab.verify.pool import IDLE_WORKERS

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
        accepted = {"ours": verify(response, truth, answer_format=answer_format)}
        for name in OTHERS:
            accepted[name] = released_grade(response, truth, graders=RELEASED if name == "released" else (name,))
        return Graded(path.stem, kind, response, truth, accepted)

    with ThreadPoolExecutor(IDLE_WORKERS) as threads:
        return list(threads.map(grade_response, responses(path)))


def table(graded: list[Graded]) -> list[dict[str, Any]]:
    """Return one row per set and kind: number of responses, how many each grader accepts, and how often it agrees with ours."""
    groups: dict[tuple[str, str], list[Graded]] = {}
    for item in graded:
        groups.setdefault((item.dataset, item.kind), []).append(item)
    return [
        {"set": dataset, "kind": kind, "responses": len(items)}
        | {f"accepted_{name}": sum(item.accepted[name] for item in items) for name in ("ours", *OTHERS)}
        | {f"agree_{name}": sum(item.accepted[name] == item.accepted["ours"] for item in items) for name in OTHERS}
        for (dataset, kind), items in groups.items()
    ]


def main(
    folder: Annotated[Path, typer.Argument(help=f"Folder with {', '.join(SETS)} as .jsonl files.")],
    disagreements: Annotated[
        Path | None, typer.Option(help="Write the responses on which our grader and the release's differ.")
    ] = None,
) -> None:
    """Print how often each grader accepts a response and agrees with `reward: verify`, as JSON lines."""
    paths = [folder / f"{name}.jsonl" for name in SETS if (folder / f"{name}.jsonl").is_file()]
    if not paths:
        raise UserError(f"{folder} has none of the files {', '.join(f'{name}.jsonl' for name in SETS)}")
    warm_up()
    graded = [item for path in paths for item in grade(path)]
    for row in table(graded):
        print(json.dumps(row))
    if disagreements:
        differing = (item for item in graded if item.accepted["ours"] != item.accepted["released"])
        disagreements.write_text("".join(json.dumps(asdict(item)) + "\n" for item in differing))


if __name__ == "__main__":
    typer.run(main)
