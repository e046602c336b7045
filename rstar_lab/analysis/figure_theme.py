"""The theme of all figures: colours, line styles, plotly templates for light and dark pages, and the layout of headings."""

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any

import plotly.graph_objects as go

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome

# The first six are from the palette of Okabe and Ito (2008), which people with any common colour vision can tell apart.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#8A63D2", "#6B6B6B", "#7F4A1F",
)  # fmt: skip
_OK_COLOUR, _INFRASTRUCTURE_COLOUR = "#009E73", "#6B6B6B"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
_PANEL_TITLE = 30  # characters of a line above one of several panels in a row
_LEGEND_WIDTH = 780  # pixels available to one line of the legend; figures are at least 900 pixels wide
_LINE = 18  # pixels of a further line of a title
_FORMAT = re.compile(r"\.(\d)([%f])")  # a tick format of plotly with a number of digits
_MAX_UNIT_TICKS = 12  # widest range of an x axis with a tick at every integer
_PAGE_COLOURS = {"light": ("#1b1b1b", "#ffffff", "#e2e2e2"), "dark": ("#ececec", "#16181d", "#3a3d45")}


def template(mode: str = "light") -> go.layout.Template:
    """Return the plotly template for light or dark pages.

    mode: "light" or "dark".
    """
    ink, paper, grid = _PAGE_COLOURS[mode]
    axis = {
        "gridcolor": grid, "zeroline": False, "linecolor": ink, "ticks": "outside", "automargin": True,
        "exponentformat": "power", "minexponent": 4, "separatethousands": True,
    }  # fmt: skip
    legend = {"orientation": "h", "yref": "container", "yanchor": "top", "x": 0, "traceorder": "normal"}
    return go.layout.Template(
        layout={
            "colorway": COLOURS,
            "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "xaxis": axis,
            "yaxis": axis | {"title": {"standoff": 10}},  # without it, titles cover long tick labels
            "hovermode": "closest",
            "margin": {"l": 60, "r": 20, "b": 48},
            "title": {"x": 0, "xref": "paper", "yref": "container", "yanchor": "top", "font": {"size": 15}},
            "legend": legend | {"bgcolor": "rgba(0,0,0,0)"},
            "annotationdefaults": {"font": {"size": 14}},
            "shapedefaults": {"line": {"color": ink}},
        }
    )


def apply_theme(figure: go.Figure, mode: str = "light") -> None:
    """Apply the theme to a figure in place: template, types and ticks of the axes, and the layout of the headings."""
    figure.update_layout(template=template(mode))
    for letter in "xy":
        values: dict[str, list[Any]] = {}
        for trace in figure.data:
            found = getattr(trace, letter, None)
            if found is not None:
                values.setdefault(getattr(trace, f"{letter}axis", None) or letter, []).extend(found)
        for name, each in values.items():
            _set_axis(figure.layout[f"{letter}axis{name[1:]}"], each, integer_ticks=letter == "x")
    place_headings(figure)


def _set_axis(axis: Any, values: Sequence[Any], integer_ticks: bool) -> None:
    """Set the type and the ticks of an axis from its values.

    An axis of words stays one, even if all words are numbers: plotly would draw them at their values. The number format has
    enough digits for two ticks to differ. integer_ticks: a few integers, such as steps, get no ticks between them.
    """
    if axis.type is None and any(isinstance(value, str) for value in values):
        axis.type = "category"
    numbers = [float(value) for value in values if isinstance(value, Real) and math.isfinite(value)]
    if not numbers or axis.type not in (None, "linear"):
        return
    integers = len(numbers) == len(values) and all(number.is_integer() for number in numbers)
    if integer_ticks and integers and max(numbers) - min(numbers) <= _MAX_UNIT_TICKS and axis.tickvals is None:
        axis.dtick = axis.dtick or 1
    if match := _FORMAT.fullmatch(axis.tickformat or ""):
        ends = axis.range or (*numbers, *([0.0] if axis.rangemode == "tozero" else []))
        span = (float(max(ends)) - float(min(ends))) * (100 if match[2] == "%" else 1)
        # About five ticks: neighbours differ in the digit after the last that is shown if the span is smaller.
        digits = math.ceil(-math.log10(span / 5)) if span > 0 else int(match[1])
        axis.tickformat = f".{max(int(match[1]), min(digits, 6))}{match[2]}"


def place_headings(figure: go.Figure) -> None:
    """Stack the title, the legend and the panel titles above the panels so that they do not overlap."""
    height = figure.layout.height or 400
    top = 10
    layout: dict[str, Any] = {"height": height}
    if figure.layout.title.text:
        layout["title_y"] = 1 - top / height
        top += 32
    shown = [(trace.name, getattr(trace, "showlegend", False)) for trace in figure.data]  # a treemap has no legend
    names = [name for name, legend in shown if legend is not False and name]
    if figure.layout.showlegend is not False and (len(names) > 1 or any(legend for _, legend in shown)):
        layout["legend_y"] = 1 - top / height
        lines, used = 1, 0
        for name in names:
            width = 48 + 7 * len(name)
            lines, used = (lines, used + width) if used + width <= _LEGEND_WIDTH or not used else (lines + 1, width)
        top += 8 + 21 * lines
    panels = [note for note in figure.layout.annotations if note.yref == "paper" and note.yanchor == "bottom"]
    columns = max(Counter(note.y for note in panels).values(), default=0)
    for note in panels:  # a panel that is alone in the last row is as narrow as the others
        if "<br>" not in note.text and columns > 1:
            note.text = "<br>".join(textwrap.wrap(note.text, _PANEL_TITLE, break_long_words=False))
    if panels:
        top += 26 + _LINE * max(note.text.count("<br>") for note in panels)
    figure.update_layout(layout, margin_t=top + 8)


def line_styles(names: Sequence[Any]) -> dict[Any, tuple[str, str, str]]:
    """Map each name to a colour, a dash and a symbol, so that curves differ in more than their colour."""
    channels = zip(itertools.cycle(COLOURS), itertools.cycle(DASHES), itertools.cycle(SYMBOLS), strict=False)
    return dict(zip(names, channels, strict=False))


def outcome_marker(outcome: str) -> dict[str, Any]:
    """Return the marker of a bar that shows calls with this outcome. Infrastructure failures are grey and hatched."""
    if outcome in INFRASTRUCTURE_FAILURES:
        patterns = dict(zip(sorted(INFRASTRUCTURE_FAILURES), "/x", strict=True))
        return {"color": _INFRASTRUCTURE_COLOUR, "pattern": {"shape": patterns[Outcome(outcome)]}}
    errors = [str(each) for each in Outcome if each is not Outcome.OK and each not in INFRASTRUCTURE_FAILURES]
    colours = [colour for colour in COLOURS if colour not in (_OK_COLOUR, _INFRASTRUCTURE_COLOUR)]
    return {"color": dict(zip(errors, colours, strict=True)).get(str(outcome), _OK_COLOUR)}


def translucent(colour: str, opacity: float = 0.18) -> str:
    """Convert a #rrggbb colour to an rgba() colour of this opacity (0 to 1)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
