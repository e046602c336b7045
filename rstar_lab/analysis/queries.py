"""DuckDB connections without access to other files, and the check of SQL that a user or a run folder supplies."""

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb

from rstar_lab.errors import UserError


def connect(directories: Iterable[Path] = (), **config: Any) -> duckdb.DuckDBPyConnection:
    """Return a connection in memory that reads files only below `directories`.

    It loads no extension, opens no network connection and does not see Python variables. Its configuration is locked. DuckDB
    resolves symbolic links before it compares a path with the directories.
    config: options of DuckDB.
    """
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false", **config})
    # Global, because cursors do not inherit settings: without the cache each query reads every file's footer again.
    connection.execute("SET GLOBAL parquet_metadata_cache = true")
    folders = ", ".join(quoted(str(folder)) for folder in directories)
    connection.execute(f"SET allowed_directories = [{folders}]")
    for option, value in (
        ("python_enable_replacements", "false"),
        ("enable_external_access", "false"),
        ("lock_configuration", "true"),
    ):
        connection.execute(f"SET {option} = {value}")
    return connection


def quoted(text: str) -> str:
    """Return text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


@lru_cache(maxsize=256)
def check_query(query: str) -> None:
    """Raise UserError unless the text is exactly one SELECT statement (DESCRIBE and SUMMARIZE count as one)."""
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise UserError(f"the query failed: {_first_lines(error)}") from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UserError("the query failed: only one SELECT statement is allowed")


@lru_cache(maxsize=256)
def checked_expression(sql: str) -> str:
    """Return an SQL expression in parentheses. Raises UserError unless the text is exactly one expression."""
    inside = f"({sql}\n)"  # a comment at the end of the text ends with its line
    try:
        # The first parses the text without the parentheses, so that it cannot close them and continue.
        duckdb.SQLExpression(sql)
        statements = duckdb.extract_statements(f"SELECT 1 WHERE {inside}")
    except duckdb.Error as error:
        raise UserError(f"filter sql: write one SQL expression over the columns: {_first_lines(error)}") from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UserError("filter sql: write one SQL expression over the columns, without `;`")
    return inside


def columns_of(sql: str) -> set[str]:
    """Return the columns that an SQL expression names. A subquery counts as a column of its own."""
    statement = f"SELECT 1 WHERE {checked_expression(sql)}"
    tree = json.loads(duckdb.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()[0])
    found: set[str] = set()
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("class") == "COLUMN_REF":
                found.add(node["column_names"][-1])
            elif node.get("class") == "SUBQUERY":
                found.add("(subquery)")
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return found


def _first_lines(error: Exception) -> str:
    """Return DuckDB's message without the excerpt of the query."""
    return " ".join(line.strip() for line in str(error).split("\n\n")[0].splitlines() if line.strip())
