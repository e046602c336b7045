"""Preflight check for repeated problems: within a stage, and between training and evaluation."""

from collections.abc import Sequence

from rstar_lab.errors import UserError
from rstar_lab.rl.data.similarity import tokens
from rstar_lab.rl.data.sources import is_problem_set, load_set
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip, Warn
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe.data import Problems

MAX_REPEATED = 0.01  # share of repeated questions in a stage above which the check warns


def repeated_problems(context: CheckContext) -> str:
    """Compare the questions of problem files by words, numbers and signs; case and layout are ignored.

    Raises UserError if a stage contains questions of an evaluation file, and Warn if more than MAX_REPEATED of a
    stage's questions repeat an earlier one.
    """
    recipe = context.recipe
    held_out: dict[tuple[str, ...], str] = {}
    for name, section in recipe.evaluate.sets.items():
        held_out |= dict.fromkeys((_words(problem) for problem in _of_file(section)), name)
    repeated, checked = [], 0
    for stage in recipe.stages:
        problems = [problem for section in recipe.stage_problems(stage) for problem in _of_file(section)]
        words = [_words(problem) for problem in problems]
        checked += len(words)
        if shared := [
            (problem, held_out[key]) for problem, key in zip(problems, words, strict=True) if key in held_out
        ]:
            problem, name = shared[0]
            raise UserError(
                f"stages.{stage.name}.problems: {len(shared)} of {len(words)} questions are also in an evaluation set, for "
                f"example {problem.problem_id} in evaluate.sets.{name}; remove them with `rstar-lab data prepare --against`"
            )
        copies = len(words) - len(set(words))
        if copies > MAX_REPEATED * len(words):
            repeated.append(f"stages.{stage.name}.problems: {copies} of {len(words)} questions repeat an earlier one")
    if repeated:
        raise Warn(f"{'; '.join(repeated)}; `rstar-lab data prepare` removes them")
    if not checked:
        sections = [section for stage in recipe.stages for section in recipe.stage_problems(stage)]
        missing = [str(s.file) for s in sections if s.file is not None and not is_problem_set(s.file)]
        if missing:
            raise Skip(f"the files of problems are missing: {', '.join(dict.fromkeys(missing))}")
        raise NotNeeded("no stage reads a file of problems")
    return f"{checked} training questions: few repeat, none is in the {len(held_out)} evaluation questions from files"


def _of_file(section: Problems) -> Sequence[Problem]:
    """Return the problems of a file, without those of an environment: the same question can start different tasks.

    A missing file is reported by the check `data`.
    """
    if section.file is None or section.environment is not None or not is_problem_set(section.file):
        return []
    problems = load_set(section.file, fields={str(ours): theirs for ours, theirs in section.fields.items()})
    return [problem for problem in problems[: section.limit] if not problem.environment]


def _words(problem: Problem) -> tuple[str, ...]:
    return tuple(tokens(problem.question)) or (problem.question.strip(),)
