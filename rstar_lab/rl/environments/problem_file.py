"""Write the problems of a task of Inspect or verifiers to a file that a recipe can name."""

import sys
from collections.abc import Callable, Sequence

from rstar_lab.errors import UserError
from rstar_lab.rl.problems import Problem, write_problems


def write_problem_file(module: str, problems_of: Callable[[str], Sequence[Problem]]) -> None:
    """Write problems to a file. This is the main function of `python -m MODULE MODULE:NAME PROBLEMS.jsonl`.

    problems_of: returns the problems of `module:name`. For wrong arguments or a UserError, exits with a message.
    """
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m {module} MODULE:NAME PROBLEMS.jsonl")
    target, path = sys.argv[1:]
    try:
        problems = problems_of(target)
        write_problems(path, problems)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{len(problems)} problems written to {path}")
