r"""Exact values of plain numbers: `42`, `1,234.5`, `8.7e8`, `-\frac{1}{2}`, `2\frac{1}{2}`, `0.\overline{3}`.

Decimals are compared exactly, as fractions, so that the size of a number never decides: 2.88e-19 is not 0.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 4_000
MIN_DECIMALS = MIN_SIGNIFICANT = 6

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_POWER = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\^\{([+-]?\d{1,6})\})?"
_NUMBER = re.compile(rf"([+-]?)\s*({_UNSIGNED})(?:[eE]([+-]?\d{{1,6}}))?{_POWER}", re.ASCII)
_POWER_ONLY = re.compile(r"([+-]?)\s*10\^\{([+-]?\d{1,6})\}", re.ASCII)
_FRACTION = re.compile(
    rf"([+-]?)\s*(\d+(?=\s*\\frac|\s+\d))?\s*(?:\\frac\{{\s*([+-]?{_UNSIGNED})\s*\}}\{{\s*([+-]?{_UNSIGNED})\s*\}}"
    rf"|({_UNSIGNED})\s*/\s*({_UNSIGNED}))",
    re.ASCII,
)
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Value:
    """A number, and how it was written.

    decimals: places after the point; 0 for an integer or a fraction. significant: number of digits.
    """

    number: Fraction
    decimals: int = 0
    significant: int = 0


def _decimal(text: str, exponent: int = 0) -> Value | None:
    if abs(exponent) > MAX_EXPONENT:
        return None
    digits = text.replace(",", "")
    whole, _, part = digits.partition(".")
    number = Fraction(int((whole + part) or "0")) * Fraction(10) ** (exponent - len(part))
    written = (whole + part).lstrip("0")
    decimals = len(part) - exponent if part else 0
    return Value(number, max(0, decimals), len(written) if part else 0)


def plain_value(text: str) -> Value | None:
    """Return the value of a plain number in normalised LaTeX, or None for anything else."""
    text = text.strip()
    if len(text) > 1_000:
        return None
    if match := _NUMBER.fullmatch(text):
        value = _decimal(match[2], int(match[3] or 0) + int(match[4] or 0))
        if value is not None and match[1] == "-":
            value = Value(-value.number, value.decimals, value.significant)
        return value
    if match := _POWER_ONLY.fullmatch(text):
        power = int(match[2])
        return None if abs(power) > MAX_EXPONENT else Value(Fraction(10) ** power * (-1 if match[1] == "-" else 1))
    if match := _FRACTION.fullmatch(text):
        above, below = _signed(match[3] or match[5]), _signed(match[4] or match[6])
        if not below or (match[2] and (above < 0 or below < 0)):
            return None
        number = int(match[2] or 0) + above / below
        return Value(-number if match[1] == "-" else number)
    return None


def _signed(text: str) -> Fraction:
    value = _decimal(text.lstrip("+-"))
    assert value is not None
    return -value.number if text.startswith("-") else value.number


def repeating_as_fraction(match: re.Match[str]) -> str:
    r"""Return a repeating decimal (a match of REPEATING) as a LaTeX fraction: `0.1\overline{6}` is 1/6."""
    whole, fixed, period = match[1] or "0", match[2], match[3]
    if len(period) + len(fixed) > 200:
        return match[0]
    scale = 10 ** len(fixed)
    number = int(whole) + Fraction(int(fixed or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def rounds_to(value: Fraction, rounded: Value) -> bool:
    """Return whether a decimal is `value` rounded to the decimal's last digit.

    A decimal with fewer than 6 decimal places or 6 significant digits is not accepted as a rounded value.
    """
    if rounded.decimals < MIN_DECIMALS or rounded.significant < MIN_SIGNIFICANT:
        return False
    return round(value, rounded.decimals) == rounded.number


def values_equal(first: Value, second: Value) -> bool:
    """Return whether two numbers are equal, exactly or because one is the other rounded (see `rounds_to`)."""
    if first.number == second.number:
        return True
    if first.decimals and second.decimals:
        shorter, longer = sorted((first, second), key=lambda value: value.decimals)
        return shorter.decimals < longer.decimals and rounds_to(longer.number, shorter)
    return rounds_to(second.number, first) or rounds_to(first.number, second)
