"""The graders of microsoft/rStar as a program for the sandbox, and as the module that its reward manager imports there."""

from functools import cache
from pathlib import Path

MODULE = "fused_compute_score"


@cache
def released_program() -> str:
    """Return the program that grades a response inside the sandbox."""
    return (Path(__file__).parent / "released_program.py").read_text(encoding="utf-8")


def with_grader(code: str) -> str:
    """Return a program with the module `fused_compute_score` defined in it, if it imports that module.

    The reward manager of microsoft/rStar sends such programs to its judge. A program that fails is a reward of 0 for it.
    """
    if MODULE not in code:
        return code
    return (
        f"import sys, types\n_module = sys.modules[{MODULE!r}] = types.ModuleType({MODULE!r})\n"
        f"exec({released_program()!r}, _module.__dict__)\n{code}"
    )
