"""DuckDB connections that read the files of the runs only, and the check of SQL text."""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import duckdb

from rstar_lab.common.resources import package_toml
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.schema import LEVELS
from rstar_lab.runs.tables import UNUSABLE
from rstar_lab.untrusted.files import parse_json

TABLES = frozenset({"runs", "steps", "rewards", "rollup", *LEVELS})  # tables of `Runs.sql`
# Titles and common names of columns in an SQL condition, and the columns that they mean.
_TITLES = {
    "problem": "problem_id", "question": "problem_id", "tokens": "response_tokens", "length": "response_tokens",
    "tool_calls": "calls", "run": "run_id", "stopped_by": "stop_reason",
}  # fmt: skip
# SQL condition on trajectories: the rollout has a valid reward
HAS_RESULT = f"coalesce(stop_reason, '') NOT IN {UNUSABLE}"
_WITH = re.compile(r"(?i)\bwith\b")
# Nodes of the syntax tree for queries that change nothing.
_READING = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
# Time of a query with a filter that the user did not necessarily write: from a saved view, a link or an assistant.
FILTER_S = 60.0


def connect(files: Iterable[str | Path] = (), **config: Any) -> duckdb.DuckDBPyConnection:
    """Return a connection in memory that reads these files and nothing else.

    It loads no extension, opens no network connection and does not see Python variables. Its configuration is locked. A file that is
    replaced by a symbolic link is not read.
    config: options of DuckDB.
    """
    # By default a query may fill 90% of the disk with temporary files.
    limits = {"autoinstall_known_extensions": "false", "max_temp_directory_size": "10GB"}
    connection = duckdb.connect(config={**limits, **config})
    # Global, because cursors do not inherit settings: without the cache each query reads every file's footer again.
    connection.execute("SET GLOBAL parquet_metadata_cache = true")
    connection.execute(f"SET allowed_paths = [{', '.join(quoted(str(file)) for file in files)}]")
    for setting in (
        "python_enable_replacements = false",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")
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
    except RuntimeError as error:
        if str(error) == "Query interrupted":  # DuckDB raises it in place of the exception of a signal
            raise KeyboardInterrupt from error
        raise
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


# What SQL text may contain that the user did not necessarily write: filters, and queries of assistants.
_ALLOWED = {name: frozenset(words.split()) for name, words in package_toml(__file__, "allowed_sql.toml").items()}
_MOST_TEXT, _MOST_CALLS, _MOST_SUBQUERIES, _MOST_PATTERN = 200_000, 200, 4, 500
_COUNTED = re.compile(r"\{.*\{|\{[^}]*\d{3}", re.DOTALL)  # repetitions for which a regular expression needs minutes
_PLAIN = re.compile(
    r"[\w\s.,'<>=!+*/-]*"
)  # text without a function or subquery; parsing takes most of the time of a check


@dataclass(frozen=True)
class _Rules:
    """What text of one kind may contain: filter or query."""

    name: str
    functions: frozenset[str]
    nodes: frozenset[str]

    def refuse(self, what: object) -> RunStoreError:
        return RunStoreError(f"{self.name}: {what} is not supported; use `runs.sql` in a notebook")


_FILTER = _Rules("filter sql", _ALLOWED["functions"], _ALLOWED["nodes"])
_QUERY = _Rules("query", _FILTER.functions | _ALLOWED["query_functions"], _FILTER.nodes | _ALLOWED["query_nodes"])


@lru_cache(maxsize=256)
def checked_expression(sql: str) -> str:
    """Return an SQL expression in parentheses. Its subqueries read only the tables of the runs.

    Raises RunStoreError unless the text is exactly one expression of allowed functions: it may come from somebody else.
    """
    inside = f"({sql}\n)"  # a comment at the end of the text ends with its line
    if len(sql) > _MOST_TEXT:
        raise RunStoreError(f"filter sql: it has more than {_MOST_TEXT:,} characters")
    try:
        # The first parses the text without the parentheses, so that it cannot close them and continue.
        duckdb.SQLExpression(sql)
        statements = duckdb.extract_statements(f"SELECT 1 WHERE {inside}")
    except duckdb.Error as error:
        raise RunStoreError(f"filter sql: write one SQL expression over the columns: {error_text(error)}") from error
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise RunStoreError("filter sql: write one SQL expression over the columns, without `;`")
    if not _PLAIN.fullmatch(sql):
        _check_nodes(f"SELECT 1 WHERE {inside}", _FILTER)
    return inside


@lru_cache(maxsize=256)
def checked_order(sql: str) -> str:
    """Return the text of an ORDER BY clause. Raises RunStoreError unless it consists of expressions that a filter may contain."""
    query = f"SELECT 1 FROM trajectories ORDER BY {sql}\n"
    check_query(query)
    (select,) = (node for node in _check_nodes(query, _FILTER) if node.get("type") == "SELECT_NODE")
    if [modifier["type"] for modifier in select["modifiers"]] != ["ORDER_MODIFIER"]:
        raise RunStoreError("order_by: write columns, such as `reward DESC, step`")
    return f"{sql}\n"  # a comment at the end of the text ends with its line


def check_foreign_query(query: str) -> None:
    """Raise RunStoreError unless a query reads only the tables of the runs, with allowed functions. See `check_query`.

    Constants are computed before a query can be interrupted, so run it in a process with limits all the same.
    """
    check_query(query)
    _check_nodes(query, _QUERY)


def _check_nodes(query: str, rules: _Rules) -> list[dict[str, Any]]:
    """Return the nodes of the syntax tree of a SELECT. Raises RunStoreError if one of them is not allowed."""
    if len(query) > _MOST_TEXT:
        raise rules.refuse(f"a text of {len(query):,} characters")
    nodes = list(_nodes(query))
    named = {entry["key"].lower() for node in nodes for entry in (node.get("cte_map") or {}).get("map", [])}
    sources = {"SUBQUERY"} if rules is _QUERY else set()  # a subquery in FROM has no class
    calls = selects = 0
    for node in nodes:
        kind = node.get("type")
        if not isinstance(kind, str) or ("class" not in node and kind in sources):
            continue
        if kind not in rules.nodes or (kind == "SUBQUERY" and "class" not in node):
            raise rules.refuse(kind.lower().replace("_", " "))
        calls += "function_name" in node
        selects += kind == "SELECT_NODE"
        if "function_name" in node:
            _check_call(node, rules)
        elif kind == "BASE_TABLE":
            table, schema = node["table_name"], node["schema_name"] or node["catalog_name"]
            if schema or table.lower() not in TABLES | named:
                raise RunStoreError(
                    f"{rules.name}: {table!r} cannot be read; the tables are {', '.join(sorted(TABLES))}"
                )
        elif kind == "TABLE_FUNCTION" and node["function"]["function_name"] != "unnest":
            raise RunStoreError(f"{rules.name}: {node['function']['function_name']!r} cannot be read")
        elif kind == "STAR" and node["columns"]:
            raise rules.refuse("COLUMNS(...)")
        elif kind == "TYPE" and (node["children"] or node["type_name"].lower() not in _ALLOWED["types"]):
            raise rules.refuse(f"the type {node['type_name']}")
        elif kind == "SELECT_NODE" and rules is _FILTER and (len(node["select_list"]) != 1 or named):
            raise rules.refuse("a subquery with several columns or a WITH clause")
    if calls > _MOST_CALLS or (rules is _FILTER and selects > _MOST_SUBQUERIES + 1):
        raise rules.refuse(f"more than {_MOST_CALLS} functions and operators, or {_MOST_SUBQUERIES} subqueries,")
    return nodes


def _check_call(node: Mapping[str, Any], rules: _Rules) -> None:
    name = node["function_name"].lower()
    arguments = [argument["expression"] for argument in node.get("arguments", ())]
    if name not in rules.functions or node.get("schema") or node.get("catalog"):
        raise rules.refuse(f"{name}()")
    if name in ("list_value", "row") and any(argument.get("class") != "CONSTANT" for argument in arguments):
        raise rules.refuse("a list of anything but constants")
    if name.startswith("regexp_"):
        pattern = arguments[1]["literal"]["text"] if arguments[1].get("class") == "CONSTANT" else None
        if not isinstance(pattern, str) or len(pattern) > _MOST_PATTERN or _COUNTED.search(pattern):
            raise rules.refuse("a regular expression that is computed, long or has several counted repetitions")


@lru_cache(maxsize=256)
def columns_of(sql: str) -> frozenset[str]:
    """Return the columns that an SQL expression names. A subquery counts as a column of its own."""
    nodes = _nodes(f"SELECT 1 WHERE {checked_expression(sql)}")
    found = [node for node in nodes if node.get("class") in ("COLUMN_REF", "SUBQUERY")]
    return frozenset("(subquery)" if node["class"] == "SUBQUERY" else node["column_names"][-1] for node in found)


def _nodes(query: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the syntax tree of a SELECT. Raises RunStoreError if it is nested deeply, or if DuckDB writes no tree for it."""
    text = _parser().cursor().execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    tree = parse_json(text[0], "the query failed: it cannot be checked", dict) if text else {}
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


@lru_cache(maxsize=256)
def tables_of(query: str) -> frozenset[str]:
    """Return the names of the tables that a query reads, in lower case. Raises duckdb.Error for statements that cannot be listed."""
    return frozenset(name.lower() for name in _parser().cursor().get_table_names(query))


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
