"""Reads the rows of a matrix, a determinant, a function in cases or a system of equations."""

from collections.abc import Callable, Sequence
from typing import Any

from rstar_lab.verify.tokens import Cursor, Token, Unreadable
from rstar_lab.verify.values import Cases, Group, Matrix, Relation, determinant

Read = Callable[[Sequence[Token]], Any]  # reads tokens as one value
Row = list[list[Token]]  # its cells

_CONDITIONS = frozenset(("if", "when", "for", "where"))
_ORDERS = frozenset(("<", ">", "leq", "geq", "neq", "otherwise")) | _CONDITIONS


def environment(cursor: Cursor, name: str, read: Read, cases: bool = False) -> Any:
    """Read the environment whose `\\begin{name}` has been read, or `\\pmatrix{...}`, and move behind it.

    cases: whether it has cases or equations, whatever its name.
    """
    named = cursor.tokens[cursor.at - 1].text == f"begin:{name}"
    cursor.at -= named
    rows = _rows(cursor.enclosed(*(f"begin:{name}", f"end:{name}") if named else ("{", "}")))
    if not rows:
        raise Unreadable("an empty environment")
    words = {token.text.casefold() for row in rows for cell in row for token in cell}
    if cases or name in ("cases", "rcases") or (name == "array" and words & (_ORDERS | {"="})):
        return _cases(rows, read)
    if len(set(map(len, rows))) > 1:
        raise Unreadable("rows with different numbers of cells")
    matrix = Matrix(tuple(tuple(read(cell) if cell else ("sym", "") for cell in row) for row in rows))
    return determinant(matrix) if name in ("vmatrix", "Vmatrix") else matrix


def _rows(tokens: Sequence[Token]) -> list[Row]:
    rows: list[Row] = [[[]]]
    level = 0
    for token in tokens:
        level += token.text.startswith("begin:") - token.text.startswith("end:")
        if level == 0 and token.text == "\\\\":
            rows.append([[]])
        elif level == 0 and token.text == "&":
            rows[-1].append([])
        elif token.text != ".":
            rows[-1][-1].append(token)
    return [row for row in rows if any(row)]


def _cases(rows: Sequence[Row], read: Read) -> Any:
    pairs, statements = [], []
    for row in rows:
        value, condition = _parts(row)
        if condition:
            pairs.append((read(value), read(condition)))
        else:
            statements.append(read(value))
    if pairs and statements:
        raise Unreadable("cases without a condition")
    joined = "and" if all(isinstance(statement, Relation) for statement in statements) else ","
    return Cases(tuple(pairs)) if pairs else Group("", tuple(statements), "", joined)


def _parts(row: Row) -> tuple[list[Token], list[Token]]:
    """Return the value and the condition of a row; a row of a system has no condition."""
    tokens = [token for cell in row for token in cell]
    words = [token.text.casefold() for token in tokens]
    place = next((i for i, word in enumerate(words) if word in _CONDITIONS | {"otherwise"}), len(row[0]))
    if "=" in words[: place + 1] and not _ORDERS.intersection(words[place:]):
        place = len(tokens)
    condition = [token for token in tokens[place:] if token.text.casefold() not in _CONDITIONS]
    return tokens[:place], condition
