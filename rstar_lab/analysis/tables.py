"""Tables and numbers for readers: in notebooks, reports and cards."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from rstar_lab.analysis.metrics import METRICS
from rstar_lab.untrusted.text import Html, html, joined, visible

MISSING = "–"
_SHARE = re.compile(r"(^|_)(share|rate|part|kept)$|^after_(error|success)$")


def format_numbers(frame: pd.DataFrame, shares: Sequence[str] = ()) -> pd.DataFrame:
    """Return a copy for display: shares as percentages, other floating-point numbers with at least three digits.

    A column holds shares if it is in `shares`, or one of its labels is a metric in percent (METRICS) or ends with share, rate,
    part or kept.
    Missing values are shown as "–".
    """
    shown = {}
    for position, column in enumerate(frame.columns):
        values = frame.iloc[:, position]
        if pd.api.types.is_float_dtype(values):
            labels = column if isinstance(column, tuple) else (column,)
            percent = column in shares or any(_is_share(str(label)) for label in labels)
            texts = values.map(lambda value, percent=percent: format_value(value, percent), na_action="ignore")
            values = texts.astype(object).where(values.notna(), MISSING)
        shown[position] = values
    return pd.DataFrame(shown, index=frame.index).set_axis(frame.columns, axis=1)


def _is_share(label: str) -> bool:
    return METRICS[label].percent if label in METRICS else bool(_SHARE.search(label))


def format_value(value: Any, percent: bool = False) -> str:
    """Return a number with at least three digits, or as a percentage; yes or no; any other value as text."""
    if value is None or value is pd.NA or value != value:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float | np.number):
        return visible(value)
    number = float(value)
    return f"{number:.1%}" if percent else f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def format_estimate(row: Any) -> str:
    """Return a row of `measure` as "33.8% [29.6%, 38.3%]"."""
    percent = METRICS[row.metric].percent
    value, low, high = (format_value(getattr(row, name), percent) for name in ("value", "low", "high"))
    return value if MISSING in (value, low) else f"{value} [{low}, {high}]"


def format_difference(value: str, difference: float, low: float, high: float, percent: bool) -> str:
    """Return "33.8%, +1.2 [-0.3, +2.7]": a value and its difference to a control with its interval, in points for shares."""
    texts = [f"{100 * each:+.1f}" if percent else f"{each:+.2g}" for each in (difference, low, high)]
    return f"{value}, {texts[0]}" + ("" if pd.isna(low) else f" [{texts[1]}, {texts[2]}]")


def html_table(frame: pd.DataFrame, shares: Sequence[str] = (), css: str = "") -> Html:
    """Return a frame without its index as HTML, with numbers as by `format_numbers`. css: class of the table."""
    head = joined(html('<th scope="col">{}</th>', name) for name in frame.columns)
    rows = (joined(html("<td>{}</td>", _cell(value)) for value in row) for row in format_numbers(frame, shares).values)
    body = joined(html("<tr>{}</tr>", row) for row in rows)
    return html('<table class="{}"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>', css, head, body)


def _cell(value: Any) -> Any:
    if pd.api.types.is_integer(value):
        return f"{value:,}"
    return MISSING if pd.api.types.is_scalar(value) and pd.isna(value) else value
