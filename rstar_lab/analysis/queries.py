"""DuckDB connections without access to other files, and the check of SQL that a user or a run folder supplies."""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import duckdb

from rstar_lab.runs import RunStoreError
from rstar_lab.runs.schema import LEVELS
from rstar_lab.runs.tables import UNUSABLE

TABLES = frozenset({"runs", "steps", "rewards", "rollup", *LEVELS})  # tables of `Runs.sql`
# Titles and common names of columns in an SQL condition, and the columns that they mean.
_TITLES = {
    "problem": "problem_id", "question": "problem_id", "tokens": "response_tokens", "length": "response_tokens",
    "tool_calls": "calls", "run": "run_id", "stopped_by": "stop_reason",
}  # fmt: skip
# SQL condition on trajectories: the rollout has a valid reward
HAS_RESULT = f"coalesce(stop_reason, '') NOT IN {UNUSABLE}"
_SUBQUERY = re.compile(r"(?i)\b(from|table|select|show|describe|summarize|pivot|unpivot|with)\b")
_WITH = re.compile(r"(?i)\bwith\b")
# Nodes of the syntax tree for queries that change nothing.
_READING = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_GENERATORS = frozenset({"unnest", "range", "generate_series"})  # table functions without access to files
# Functions of one value that return a value of any size, or take a time that is quadratic in it. DuckDB interrupts a query between
# blocks of rows only, and its memory limit does not count texts.
_UNBOUNDED = frozenset(
    {
        "repeat", "lpad", "rpad", "range", "generate_series", "list_resize", "array_resize", "printf", "format", "bitstring", "list_reduce",
        "array_reduce", "reduce", "levenshtein", "editdist3", "damerau_levenshtein",
    }
)  # fmt: skip
_MOST_CONCATENATIONS = 32  # in a filter
# Time of a query with a filter that the user did not necessarily write: from a saved view, a link or an assistant.
FILTER_S = 60.0


def connect(directories: Iterable[Path] = (), **config: Any) -> duckdb.DuckDBPyConnection:
    """Return a connection in memory that reads files only below `directories`.

    It loads no extension, opens no network connection and does not see Python variables. Its configuration is locked. DuckDB
    resolves symbolic links before it compares a path with the directories.
    config: options of DuckDB.
    """
    # By default a query may fill 90% of the disk with temporary files.
    limits = {"autoinstall_known_extensions": "false", "max_temp_directory_size": "10GB"}
    connection = duckdb.connect(config={**limits, **config})
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


@contextmanager
def time_limit(cursor: duckdb.DuckDBPyConnection, timeout_s: float | None) -> Iterator[None]:
    """Raise RunStoreError if the queries of a cursor in the block run longer than `timeout_s`. None: no limit."""
    timer = threading.Timer(timeout_s or 0, cursor.interrupt)
    if timeout_s is not None:
        timer.start()
    try:
        yield
    except duckdb.InterruptException as error:
        raise RunStoreError(
            f"the query ran longer than {timeout_s:g} s; limit it to a run and its steps, or change the filter"
        ) from error
    finally:
        timer.cancel()


def quoted(text: str) -> str:
    """Return text as an SQL literal."""
    parts = ["'" + part.replace("'", "''") + "'" for part in text.split("\0")]  # a query ends at the character NUL
    return parts[0] if len(parts) == 1 else f"({' || chr(0) || '.join(parts)})"


@lru_cache(maxsize=256)
def check_query(query: str) -> None:
    """Raise RunStoreError unless the text is exactly one SELECT statement (DESCRIBE and SUMMARIZE count as one) that changes nothing:
    DuckDB also accepts COPY TO, INSERT, UPDATE and DELETE in a WITH clause."""
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise RunStoreError(f"the query failed: {error_text(error)}") from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise RunStoreError("the query failed: only one SELECT statement is allowed")
    if _WITH.search(query) and any("cte_map" in node and node["type"] not in _READING for node in _nodes(query)):
        raise RunStoreError("the query failed: only SELECT is allowed in a WITH clause")


@lru_cache(maxsize=256)
def checked_expression(sql: str) -> str:
    """Return an SQL expression in parentheses.

    Raises RunStoreError unless the text is exactly one expression, whose subqueries read only the tables of the runs, and which can be
    interrupted: it may come from a file in a run folder.
    """
    inside = f"({sql}\n)"  # a comment at the end of the text ends with its line
    try:
        # The first parses the text without the parentheses, so that it cannot close them and continue.
        duckdb.SQLExpression(sql)
        statements = duckdb.extract_statements(f"SELECT 1 WHERE {inside}")
    except duckdb.Error as error:
        raise RunStoreError(f"filter sql: write one SQL expression over the columns: {error_text(error)}") from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise RunStoreError("filter sql: write one SQL expression over the columns, without `;`")
    subquery = _SUBQUERY.search(sql)
    if subquery or "(" in sql or "||" in sql:  # else there is no function to check; parsing takes most of the time
        nodes = list(_nodes(f"SELECT 1 WHERE {inside}"))
        _check_functions(nodes)
        if subquery:
            _check_sources(nodes)
    return inside


def _check_functions(nodes: Sequence[dict[str, Any]]) -> None:
    """Raise RunStoreError for a function that cannot be interrupted and can take all memory. As table functions they can be interrupted."""
    tables = {id(node["function"]) for node in nodes if node.get("type") == "TABLE_FUNCTION"}
    names = [node.get("function_name") for node in nodes if node.get("class") == "FUNCTION" and id(node) not in tables]
    if unbounded := _UNBOUNDED.intersection(names):
        raise RunStoreError(
            f"filter sql: {min(unbounded)}() is not supported, because its result can be of any size; use it in `runs.sql`"
        )
    if names.count("||") + names.count("concat") > _MOST_CONCATENATIONS:
        raise RunStoreError(f"filter sql: more than {_MOST_CONCATENATIONS} texts are joined; use `runs.sql`")


def _check_sources(nodes: Sequence[dict[str, Any]]) -> None:
    """Raise RunStoreError if a subquery reads anything but the tables of the runs."""
    named = {entry["key"] for node in nodes for entry in (node.get("cte_map") or {}).get("map", [])}
    for node in nodes:
        source = None
        if node.get("type") == "BASE_TABLE" and node["table_name"].lower() not in {*TABLES, *named}:
            source = node["table_name"]
        elif node.get("type") == "TABLE_FUNCTION" and node["function"].get("function_name") not in _GENERATORS:
            source = f"{node['function'].get('function_name')}(...)"
        if source:
            raise RunStoreError(f"filter sql: {source!r} cannot be read; the tables are {', '.join(sorted(TABLES))}")


def columns_of(sql: str) -> set[str]:
    """Return the columns that an SQL expression names. A subquery counts as a column of its own."""
    found = set()
    for node in _nodes(f"SELECT 1 WHERE {checked_expression(sql)}"):
        if node.get("class") == "COLUMN_REF":
            found.add(node["column_names"][-1])
        elif node.get("class") == "SUBQUERY":
            found.add("(subquery)")
    return found


def _nodes(query: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the syntax tree of a SELECT. Raises RunStoreError if it has a part for which DuckDB writes no tree."""
    text = _parser().cursor().execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    tree = json.loads(text[0]) if text else {}
    if tree.get("error") is not False:
        raise RunStoreError(f"the query failed: it cannot be checked: {tree.get('error_message')}")
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += node.values()
        elif isinstance(node, list):
            pending += node


@cache
def _parser() -> duckdb.DuckDBPyConnection:
    return connect()


def error_text(error: Exception) -> str:
    """Return DuckDB's message without the excerpt of the query. A title of the list instead of a column gets its column."""
    text = " ".join(line.strip() for line in str(error).split("\n\n")[0].splitlines() if line.strip())
    if (found := re.search(r'Referenced column "(\w+)" not found', text)) and found[1].lower() in _TITLES:
        return f'there is no column "{found[1]}"; did you mean {_TITLES[found[1].lower()]}?'
    if found := re.search(r"Could not convert string .* from source column (\w+)", text):
        return f"{found[1]} is a text: compare it with a text in quotes, such as {found[1]} = '3'"
    return text
