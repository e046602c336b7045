"""Execute the imports and constants of a test file that only the bodies of its tests use when its first test starts.

Collecting all tests then loads no torch, verl or vLLM, and the test files keep ordinary imports at their top. This pytest plugin
moves such statements into a function, at the place where pytest rewrites the assertions of the file.
"""

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from _pytest.assertion import rewrite

FUNCTION = "execute_deferred_statements"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    execute_deferred(vars(item.module))


def execute_deferred(module: dict) -> None:
    """Execute the deferred statements of a test file, and those of the test files whose functions it imports."""
    if function := module.get(FUNCTION):
        function()
        del module[FUNCTION]
        for value in list(module.values()):
            execute_deferred(getattr(value, "__globals__", {}))


def pytest_configure() -> None:
    rewrite_asserts = rewrite.rewrite_asserts

    def rewrite_module(tree: ast.Module, source: bytes, path: str, *arguments) -> None:
        if path.rpartition("/")[2].startswith("test_"):
            defer_statements(tree)
        rewrite_asserts(tree, source, path, *arguments)

    rewrite.rewrite_asserts = rewrite_module
    rewrite.PYC_TAIL = "-lazy" + rewrite.PYC_TAIL  # not the bytecode that pytest wrote without this plugin


def defer_statements(tree: ast.Module) -> None:
    """Move the statements that collection does not need into one function at the end of the module."""
    movable = [node for node in tree.body if _is_movable(node)]
    kept = [node for node in tree.body if node not in movable]
    # An imported fixture is an argument of a test or of another fixture.
    reached = {argument for node in kept if isinstance(node, FUNCTIONS) for argument in _arguments(node.args)}
    reached &= {name for node in movable for name in _bound_names(node)}
    reached |= {name for node in kept for name in _names_read(node)}
    used: set[str] = set()
    while reached:
        used |= reached
        needed = [node for node in tree.body if reached.intersection(_bound_names(node))]
        reached = {name for node in needed for name in _names(node) - _arguments(node)} - used

    mentioned = _names(tree)
    deferred = [node for node in movable if (names := _bound_names(node)) <= mentioned and not names & used]
    if deferred:
        names = sorted({FUNCTION}.union(*map(_bound_names, deferred)))
        function = ast.parse(f"def {FUNCTION}():\n    global {', '.join(names)}").body[0]
        function.body += [_without_annotation(node) for node in deferred]
        # Annotations of functions are not evaluated.
        future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        docstring = tree.body[: ast.get_docstring(tree) is not None]
        rest = [node for node in tree.body if node not in deferred and node not in docstring]
        tree.body = [*docstring, future, *rest, function]
        ast.fix_missing_locations(tree)


def _is_movable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return True
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    if isinstance(node, ast.Expr):
        return ast.unparse(node).startswith("pytest.importorskip(")
    names = _bound_names(node)
    for_pytest = any(name.lower().startswith(("test", "pytest")) for name in names)
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef) and bool(names) and not for_pytest


def _bound_names(node: ast.stmt) -> set[str]:
    """Names of the module that a statement binds. Empty for an assignment to an attribute or an item."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return {part.id for part in parts} if all(isinstance(part, ast.Name) for part in parts) else set()


def _names_read(node: ast.AST) -> Iterator[str]:
    """Yield the names that executing a statement uses. The bodies of functions are not executed."""
    if isinstance(node, ast.Name):
        yield node.id
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    if isinstance(node, FUNCTIONS):
        if node.name.startswith("pytest_"):  # a hook that pytest calls
            yield node.name
        children = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    own = _arguments(node) if isinstance(node, ast.Lambda) else set()
    for child in children:
        yield from (name for name in _names_read(child) if name not in own)


@cache
def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


@cache
def _arguments(node: ast.AST) -> set[str]:
    return {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}


def _without_annotation(node: ast.stmt) -> ast.stmt:
    """Python rejects annotations of global names inside a function."""
    if isinstance(node, ast.AnnAssign):
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    return node
