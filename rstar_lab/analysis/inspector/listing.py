"""The inspector's list: any page of millions of rows in any order, by counts of where its rows lie.

A sort of all rows for a page of a hundred is slow, and so is reading long columns of rows that are not shown. So the
rows are counted first, by step and run, or by the value one sorts by. The counts say which steps, runs or values hold
a page; the rest is left unread. Counts are kept until `refresh`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.inspector.filters import listed, literal
from rstar_lab.analysis.inspector.transcript import visible
from rstar_lab.errors import UserError

# Newest first, the rollouts of a group together; traj_id makes the order total, so that pages never overlap.
DEFAULT_ORDER = (("step", True), ("run_id", False), ("group_id", False), ("sample", False), ("traj_id", False))
# What the list shows; the rest of a row is read when it is opened.
LISTED = (
    "traj_id", "run_id", "stage", "step", "group_id", "problem_id", "sample", "reward", "kept", "outcomes", "calls", "errors", "turns",
    "response_tokens", "answer", "truth", "p_err", "p_format", "advantage", "entropy", "reflection_tokens", "stop_reason",
)  # fmt: skip
_FEW = 5_000  # rows of one value that are sorted as they are; where there are more, step and run narrow them down
_KEPT = 8  # filters whose counts are kept
Part = tuple[str, str, int, int]  # condition, order, offset, limit


class Listing:
    """Pages and places in a list of trajectories that is filtered by an SQL condition and sorted.

    sort: (column, descending), or empty for the newest first. Missing values come last; ties are newest first.
    """

    def __init__(self, sql: Callable[[str], pd.DataFrame], columns: Mapping[str, str]) -> None:
        self._sql, self._columns = sql, columns
        self._blocks: dict[str, list[tuple[int, str, int]]] = {}
        self._values: dict[tuple[str, str, bool], pd.DataFrame] = {}

    def refresh(self) -> None:
        self._blocks.clear()
        self._values.clear()

    def count(self, where: str) -> int:
        for (counted, *_), values in self._values.items():
            if counted == where:
                return int(values.n.sum())
        return sum(n for *_, n in self.blocks(where))

    def blocks(self, where: str) -> list[tuple[int, str, int]]:
        """(step, run, rows) of the filtered list, newest step first."""
        if where not in self._blocks:
            found = self._sql(
                f"SELECT step, run_id, count(*) AS n FROM trajectories WHERE {where} "
                "GROUP BY ALL ORDER BY step DESC NULLS LAST, run_id"
            )
            _remember(self._blocks, where, list(zip(*(found[name].tolist() for name in found), strict=True)))
        return self._blocks[where]

    def page(self, where: str, sort: Sequence[Any], offset: int, limit: int) -> Iterator[pd.DataFrame]:
        """Rows offset .. offset + limit with the columns of the list, in one frame or several."""
        names = ", ".join(name for name in LISTED if name in self._columns)
        parts = self._by_value(where, sort, offset, limit) if sort else self._by_block(where, offset, limit)
        for condition, order, before, rows in parts:
            yield self._sql(
                f"SELECT {names} FROM trajectories WHERE {condition} ORDER BY {order} LIMIT {rows} OFFSET {before}"
            )

    def place(self, traj_id: str, where: str, sort: Sequence[Any]) -> int | None:
        """Index of a trajectory in the list; None where the filter hides it."""
        keys = self._keys(sort)
        chosen = ", ".join(f"{key} AS k{i}" for i, (key, _) in enumerate(keys))
        me = self._sql(f"SELECT {chosen} FROM trajectories WHERE traj_id = {literal(traj_id)} AND ({where}) LIMIT 1")
        if me.empty:
            return None
        mine = {key: plain(me[f"k{i}"][0]) for i, (key, _) in enumerate(keys)}
        before = 0
        if sort:
            values, key = self._counted(where, sort), keys[0][0]
            at = next(
                i for i, bounds in enumerate(zip(values.low, values.high, strict=True)) if _holds(bounds, mine[key])
            )
            before += int(values.n[:at].sum())
            where = f"({where}) AND {_between(key, values.low[at], values.high[at])}"
            if values.same[at]:
                keys = [*DEFAULT_ORDER]
        if keys[0] == DEFAULT_ORDER[0]:
            blocks = self.blocks(where)
            at = next(
                i for i, block in enumerate(blocks) if (plain(block[0]), block[1]) == (mine["step"], mine["run_id"])
            )
            before += sum(n for *_, n in blocks[:at])
            where = f"({where}) AND {_inside([blocks[at]])}"
        # What comes before it: smaller in the first key, or equal there and smaller in the second, and so on.
        smaller, equal = [], "TRUE"
        for key, down in keys:
            value = literal(mine[key])
            less = f"{key} IS NOT NULL" if value == "NULL" else f"{key} {'>' if down else '<'} {value}"
            smaller.append(f"({equal} AND {less})")
            equal += f" AND {key} IS NOT DISTINCT FROM {value}"
        found = self._sql(f"SELECT count(*) AS n FROM trajectories WHERE ({where}) AND ({' OR '.join(smaller)})")
        return before + int(found.n[0])

    def _by_block(self, where: str, offset: int, limit: int) -> Iterator[Part]:
        """A page of the newest first."""
        blocks = self.blocks(where)
        held, before = _held([n for *_, n in blocks], offset, limit)
        if held:
            chosen = _inside([blocks[i] for i in held])
            yield f"({where}) AND {chosen}", _order(DEFAULT_ORDER), offset - before, limit

    def _by_value(self, where: str, sort: Sequence[Any], offset: int, limit: int) -> Iterator[Part]:
        """A page sorted by a column: value by value where many rows share one, a range of values elsewhere."""
        keys, values = self._keys(sort), self._counted(where, sort)
        key = keys[0][0]
        held, before = _held(values.n, offset, limit)
        alone = [(values.same[i] and values.n[i] > _FEW) or pd.isna(values.low[i]) for i in held]
        at = 0
        while at < len(held):
            end = at + 1
            while end < len(held) and not alone[at] and not alone[end]:
                end += 1
            first, last = held[at], held[end - 1]
            low, high = sorted((first, last), reverse=keys[0][1])
            part = f"({where}) AND {_between(key, values.low[low], values.high[high])}"
            rows, skipped = int(values.n[first : last + 1].sum()), max(0, offset - before)
            wanted = min(rows, offset + limit - before) - skipped
            if alone[at]:
                yield from self._by_block(part, skipped, wanted)
            else:
                yield part, _order(keys), skipped, wanted
            before, at = before + rows, end

    def _counted(self, where: str, sort: Sequence[Any]) -> pd.DataFrame:
        """Rows by value, in the order of the list, the missing ones last: low, high, n, same (are all of them equal).

        Numbers with a fraction are counted in thousandths, lest there be as many values as rows.
        """
        key, down = self._keys(sort)[0]
        if (where, key, down) not in self._values:
            # round(NaN) is NaN, which is missing here as elsewhere.
            value = f"nullif(round({key}, 3), 'nan')" if self._columns.get(key) in ("FLOAT", "DOUBLE") else key
            counted = self._sql(
                f"SELECT {value} AS value, min({key}) AS low, max({key}) AS high, count(*) AS n FROM trajectories "
                f"WHERE {where} GROUP BY 1 ORDER BY 1 {'DESC' if down else 'ASC'} NULLS LAST"
            )
            counted["same"] = (counted.low == counted.high).fillna(False).astype(bool)
            counted.loc[counted.value.isna(), ["low", "high"]] = None
            _remember(self._values, (where, key, down), counted)
        return self._values[where, key, down]

    def _keys(self, sort: Sequence[Any]) -> list[tuple[str, bool]]:
        """The whole order of a list, as SQL and whether descending."""
        if not sort:
            return [*DEFAULT_ORDER]
        column = str(sort[0])
        if column not in self._columns:
            raise UserError(f"cannot sort by {column!r}: no such column")
        key = f"len({column})" if self._columns[column].endswith("[]") else column
        return [(key, bool(sort[1])), *(one for one in DEFAULT_ORDER if one[0] != column)]


def _remember(kept: dict, key: Any, counted: Any) -> None:
    while len(kept) >= _KEPT:
        kept.pop(next(iter(kept)))
    kept[key] = counted


def _held(counts: Sequence[int] | pd.Series, offset: int, limit: int) -> tuple[list[int], int]:
    """Which of some neighbours hold rows offset .. offset + limit, and how many rows come before the first of them."""
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    if limit <= 0 or not len(ends) or offset >= ends[-1]:
        return [], 0
    first, last = np.searchsorted(ends, [offset, min(offset + limit, ends[-1]) - 1], side="right")
    return list(range(int(first), int(last) + 1)), int(ends[first - 1]) if first else 0


def _order(keys: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"{key} {'DESC' if down else 'ASC'} NULLS LAST" for key, down in keys)


def _inside(blocks: Sequence[tuple[int, str, int]]) -> str:
    """The rows of some blocks. Runs and a range of steps as plain comparisons, by which row groups are left unread."""
    steps, runs = [step for step, _, _ in blocks], sorted({run_id for _, run_id, _ in blocks})
    each = " OR ".join(
        f"(step IS NOT DISTINCT FROM {literal(step)} AND run_id = {literal(run_id)})" for step, run_id, _ in blocks
    )
    known = [step for step in steps if not pd.isna(step)]
    within = f"step BETWEEN {min(steps)} AND {max(steps)} AND " if len(known) == len(steps) else ""
    return f"{within}run_id IN ({listed(runs)}) AND ({each})"


def _between(key: str, low: Any, high: Any) -> str:
    low, high = plain(low), plain(high)
    if low is None or high is None:
        return f"({key} IS NULL OR {key}::VARCHAR = 'nan')"
    return f"{key} = {literal(low)}" if low == high else f"{key} BETWEEN {literal(low)} AND {literal(high)}"


def _holds(bounds: tuple[Any, Any], value: Any) -> bool:
    low, high = map(plain, bounds)
    return value is None if low is None else value is not None and low <= value <= high


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as JSON can carry them."""
    values = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
    return [dict(zip(map(str, frame.columns), map(plain, row), strict=True)) for row in values]


def plain(value: Any) -> Any:
    """A cell as JSON can carry it: NaN and missing as null, text without hidden characters."""
    if isinstance(value, str):
        return visible(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
