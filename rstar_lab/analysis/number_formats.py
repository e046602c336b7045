"""Number formats of tables in notebooks: `format_numbers(frame)`."""

import re

import pandas as pd

from rstar_lab.analysis.metrics import METRICS

_SHARE = re.compile(r"(^|_)(share|rate|part|kept)$|^after_(error|success)$")


def format_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy for display: shares as percentages, other floating-point numbers with at least three digits.

    A column holds shares if one of its labels is a metric in percent (METRICS) or ends with share, rate, part or kept.
    Missing values are shown as "–".
    """
    shown = {}
    for position, column in enumerate(frame.columns):
        values = frame.iloc[:, position]
        if pd.api.types.is_float_dtype(values):
            labels = column if isinstance(column, tuple) else (column,)
            write = "{:.1%}".format if any(_is_share(str(label)) for label in labels) else _digits
            values = values.map(write, na_action="ignore").astype(object).where(values.notna(), "–")
        shown[position] = values
    return pd.DataFrame(shown, index=frame.index).set_axis(frame.columns, axis=1)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _is_share(label: str) -> bool:
    return METRICS[label].percent if label in METRICS else bool(_SHARE.search(label))
