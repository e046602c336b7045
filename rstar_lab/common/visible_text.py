"""Text of models, tools, runs and jobs for a screen: no character of it acts on a terminal or reverses a line, or is markup."""

import html
import re

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


def escaped(value: object) -> str:
    """Return a value as text for HTML, in elements and in quoted attributes. No text becomes HTML in another way."""
    return html.escape(visible(str(value)), quote=True)


def visible(text: str) -> str:
    """Replace every control character, direction mark and lone surrogate in `text` with one visible character."""
    return text.translate(_VISIBLE)


def printable(value: object) -> str:
    """Return a value as text that a terminal shows as it is: colours are removed, other control characters are visible.

    Tabs and line breaks stay. The result may still contain rich markup: pass it to rich as `rich.text.Text`.
    """
    return visible(_COLOUR.sub("", str(value)))


def up_to_last(text: str, mark: str) -> str:
    """Return the text up to its last `mark`. In it, a search for `opening.*?mark` takes linear time, because every opening is closed."""
    return "".join(text.rpartition(mark)[:2])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 problem`, `1,000 trajectories`. noun: singular of a regular noun."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
