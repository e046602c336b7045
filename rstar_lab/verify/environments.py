"""Reads the rows of a matrix, a determinant, a function in cases or a system of equations."""

from collections.abc import Callable, Sequence
from typing import Any

from rstar_lab.verify.tokens import Cursor, Token, Unreadable
from rstar_lab.verify.values import Cases, Group, Matrix, Relation, determinant

Read = Callable[[Sequence[Token]], Any]  # reads tokens as one value
Row = list[list[Token]]  # its cells

_CONDITIONS = frozenset(("if", "when", "for", "where"))
_ORDERS = frozenset(("<", ">", "leq", "geq", "neq", "otherwise")) | _CONDITIONS
_PUNCTUATION = (",", ";", ".")


def environment(cursor: Cursor, name: str, read: Read, cases: bool = False) -> Any:
    """Read the environment whose `\\begin{name}` has been read, or `\\pmatrix{...}`, and move behind it.

    cases: whether it has cases or equations, whatever its name.
    """
    rows = _rows(cursor.enclosed("{", "}") if cursor.is_sign("{") else _content(cursor))
    words = {token.text.casefold() for row in rows for cell in row for token in cell}
    if cases or name in ("cases", "rcases") or (name == "array" and words & (_ORDERS | {"="})):
        return _cases(rows, read)
    matrix = Matrix(tuple(tuple(read(cell) if cell else ("sym", "") for cell in row) for row in rows))
    return determinant(matrix) if name in ("vmatrix", "Vmatrix") else matrix


def _levels(token: Token) -> int:
    """Return by how much a token nests environments deeper."""
    return token.text.startswith("begin:") - token.text.startswith("end:")


def _content(cursor: Cursor) -> list[Token]:
    """Return the tokens up to the end of an environment, and move behind it."""
    level, start = 1, cursor.at
    while level:
        if cursor.at_end():
            raise Unreadable("an open environment")
        level += _levels(cursor.take())
    return cursor.tokens[start : cursor.at - 1]


def _rows(tokens: Sequence[Token]) -> list[Row]:
    rows: list[Row] = [[[]]]
    level = 0
    for token in tokens:
        level += _levels(token)
        if level == 0 and token.text == "\\\\":
            rows.append([[]])
        elif level == 0 and token.text == "&":
            rows[-1].append([])
        else:
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
    return _stripped(tokens[:place]), _stripped(condition)


def _stripped(tokens: list[Token]) -> list[Token]:
    kept = [place for place, token in enumerate(tokens) if token.text not in _PUNCTUATION]
    return tokens[kept[0] : kept[-1] + 1] if kept else []
