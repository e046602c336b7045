"""Numbers from their digits."""

import re
from fractions import Fraction

from rstar_lab.verify.tokens import Unreadable
from rstar_lab.verify.values import Formula

DIGIT_GROUP = re.compile(r"\d{3}(?:\.\d+)?")
MAX_EXPONENT, MAX_DIGITS = 4_000, 2_000
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))")
_PERIOD = re.compile(r"(\d*)\.(\d*?)(?:(\d{1,6}?)\3{2,}|(\d{2,6})\4)")


def decimal(text: str) -> Formula:
    """Return the number of digits with an optional point and exponent."""
    mantissa, _, exponent_text = text.casefold().partition("e")
    exponent = int(exponent_text or 0)
    if abs(exponent) > MAX_EXPONENT or len(mantissa) > MAX_DIGITS:
        raise Unreadable("too large")
    whole, _, part = mantissa.partition(".")
    value = Fraction(int((whole + part) or "0")) * Fraction(10) ** (exponent - len(part))
    significant = len((whole + part).lstrip("0")) if part else 0
    return ("num", value, max(0, len(part) - exponent) if part else 0, significant)


def repeating(text: str) -> Fraction:
    """Return the value of `0.1\\overline{6}` and `0.1(6)`."""
    match = _REPEATING.fullmatch(text)
    if match is None or len(text) > 300:
        raise Unreadable("a repeating decimal")
    return _periodic(match[1], match[2], match[3] or match[4])


def period(text: str) -> Fraction | None:
    """Return the value of `0.333...`: the digits at the end repeat at least three times, or twice if they are several."""
    match = _PERIOD.fullmatch(text)
    return _periodic(match[1], match[2], match[3] or match[4]) if match else None


def _periodic(whole: str, fixed: str, repeated: str) -> Fraction:
    scale = 10 ** len(fixed)
    return (
        int(whole or 0) + Fraction(int(fixed or 0), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    )
