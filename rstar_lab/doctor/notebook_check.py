"""Check of the text of an executed notebook: every number and every quotation must occur in an output.

A number matches an output value that rounds to it: 35% matches 0.354, 35.4 and "35.4%", and 1.2k matches 1,234. A number without a
sign also matches a negative value. A quotation is a Markdown block quote; "…" and "[...]" stand for omitted text.

Not checked: code (fenced or in backticks), links, HTML, identifiers such as pass@1, numbers of lists and headings, dates, years in
parentheses, versions, arXiv ids, references such as "Figure 3", units such as "per 1,000", and the level of an interval ("95%
intervals").
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from markdown_it.token import Token

from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.files import parse_json, read_text, reading

_NUMBER = re.compile(
    r"""(?<![\w.])(?P<sign>[-+\u2212])?(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<power>[eE][-+\u2212]?\d+)?
        (?:\s?(?P<percent>%|percent\b)|(?:[kKMGT]i?B|[mµn]?s|min|h|x|×|px|pp)|(?P<scale>[kKMB])|\s?(?P<word>thousand|million|billion))?
        (?!\w|\.\d)""",
    re.VERBOSE,
)
_SCALES = {"k": 1e3, "K": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "B": 1e9, "billion": 1e9}
_NOT_CHECKED = re.compile(
    r"https?://\S+|\barxiv[:\s]*\d+\.\d+|\b\d{4}-\d\d(?:-\d\d)?\b|\((?:19|20)\d\d\)"
    r"|\b(?:figures?|fig\.|tables?|sections?|sec\.|equations?|eq\.|appendix|chapters?|algorithms?|notebooks?)\s+\d+(?:\.\d+)*|#\d+"
    r"|\b\d+(?:\.\d+)?\s?%\s+(?:\w+\s+)?(?:intervals?|confidence|CIs?)\b|\bintervals? (?:are|is) \d+(?:\.\d+)?\s?%"
    r"|\bper\s+\d[\d,]*"
    r"|\b(?!(?:percent|thousand|million|billion)\b)[^\W\d]\w*(?:[-@]\w+)*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"\A\d+(?:\.\d+)*[.)]?[ \t]")
_OMITTED = re.compile(r"…|\[\s*\.\.\.\s*\]|\.\.\.")
_IGNORED = re.compile(r"[\s*_`\\]+")  # spaces and marks of Markdown, which differ between a quotation and its source
_HIDDEN = re.compile(r"<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)", re.IGNORECASE | re.DOTALL)
_INLINE = re.compile(r'</?(?:span|b|i|em|strong|code|mark|a|small|sub|sup|u|kbd)\b(?:"[^"]*"|[^<>"])*>', re.IGNORECASE)
_TAG = re.compile(r'</?[a-z!](?:"[^"]*"|[^<>"])*>', re.IGNORECASE)
_PLOTTED = ("x", "y", "z", "values", "text", "name", "labels", "error_x", "error_y")


@dataclass(frozen=True)
class Missing:
    """A number or quotation that no output contains. cell: index in the notebook, from 0. line: line of the cell, from 1.

    kind: number or quotation. text: as written. context: its line.
    """

    cell: int
    line: int
    kind: str
    text: str
    context: str


@dataclass(frozen=True)
class NotebookCheck:
    """Result of `check_notebook`: how many numbers and quotations were checked, and which are missing."""

    numbers: int
    quotations: int
    missing: list[Missing]


def check_notebook(path: str | Path) -> NotebookCheck:
    """Check the Markdown cells of an executed notebook (.ipynb) against the outputs of its code cells.

    Raises UserError if the file is not a notebook, or if a code cell was not executed or failed.
    """
    with reading(f"{path}: not a notebook of nbformat 4"):
        return _check(_read(Path(path)))


def _check(cells: list[dict[str, Any]]) -> NotebookCheck:
    values, shown = _outputs(cells)
    numbers = quotations = 0
    missing: list[Missing] = []
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        source = _joined(cell["source"])
        lines, tokens = source.split("\n"), MarkdownIt("commonmark").enable("table").parse(source)
        found: list[tuple[int, str, str]] = []  # line from 0, kind, text
        for first, last in _quotations(tokens):
            quotations += 1
            text = re.sub(r"^[ \t]*>[ \t]?", "", "\n".join(lines[first:last]), flags=re.MULTILINE).strip()
            if not all(_IGNORED.sub("", part) in shown for part in _OMITTED.split(text)):
                found.append((first, "quotation", text))
        for line, text in _texts(tokens):
            for value, unit, written in _numbers(_NOT_CHECKED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)):
                numbers += 1
                if not _is_in(value, unit, written, values):
                    found.append((line + text.count("\n", 0, written.start()), "number", written[0].strip()))
        missing += [Missing(index, line + 1, kind, text, lines[line].strip()) for line, kind, text in found]
    return NotebookCheck(numbers, quotations, missing)


def _quotations(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of the lines of each block quote."""
    for token in tokens:
        if token.type == "blockquote_open" and token.level == 0 and token.map:
            yield token.map[0], token.map[1]


def _texts(tokens: Sequence[Token]) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of each block outside of quotations, without code, HTML and the number of a heading."""
    quoted, before = 0, ""
    for token in tokens:
        quoted += token.nesting * token.type.startswith("blockquote")
        if token.type == "inline" and not quoted and token.map:
            text = "".join(map(_visible, token.children or []))
            yield token.map[0], _HEADING.sub("", text) if before == "heading_open" else text
        before = token.type


def _visible(part: Token) -> str:
    if part.type in ("text", "text_special"):
        return part.content
    return "\n" if part.type.endswith("break") else "" if part.nesting else " "


def _read(path: Path) -> list[dict[str, Any]]:
    cells = parse_json(read_text(path), f"{path}: not a notebook of nbformat 4", dict)["cells"]
    code = [(index, cell, cell["outputs"]) for index, cell in enumerate(cells) if cell["cell_type"] == "code"]
    for index, cell, outputs in code:
        if cell.get("execution_count") is None and _joined(cell["source"]).strip():
            raise UserError(f"{path}: cell {index} was not executed; run all cells and save the notebook")
        if failed := [output for output in outputs if output["output_type"] == "error"]:
            raise UserError(f"{path}: cell {index} failed: {failed[0]['ename']}: {failed[0]['evalue']}")
    return cells


def _numbers(text: str) -> Iterator[tuple[float, float, re.Match[str]]]:
    """Yield (value, value of one unit of its last digit, match) of each number."""
    for match in _NUMBER.finditer(text):
        digits = match["digits"].replace(",", "")
        power = (match["power"] or "e0")[1:].replace("\u2212", "-")
        scale = _SCALES.get(match["scale"] or match["word"] or "", 1.0) * float(f"1e{power}")  # inf for a huge exponent
        value = float(digits) * scale
        yield (
            -value if match["sign"] in ("-", "\u2212") else value,
            10.0 ** -len(digits.partition(".")[2]) * scale,
            match,
        )


def _is_in(value: float, unit: float, written: re.Match[str], values: np.ndarray) -> bool:
    """Return whether one of the sorted values rounds to the number. Percentages also match fractions of 1."""
    for factor in (1.0, 0.01) if written["percent"] else (1.0,):
        for sign in (1,) if written["sign"] else (1, -1):
            centre, reach = sign * value * factor, unit * factor * (0.5 + 1e-6)
            first = np.searchsorted(values, centre - reach)
            if first < len(values) and values[first] <= centre + reach:
                return True
    return False


def _outputs(cells: list[dict[str, Any]]) -> tuple[np.ndarray, str]:
    """Return the sorted values in all outputs, and their text without spaces."""
    texts: list[str] = []
    values: list[float] = []
    for cell in cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream" and output["name"] == "stdout":
                texts.append(_joined(output["text"]))
            for kind, content in output.get("data", {}).items():
                if kind in ("text/plain", "text/markdown"):
                    texts.append(_joined(content))
                elif kind == "text/html":
                    texts.append(_html_text(_joined(content)))
                elif kind == "application/json":
                    _collect(content, values, texts)
                elif kind == "application/vnd.plotly.v1+json":
                    _collect_figure(content, values, texts)
    for value, _, written in _numbers("\n".join(texts)):
        values += [value, value / 100] if written["percent"] else [value]
    numbers = np.array(values, dtype=float)
    return np.sort(numbers[np.isfinite(numbers)]), _IGNORED.sub("", "\n".join(texts))


def _collect_figure(figure: Mapping[str, Any], values: list[float], texts: list[str]) -> None:
    for trace in figure.get("data", []):
        for key in _PLOTTED:
            _collect(trace.get(key), values, texts)
    layout = figure.get("layout", {})
    for part in (layout.get("title"), *layout.get("annotations", [])):
        _collect(part.get("text") if isinstance(part, Mapping) else part, values, texts)


def _collect(content: Any, values: list[float], texts: list[str]) -> None:
    """Add the numbers and texts of JSON content. A mapping with `bdata` is an array as plotly encodes it."""
    if isinstance(content, bool) or content is None:
        return
    if isinstance(content, int | float):
        values.append(float(content))
    elif isinstance(content, str):
        texts.append(_html_text(content))
    elif isinstance(content, Mapping) and "bdata" in content:
        values.extend(np.frombuffer(base64.b64decode(content["bdata"]), dtype=content["dtype"]).astype(float).tolist())
    else:
        for item in content.values() if isinstance(content, Mapping) else content:
            _collect(item, values, texts)


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


def _html_text(html: str) -> str:
    """Return the text of HTML. Elements other than inline ones separate words; scripts and styles are left out."""
    for pattern, instead in ((_HIDDEN, ""), (_INLINE, ""), (_TAG, "\n")):
        html = pattern.sub(instead, html)
    return unescape(html)
