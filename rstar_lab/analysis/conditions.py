"""Conditions on rows: SQL text, or a mapping from column to value."""

from collections.abc import Iterable
from typing import Any

import numpy as np

# SQL text, or {column: value or list of allowed values or None for NULL}. None selects all rows.
Where = str | dict[str, Any] | None


def sql_condition(where: Where) -> tuple[str, list[Any]]:
    """Return a condition as SQL and its parameters."""
    if not where:
        return "true", []
    if isinstance(where, str):
        return f"({where})", []
    conditions: list[str] = []
    parameters: list[Any] = []
    for name, value in where.items():
        column = '"' + name.replace('"', '""') + '"'
        if value is None:
            conditions.append(f"{column} IS NULL")
        elif isinstance(value, str) or not isinstance(value, Iterable):
            conditions.append(f"{column} = ?")
            parameters.append(value.item() if isinstance(value, np.generic) else value)
        else:
            values = [item.item() if isinstance(item, np.generic) else item for item in value]
            conditions.append(f"{column} IN ({', '.join('?' * len(values))})" if values else "false")
            parameters += values
    return " AND ".join(conditions), parameters
