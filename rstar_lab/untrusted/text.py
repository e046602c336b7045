"""Text of models, tools, runs and jobs for a screen: no character of it acts on a terminal or reverses a line, or is markup.

A function that returns markup is declared to return `Html`, and one that returns text for a screen `Shown`: then mypy finds every text
that was not made safe, because only the functions here make these types.
"""

import html as _html
import re
import sys
from collections.abc import Iterable
from typing import NewType

Shown = NewType("Shown", str)


class Html(str):
    """HTML in which every text of others is escaped. Made by `escaped`, `html` and `joined`."""

    __slots__ = ()


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# Each character maps to exactly one character, so that token offsets stay valid: control characters to their Unicode
# pictures, direction marks to a diamond, and characters that UTF-8 cannot encode to the replacement character.
_VISIBLE = (
    {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
    | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
    | dict.fromkeys(map(ord, BIDI), 0x25C6)
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def visible(value: object) -> Shown:
    """Return a value as text in which every control character, direction mark and lone surrogate is one visible character."""
    return Shown(str(value).translate(_VISIBLE))


def printable(value: object) -> Shown:
    """Return a value as text that a terminal shows as it is: as `visible`, but colours are removed.

    Tabs and line breaks stay. The result may still contain rich markup: pass it to rich as `rich.text.Text`.
    """
    return visible(_COLOUR.sub("", str(value)))


def echo(value: object = "", *, end: str = "\n", err: bool = False) -> None:
    """Print a value as `printable` text. err: on standard error."""
    print(printable(value), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def escaped(value: object) -> Html:
    """Return a value as text for HTML, in elements and in quoted attributes. `Html` stays as it is."""
    return value if isinstance(value, Html) else Html(_html.escape(visible(value), quote=True))


def html(template: str, *values: object, **named: object) -> Html:
    """Return a constant template of HTML, filled as by `str.format` with values that are escaped."""
    return Html(template.format(*map(escaped, values), **{name: escaped(value) for name, value in named.items()}))


def joined(parts: Iterable[Html]) -> Html:
    """Return pieces of HTML as one."""
    return Html("".join(parts))


def up_to_last(text: str, mark: str) -> str:
    """Return the text up to its last `mark`. In it, a search for `opening.*?mark` takes linear time, because every opening is closed."""
    return "".join(text.rpartition(mark)[:2])


def duration(seconds: float) -> str:
    """Return a time for people: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 problem`, `1,000 trajectories`. noun: singular of a regular noun."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
