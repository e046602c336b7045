"""Moves over the tokens of an answer, and reads what stands beside a number: units, currencies, words for numbers."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.tokens import Token, Unreadable
from rstar_lab.verify.values import Formula, Quantity, Tagged, number

MAX_DEPTH = 40

END = Token("end", "")
RELATIONS = {
    **dict.fromkeys(("=", "<", ">", "approx", "equiv", "in", "notin", "subset", "to", "Rightarrow", "Leftrightarrow")),
    "leq": "<=", "geq": ">=", "neq": "!=", "subseteq": "subset",
}  # fmt: skip
RELATIONS = {name: sign or name for name, sign in RELATIONS.items()}


class Cursor:
    """A place in a sequence of tokens."""

    def __init__(self, tokens: Sequence[Token], depth: int = 0):
        self.tokens = list(tokens)
        self.at = 0
        self.depth = depth  # nesting of brackets and sub-parsers
        self.listed = 0  # brackets around: commas inside separate items
        self.bars = 0  # absolute values around
        self.builder = 0  # sets around: `|` and `:` separate element and condition
        self.indices: list[str] = []  # names of summation around: `i` is no imaginary unit

    def peek(self, offset: int = 0) -> Token:
        place = self.at + offset
        return self.tokens[place] if place < len(self.tokens) else END

    def take(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def is_sign(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "sign" and token.text in texts

    def is_command(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "command" and token.text in texts

    def is_word(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "word" and token.text.casefold() in texts

    def is_symbol(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "symbol" and token.text in texts

    def accept(self, text: str) -> bool:
        if self.is_sign(text):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"expected {text}, found {self.peek().text}")

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    def closing(self, opening: str, closing: str) -> int:
        """Return the place of the sign that closes a bracket whose content starts here."""
        level = 1
        for place in range(self.at, len(self.tokens)):
            token = self.tokens[place]
            if token.kind == "sign":
                level += (token.text == opening) - (token.text == closing)
                if level == 0:
                    return place
        raise Unreadable(f"no {closing}")

    def closing_from(self, opening: str, closing: str) -> int:
        self.at += 1
        try:
            return self.closing(opening, closing)
        finally:
            self.at -= 1

    def braced(self) -> list[Token]:
        """Return the tokens in braces here, and move behind them."""
        self.expect("{")
        end = self.closing("{", "}")
        inner = self.tokens[self.at : end]
        self.at = end + 1
        return inner

    def sub(self, tokens: Sequence[Token]) -> "Cursor":
        parser = type(self)(tokens, self.depth + 1)
        parser.deeper()
        parser.indices = self.indices
        return parser

    def item_end(self, place: int) -> bool:
        """Return whether an item can end before a token."""
        token = self.tokens[place] if place < len(self.tokens) else END
        if token.kind == "end" or (
            token.kind == "sign" and token.text in (",", ";", ")", "]", r"\}", "\\\\", "=", "<", ">", "&", ":")
        ):
            return True
        if token.kind == "command" and (token.text in RELATIONS or token.text in ("lor", "land", "cup", "rangle")):
            return True
        return token.kind == "word" and token.text.casefold() in ("and", "or")

    # Read by the classes that inherit from this one.

    def items(self, ended: Callable[[], bool]) -> tuple[list[Any], str]:
        raise NotImplementedError

    def item(self) -> Any:
        raise NotImplementedError

    def whole(self) -> Any:
        raise NotImplementedError

    def expression(self, power: int) -> Any:
        raise NotImplementedError

    def command(self, name: str) -> Any:
        raise NotImplementedError

    def bracket(self, opening: str) -> Any:
        raise NotImplementedError

    def bracketed(self, closing: str) -> tuple[list[Any], str]:
        raise NotImplementedError

    # --- beside a number

    def currency(self) -> units.Unit | None:
        start = self.at
        if self.is_word("us") or (self.is_symbol("U") and self.is_sign(".", offset=1)):
            while self.peek().text in ("US", "U", "S", "."):
                self.at += 1
        found: units.Unit | None = None
        while self.peek().text in units.CURRENCIES:
            found = units.UNITS[self.take().text]
            self.accept(".")
        if found is None or self.item_end(self.at):
            self.at = start
            return None
        return found

    def unit_phrase(self, place: int, explicit: bool) -> tuple[units.Unit | None, str, bool, int] | None:
        """Return (unit, noun, whether the noun is a counted thing, end) of the words from a place to the end of an item."""
        unit: units.Unit | None = None
        nouns: list[str] = []
        power, sign, group = 1, 1, False
        tokens = self.tokens
        while place < len(tokens) and not (self.item_end(place) and not (group and tokens[place].text == ")")):
            token = tokens[place]
            word, following = token.text, tokens[place + 1] if place + 1 < len(tokens) else END
            if word in ("square", "sq", "cubic", "cu") and token.kind == "word":
                power, explicit = (2 if word.startswith("sq") else 3), True
            elif (
                word in ("{", "}", ".")
                or (word == "*" and unit is not None)
                or (
                    word in ("in", "a", "an", "the", "of")
                    and token.kind == "word"
                    and not unit
                    and not nouns
                    and following.kind == "word"
                    and word != "of"
                )
            ):
                pass
            elif word in ("/", "per"):
                sign, explicit = -1, True
            elif word == "(" and (sign == -1 or place == self.at):
                group = True
            elif word == ")" and group:
                group, sign = False, 1
            elif word == "frac" and token.kind == "command":
                fraction = self.unit_fraction(place)
                if fraction is None:
                    return None
                other, place = fraction
                unit = (unit or units.ONE).times(other)
                continue
            elif self.is_unit(token, following, explicit or unit is not None):
                if word == "mu":
                    place += 1
                    word = "µ" + following.text
                exponent, place = self.unit_power(place + 1)
                unit = (unit or units.ONE).times(units.UNITS[word], sign * power * exponent)
                power, sign = 1, (sign if group else 1)
                if (
                    units.UNITS[word] in (units.UNITS["C"], units.UNITS["F"])
                    and len(unit.dimensions) == 2
                    and ("deg", 1) in unit.dimensions
                ):
                    unit = units.UNITS[word]
                continue
            elif word == "＄":
                unit = (unit or units.ONE).times(units.UNITS["＄"])
            elif token.kind == "word" and len(nouns) < 4 and unit is None and (sign == 1 or nouns or explicit):
                nouns.append(units.singular(word))
            else:
                return None
            place += 1
        if unit is None and not nouns:
            return None
        counted = all(noun in units.COUNTED or noun in units.UNITS for noun in nouns)
        return unit, " ".join(nouns), counted, place

    def is_unit(self, token: Token, following: Token, explicit: bool) -> bool:
        if token.kind == "symbol" and token.text == "mu":
            return "µ" + following.text in units.UNITS
        if token.text not in units.UNITS or token.kind not in ("word", "symbol"):
            return False
        if token.text == "Omega":
            return True
        return token.kind == "word" or token.upright or explicit

    def unit_power(self, place: int) -> tuple[int, int]:
        """Return the exponent of a unit, written at a place, and its end."""
        while place < len(self.tokens) and self.tokens[place].text == "}":
            place += 1
        if place < len(self.tokens) and self.tokens[place].text == "^":
            for end in range(place + 2, place + 6):
                text = "".join(token.text for token in self.tokens[place + 1 : end])
                if match := re.fullmatch(r"(-?\d)|\{(-?\d)\}", text):
                    return int(match[1] or match[2]), end
        return 1, place

    def unit_fraction(self, place: int) -> tuple[units.Unit, int] | None:
        """Return the unit of `\\frac{m}{s^2}`."""
        saved, self.at = self.at, place + 1
        try:
            parts = [self.braced(), self.braced()]
            end = self.at
        except Unreadable:
            return None
        finally:
            self.at = saved
        found = []
        for tokens in parts:
            part = type(self)(tokens, self.depth + 1).unit_phrase(0, explicit=True)
            if part is None or part[0] is None or part[1]:
                return None
            found.append(part[0])
        return found[0].times(found[1], -1), end

    def unit_follows(self, place: int) -> bool:
        found = self.unit_phrase(place, explicit=False)
        return found is not None and (found[0] is not None or found[2])

    def number_in_words(self) -> Formula | None:
        """Read `twenty-one`, `one hundred and five`, `three quarters`, `a dozen`; None and no move for other words."""
        start, total, current, seen = self.at, 0, 0, False
        if self.is_word("a", "an") or self.is_symbol("a"):
            self.at += 1
            if not self.is_word("dozen", "hundred", "thousand", "million", "half"):
                self.at = start
                return None
            current, seen = 1, True
        while True:
            word = self.peek().text.casefold() if self.peek().kind == "word" else ""
            if word in units.NUMBER_WORDS:
                current += units.NUMBER_WORDS[word]
            elif word == "hundred" and seen:
                current *= 100
            elif word in ("thousand", "million", "billion") and seen:
                total, current = total + current * units.MULTIPLIERS[word], 0
            elif word == "dozen":
                current = 12 * (current or 1)
            elif word in units.PARTS and (seen or word == "half"):
                self.at += 1
                return number(Fraction(current if seen else 1, units.PARTS[word]))
            elif seen and (word == "and" or self.is_sign("-")) and self.peek(1).text.casefold() in units.NUMBER_WORDS:
                self.at += 1
                continue
            else:
                break
            seen = True
            self.at += 1
        if not seen:
            self.at = start
            return None
        spelled = number(total + current)
        if self.is_sign("(") and self.peek(1).kind == "number" and self.is_sign(")", offset=2):  # `twelve (12)`
            if int(self.peek(1).text) != total + current:
                raise Unreadable("two numbers")
            self.at += 3
        return spelled

    def half_of_day(self) -> str:
        """Read `a.m.` or `pm`; "" if it is not here."""
        text = "".join(token.text.casefold() for token in self.tokens[self.at : self.at + 4])
        match = re.match(r"([ap])\.?m\.?$", text)
        if match is None:
            return ""
        self.at = len(self.tokens)
        return match[1] + "m"

    def with_unit(self, value: Any, currency: units.Unit | None) -> Any:
        """Return a value with the percent sign, the multiplier, the unit and the noun that follow it."""
        if not isinstance(value, tuple):
            return value
        unit, noun, counted = currency, "", True
        if value[0] == "deg":
            unit, value = units.DEGREE, value[1]
        elif value[0] == "neg" and value[1][0] == "deg":
            unit, value = units.DEGREE, ("neg", value[1][1])
        while (token := self.peek()).kind == "word":
            word = token.text
            name = next((word[:n] for n in (len(word), 2, 1) if word[:n] in units.MULTIPLIERS), "")
            if not name:
                break
            if word != name:
                self.tokens[self.at] = token._replace(text=word.removeprefix(name), space=False)
            else:
                self.at += 1
            value = ("*", value, number(units.MULTIPLIERS[name]))
        while self.is_sign("%", "‰"):
            unit = units.PERMILLE if self.take().text == "‰" else units.PERCENT
        if self.is_word("percent", "pct"):
            self.at += 1
            unit = units.PERCENT
        if self.is_sign("(") and (
            self.is_word("in", "units", "unit", "percent", offset=1) or self.is_sign("%", offset=1)
        ):
            end = self.closing_from("(", ")")
            inner = [token.text for token in self.tokens[self.at + 1 : end] if token.text not in ("in", "{", "}")]
            if inner in (["%"], ["percent"], ["unit"], ["units"]):
                unit, self.at = units.PERCENT if inner[0] in ("%", "percent") else unit, end + 1
        if self.is_word("st", "nd", "rd", "th") or (
            self.is_sign("^") and self.peek(2).text.casefold() in ("st", "nd", "rd", "th")
        ):
            self.at += 1 if self.peek().kind == "word" else 4
        if self.is_sign("(") and value[0] == "num":  # `7 (seven)`
            start, self.at = self.at, self.at + 1
            if self.number_in_words() == value and self.accept(")"):
                return value
            self.at = start
        if value[0] == "num" and (half := self.half_of_day()):
            return Tagged("time", (value[1], Fraction(0), half))
        if unit in (None, units.DEGREE, units.PERCENT) or not self.item_end(self.at):
            letter = self.peek().kind == "symbol" and (self.peek().space or unit is units.DEGREE)
            found = self.unit_phrase(self.at, explicit=letter)
            if found is not None:
                other, noun, counted, self.at = found
                if other is not None and not (unit is units.DEGREE and other.dimensions in ((("C", 1),), (("F", 1),))):
                    unit = other if unit in (None, units.PERCENT) else unit.times(other)
                elif other is not None:
                    unit = other
        return Quantity(value, unit, noun, counted) if unit is not None or noun else value
