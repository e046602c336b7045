"""Exports of a package that are imported at their first use, so that importing the package is fast and loads no torch."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the names that `file` imports below `if TYPE_CHECKING:`.

    package, file: `__name__` and `__file__` of the package.
    """
    with open(file, encoding="utf-8") as source:  # noqa: PTH123  (pathlib would be in every program)
        tree = ast.parse(source.read())
    homes = {
        alias.name: statement.module
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(str(homes[name])), name)

    return load, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)
