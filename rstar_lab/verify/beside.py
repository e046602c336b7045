"""What stands beside a number: currencies, units, nouns, multipliers; and numbers in words."""

import re
from fractions import Fraction
from typing import Any, NamedTuple

from rstar_lab.verify import units
from rstar_lab.verify.tokens import END, Cursor, Token
from rstar_lab.verify.units import Unit
from rstar_lab.verify.values import Formula, Quantity, decimal, number

MAX_NOUNS = 4
MAX_PHRASE = 40  # tokens
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TEMPERATURES = (units.UNITS["C"], units.UNITS["F"])
_POWER = re.compile(r"\^(?:\{(-?\d)\}|(-?\d)(?![\d.]))")


class Phrase(NamedTuple):
    """Words from a place to the end of an item. counted: its noun is a thing of the table."""

    unit: Unit | None
    noun: str
    counted: bool
    end: int


def currency(cursor: Cursor) -> Unit | None:
    """Read the currency before a number, such as `US$` and `Rs.`."""
    start, found = cursor.at, None
    while cursor.peek().text in units.CURRENCIES:
        found = units.UNITS[cursor.take().text]
        cursor.accept(".")
    if found is None or cursor.item_end(cursor.at):
        cursor.at, found = start, None
    return found


def phrase(cursor: Cursor, start: int, explicit: bool) -> Phrase | None:
    """Return the unit and the nouns from a place to the end of an item; None if anything else stands there.

    explicit: whether a single letter can be a unit.
    """
    unit: Unit | None = None
    nouns: list[str] = []
    power, sign, group, place = 1, 1, False, start
    tokens = cursor.tokens
    while place < len(tokens) and (not cursor.item_end(place) or (group and tokens[place].text == ")")):
        token, following = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else END
        text, word = token.text, token.kind == "word"
        place += 1
        if place - start > MAX_PHRASE:
            return None
        if word and text in _POWERS:
            power, explicit = _POWERS[text], True
        elif word and text in ("in", "a", "an", "the") and not unit and not nouns and following.kind == "word":
            pass
        elif text in ("/", "per"):
            sign, explicit = -1, True
        elif text == "(" and (sign == -1 or place - 1 == cursor.at):
            group = True
        elif text == ")" and group:
            group, sign = False, 1
        elif text == "frac":
            explicit = True
        elif text == "{" and tokens[place - 2].text == "}":  # the denominator
            sign, group = -1, True
        elif token.kind == "sign" and text in units.CURRENCIES:
            unit = (unit or units.ONE).times(units.UNITS[text])
        elif name := _unit_name(token, following, explicit or unit is not None):
            exponent, place = _exponent(tokens, place + (text == "mu"))
            unit = (unit or units.ONE).times(units.UNITS[name], sign * power * exponent)
            power, sign = 1, sign if group else 1
            if units.UNITS[name] in _TEMPERATURES and ("deg", 1) in unit.dimensions:
                unit = units.UNITS[name]
        elif text in ("{", "}", ".") or (text == "*" and unit is not None):
            pass
        elif word and len(nouns) < MAX_NOUNS and unit is None and (sign == 1 or nouns or explicit):
            nouns.append(units.singular(text))
        else:
            return None
    if unit is None and not nouns:
        return None
    counted = all(noun in units.COUNTED or noun in units.UNITS for noun in nouns)
    return Phrase(unit, " ".join(nouns), counted, place)


def _unit_name(token: Token, following: Token, explicit: bool) -> str:
    """Return the unit that a token is, or "". A letter in a formula is one if `explicit`."""
    if token.kind == "symbol" and token.text == "mu":
        return "µ" + following.text if "µ" + following.text in units.UNITS else ""
    unit = token.text in units.UNITS and token.kind in ("word", "symbol")
    return token.text if unit and (token.kind == "word" or token.upright or explicit or token.text == "Omega") else ""


def _exponent(tokens: list[Token], place: int) -> tuple[int, int]:
    """Return the exponent of a unit, written at a place, and its end."""
    while place < len(tokens) and tokens[place].text == "}":
        place += 1
    match = _POWER.match("".join(token.text for token in tokens[place : place + 5]))
    return (int(match[1] or match[2]), place + len(match[0])) if match else (1, place)


def unit_follows(cursor: Cursor, place: int) -> bool:
    """Return whether a unit or a counted thing is all that stands between a place and the end of the item."""
    found = phrase(cursor, place, explicit=False)
    return found is not None and (found.unit is not None or found.counted)


def number_in_words(cursor: Cursor) -> Formula | None:
    """Read `twenty-one`, `one hundred and five`, `three quarters`, `a dozen`; None and no move for other words."""
    start, total = cursor.at, 0
    current: int | None = None
    article = cursor.is_word("a", "an") or cursor.is_symbol("a")
    if article and cursor.is_word("dozen", "hundred", "thousand", "million", "half", offset=1):
        cursor.at += 1
        current = 1
    while cursor.peek().kind == "word" or cursor.is_sign("-"):
        word = cursor.peek().text.casefold()
        if (value := units.NUMBER_WORDS.get(word)) is not None:
            if current is not None and (not value or current % (10 if value < 10 else 100) or current % 100 == 10):
                current = None  # `five six`
                break
            current = (current or 0) + value
        elif word == "dozen":
            current = 12 * (current or 1)
        elif word in units.PARTS and (word == "half" if current is None else word.endswith("s") == (current > 1)):
            cursor.at += 1
            return number(Fraction(1 if current is None else current, units.PARTS[word]))
        elif current is None:
            break
        elif word == "hundred":
            current *= 100
        elif word in ("thousand", "million", "billion"):
            total, current = total + current * units.MULTIPLIERS[word], 0
        elif word == "-" and cursor.is_word(*units.PARTS, offset=1):
            pass
        elif (word != "-" and (word != "and" or current % 100)) or not cursor.is_word(*units.NUMBER_WORDS, offset=1):
            break
        cursor.at += 1
    if current is None:
        cursor.at = start
        return None
    return number(total + current)


def with_unit(cursor: Cursor, value: Any, unit: Unit | None) -> Any:
    """Return a value with the multiplier, the unit or percent sign, and the noun that follow it. unit: the currency before it."""
    if not isinstance(value, tuple):
        return value
    if value[0] == "deg":
        unit, value = units.DEGREE, value[1]
    elif value[0] == "neg" and value[1][0] == "deg":
        unit, value = units.DEGREE, ("neg", value[1][1])
    while (token := cursor.peek()).kind == "word":
        name = next((token.text[:n] for n in (len(token.text), 2, 1) if token.text[:n] in units.MULTIPLIERS), "")
        if not name:
            break
        if token.text == name:
            cursor.at += 1
        else:
            cursor.tokens[cursor.at] = token._replace(text=token.text.removeprefix(name), space=False)
        value = ("*", value, number(units.MULTIPLIERS[name]))
    unit = _percent(cursor) or unit
    if value[0] == "num" and cursor.is_sign("("):  # `7 (seven)`, `seven (7)`
        inner = Cursor(cursor.tokens[cursor.at + 1 :])
        digits = inner.peek().kind == "number"
        if (decimal(inner.take().text) if digits else number_in_words(inner)) == value and inner.accept(")"):
            cursor.at += inner.at + 1
            return value
    noun, counted = "", True
    if unit in (None, units.DEGREE, units.PERCENT) or not cursor.item_end(cursor.at):
        letter = cursor.peek().kind == "symbol" and (cursor.peek().space or unit is units.DEGREE)
        if (found := phrase(cursor, cursor.at, explicit=letter)) is not None:
            other, noun, counted, cursor.at = found
            temperature = unit is units.DEGREE and other in _TEMPERATURES
            if other is not None:
                unit = other if unit in (None, units.PERCENT, other) or temperature else unit.times(other)
    return Quantity(value, unit, noun, counted) if unit is not None or noun else value


def _percent(cursor: Cursor) -> Unit | None:
    """Read `%`, `percent`, `(in %)` and `‰`. `(units)` is skipped."""
    found = None
    while cursor.is_sign("%", "‰"):
        found = units.PERCENT if cursor.take().text == "%" else units.PERMILLE
    if cursor.is_word("percent", "pct"):
        cursor.at += 1
        found = units.PERCENT
    following = "".join(token.text for token in cursor.tokens[cursor.at : cursor.at + 6])
    if remark := re.match(r"\((?:in)?\{?(%|percent|units?)\}?\)", following):
        cursor.at = cursor.closing("(", ")") + 1
        found = found if remark[1].startswith("unit") else units.PERCENT
    return found
