"""Syntax trees of code that a model wrote."""

import ast
import warnings

MAX_CHARACTERS = 20_000  # longer code is not parsed


def parse_code(code: str) -> ast.Module | None:
    """Return the syntax tree, or None if the code does not parse or is too long. Python's warnings about it are not shown."""
    if len(code) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
