"""Reads formulas: a Pratt parser of numbers, letters and operators.

A number beside a bracket is a factor; a proper fraction behind an integer makes a mixed number.
"""

import re
from fractions import Fraction
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.cursor import Cursor
from rstar_lab.verify.tokens import Token, Unreadable
from rstar_lab.verify.values import Formula, Group, Matrix, number

_GROUP_OF_DIGITS = re.compile(r"\d{3}(?:\.\d+)?")
FUNCTIONS = frozenset(units.TABLES["names"]["functions"].split())
_STARTERS = FUNCTIONS | frozenset(units.TABLES["names"]["starters"].split())
_NO_FACTORS = frozenset(units.TABLES["names"]["no_factors"].split())
JOINERS: dict[str, str] = units.TABLES["names"]["joiners"]


class FormulaParser(Cursor):
    """Reads formulas. Commands and brackets are read by `brackets.BracketParser`."""

    def expression(self, power: int) -> Any:
        """Read a formula whose operators bind stronger than `power`: 5 for sums, 10 for products, 15 for powers."""
        self.deeper()
        if self.is_sign("-", "+") and power <= 12:
            sign = self.take().text
            value = self.expression(9)
            left = ("neg", value) if sign == "-" else value
            if sign == "-" and not isinstance(value, tuple | Matrix):
                raise Unreadable("a negative set")
        elif self.is_command("pm", "mp"):
            kind = self.take().text
            left = (kind, number(0), self.expression(9))
        else:
            left = self.primary()
        while True:
            if self.is_sign("^") and power < 15 and not self.text_exponent():
                left = self.power(left)
            elif self.is_sign("!") and not (self.is_sign("=", offset=1) and not self.peek(1).space):
                left = self.factorial(left)
            elif self.is_sign("°"):
                self.at += 1
                if self.peek().kind == "number":
                    raise Unreadable("minutes of arc")
                left = ("deg", left)
            elif self.is_sign("'") and isinstance(left, tuple) and left[0] == "sym":
                self.at += 1
                left = ("sym", left[1] + "'")
            elif power < 5 and self.is_sign("+", "-"):
                sign = self.take().text
                right = self.expression(5)
                left = ("+", left, right if sign == "+" else ("neg", right))
            elif power < 1 and self.is_command("over", "choose"):
                above = self.take().text
                left = (*(("/",) if above == "over" else ("call", "binom")), left, self.expression(0))
            elif power < 5 and self.is_command("pm", "mp"):
                left = (self.take().text, left, self.expression(5))
            elif power < 10 and self.is_sign("*", "/"):
                sign = self.take().text
                if sign == "*" and self.is_sign("*"):
                    self.at -= 1
                    left = self.power(left)
                    continue
                if sign == "/" and self.unit_follows(self.at - 1):
                    self.at -= 1
                    break
                left = (sign, left, self.expression(10))
            elif power < 10 and self.is_symbol("x", "X") and self.peek().space and self.power_of_ten_follows():
                self.at += 1
                left = ("*", left, self.expression(10))
            elif power < 10 and self.starts_factor():
                left = ("*", left, self.expression(10))
            else:
                break
            if any(not isinstance(part, tuple | str | Matrix) for part in left):
                raise Unreadable("a formula of sets")
        self.depth -= 1
        return left

    def power_of_ten_follows(self) -> bool:
        return self.peek(1).text == "10" and self.is_sign("^", offset=2)

    def text_exponent(self) -> bool:
        """Return whether the exponent here is an ordinal, as in `42^{\\text{nd}}`."""
        return any(
            self.peek(offset).text.casefold() in ("st", "nd", "rd", "th") and self.peek(offset).upright
            for offset in (1, 2)
        )

    def starts_factor(self) -> bool:
        """Return whether a factor starts here, without a sign for the product."""
        token, before = self.peek(), self.tokens[self.at - 1]
        if token.kind in ("number", "repeating"):
            return before.kind not in ("number", "repeating", "word")
        if token.kind == "symbol":
            unit = token.space and token.text in units.SINGLE_LETTERS | {"Omega", "mu"}
            if token.upright or before.text == "°" or unit:
                found = self.unit_phrase(self.at, explicit=not token.upright)
                return found is None or found[0] is None or bool(found[1])
            return not self.remainder_follows() and not self.half_of_day_follows()
        if token.kind == "command":
            return token.text in _STARTERS and (token.text != "frac" or self.unit_fraction(self.at) is None)
        if token.kind == "word":
            if token.upright or not token.text.isascii() or len(token.text) > 4 or token.text.casefold() in JOINERS:
                return False
            if self.unit_follows(self.at) or token.text.casefold() in _NO_FACTORS:
                return False
            found = self.unit_phrase(self.at, explicit=False)
            return (
                found is None
                or not token.space
                or not any(self.tokens[place].kind == "word" and place > self.at for place in range(self.at, found[3]))
            )
        if token.kind == "sign":
            if token.text == "(":
                if self.peek(1).text.casefold() in units.NUMBER_WORDS:
                    return False
                return not (
                    self.is_command("mod", offset=1)
                    or self.is_word("mod", "in", "or", "units", "base", offset=1)
                    or self.is_sign("%", "=", offset=1)
                )
            if token.text == "[":
                return (before.kind == "number" or before.text in (")", "]")) and not self.item_end(self.at + 1)
            return token.text == "{" or (token.text == "|" and not self.bars and not self.builder)
        return False

    def half_of_day_follows(self) -> bool:
        start = self.at
        found = self.peek().space and bool(self.half_of_day())
        self.at = start
        return found

    def remainder_follows(self) -> bool:
        return self.is_symbol("R", "r") and self.peek().space and self.peek(1).kind == "number" and self.peek(1).space

    def power(self, base: Any) -> Any:
        self.take()
        if self.is_sign("*"):
            self.at += 1
            if self.item_end(self.at):
                return ("sym", f"{base[1]}*") if isinstance(base, tuple) and base[0] == "sym" else base
        if (
            self.is_symbol("T")
            or self.is_command("top", "intercal", "mathsf")
            or (self.is_sign("{") and self.is_symbol("T", offset=1))
        ) and isinstance(base, Group | Matrix):
            self.argument()
            return _transposed(base)
        exponent = self.exponent()
        if not isinstance(base, tuple) and not isinstance(base, Matrix):
            raise Unreadable("a power of a set")
        if isinstance(base, tuple) and base[0] == "sym" and exponent == ("sym", "'"):
            return ("sym", base[1] + "'")
        return ("^", base, exponent)

    def exponent(self) -> Any:
        """Read an exponent: braces, or a sign and the next number, letter or bracket, which can have an exponent too."""
        if self.is_sign("'"):
            marks = ""
            while self.accept("'"):
                marks += "'"
            return ("sym", marks)
        negative = False
        while self.is_sign("-", "+"):
            negative ^= self.take().text == "-"
        if self.is_sign("{") and self.is_sign("'", offset=1):
            self.braced()
            return ("sym", "'")
        value = self.primary() if not self.is_sign("{") else self.brace_value()
        while self.is_sign("!"):
            value = self.factorial(value)
        if self.is_sign("^") or (self.is_sign("*") and self.is_sign("*", offset=1) and not self.peek(1).space):
            if self.is_sign("*"):
                self.at += 1
            value = self.power(value)
        return ("neg", value) if negative else value

    def brace_value(self) -> Any:
        inner = self.braced()
        if not inner:
            return number(1)
        parser = self.sub(inner)
        value = parser.expression(0)
        if parser.peek().kind != "end":
            raise Unreadable("an argument with more than a formula")
        return value

    def factorial(self, value: Any) -> Any:
        self.take()
        if self.is_sign("!") and not self.peek().space:
            self.take()
            return ("call", "factorial2", value)
        return ("call", "factorial", value)

    def argument(self) -> Any:
        """Read the argument of a command: braces, or one digit, letter or command."""
        if self.is_sign("{"):
            return self.brace_value()
        token = self.peek()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.at] = Token("number", token.text[1:])
            return number(int(token.text[0]))
        if token.kind == "word" and len(token.text) > 1:
            self.tokens[self.at] = Token("symbol" if len(token.text) == 2 else "word", token.text[1:])
            return self.symbol(token.text[0])
        return self.primary()

    def grouped_number(self, text: str) -> str:
        """Return a number with the groups of three digits that follow it behind commas. In brackets, a comma separates items."""
        if self.listed or not re.fullmatch("[1-9][0-9]{0,2}", text):
            return text
        offset, groups = 0, [text]
        while "." not in groups[-1]:
            comma, digits = self.peek(offset), self.peek(offset + 1)
            if comma.text != "," or comma.space or not _GROUP_OF_DIGITS.fullmatch(digits.text) or digits.space:
                break
            groups.append(digits.text)
            offset += 2
        following = self.peek(offset + 1)
        if self.peek(offset).text == "," and following.kind == "number" and not following.space:
            return text
        self.at += offset
        return "".join(groups)

    def literal(self, token: Token) -> Any:
        if token.kind == "repeating":
            return number(_repeating(token.text))
        text = re.sub(r"\{,\}|,?\\!\s?|\\[,;: ]|['_]", "", token.text)
        text = self.grouped_number(text)
        dotted = re.fullmatch(r"\d{1,3}", text) and self.is_sign(".") and self.peek(1).kind == "number"
        if self.is_command("ldots") and "." in text and (period := _period(text)) is not None:
            self.at += 1
            return number(period)
        while (
            not self.listed
            and self.peek().kind == "number"
            and self.peek().space
            and re.fullmatch(r"\d{1,3}", text)
            and _GROUP_OF_DIGITS.fullmatch(self.peek().text)
            and all(t.kind == "number" or t.text == "-" for t in self.tokens)
        ):
            text += self.take().text
        if dotted:
            raise Unreadable("two points")
        value = decimal(text)
        if "." not in text and "e" not in text.casefold() and (fraction := self.proper_fraction()) is not None:
            return ("num", value[1] + fraction, 0, 0)
        return value

    def proper_fraction(self) -> Fraction | None:
        """Read the proper fraction of a mixed number: `\\frac12`, ` 1/2`, ` and 1/2`."""
        start = self.at
        if self.is_word("and") or self.is_sign(","):
            return None
        above = below = None
        if self.is_command("frac"):
            self.at += 1
            above, below = self.simple_argument(), self.simple_argument()
        elif self.peek().space and self.is_sign("/", offset=1):
            texts = self.peek().text, self.peek(2).text
            if texts[0].isdecimal() and texts[1].isdecimal():
                above, below = map(int, texts)
                self.at += 3
        if above and below and above < below:
            return Fraction(above, below)
        self.at = start
        return None

    def simple_argument(self) -> int | None:
        """Return the integer that is the next argument of a command, without a change of the tokens for others."""
        if self.is_sign("{"):
            inner = self.braced()
            return int(inner[0].text) if len(inner) == 1 and inner[0].text.isdecimal() else None
        token = self.peek()
        if token.kind == "number" and token.text.isdigit():
            if len(token.text) == 1:
                self.at += 1
                return int(token.text)
            if len(token.text) == 2 and self.tokens[self.at - 1].text == "frac":
                return None if self.peek(1).kind == "number" else self.split_digits(token)
        return None

    def split_digits(self, token: Token) -> int:
        self.tokens[self.at : self.at + 1] = [Token("number", char) for char in token.text]
        self.at += 1
        return int(token.text[0])

    def symbol(self, name: str, upright: bool = False) -> Formula:
        if name == "e" and not self.is_sign("_"):
            return ("const", "e")
        if name == "i" and "i" not in self.indices and not self.is_sign("_"):
            return ("const", "i")
        return ("sym", name)

    def primary(self) -> Any:
        token = self.take()
        if token.kind in ("number", "repeating"):
            value = self.literal(token)
            if self.is_sign("_"):
                raise Unreadable("a base in a formula")
            return value
        if token.kind == "symbol":
            return self.named_symbol(token)
        if token.kind == "word":
            return self.letters_product(token)
        if token.kind == "command":
            return self.command(token.text)
        if token.kind == "sign":
            return self.bracket(token.text)
        raise Unreadable("the answer ends early")

    def named_symbol(self, token: Token) -> Any:
        name = self.symbol(token.text, token.upright)
        if self.is_sign("_"):
            name = ("sym", token.text + self.subscript())
            if name[1] in ("P", "C"):
                return name
        if token.text in ("f", "g", "h", "F", "G") and self.is_sign("(") and not self.peek().space:
            self.at += 1
            inner, _ = self.bracketed(")")
            return ("call", "apply " + str(name[1]), *inner)
        if token.text == "Gamma" and self.is_sign("("):
            return ("call", "factorial", ("+", self.primary(), number(-1)))
        counts = self.is_sign("(") and self.peek(1).kind == "number" and self.is_sign(",", offset=2)
        if token.text in ("C", "P") and counts:
            self.at += 1
            inner, _ = self.bracketed(")")
            return ("call", "binom" if token.text == "C" else "perm", *inner)
        if token.text.isupper() and self.is_sign("(") and not token.upright and self.is_point():
            return self.primary()
        return name

    def is_point(self) -> bool:
        """Return whether coordinates follow, as in `A(1, 2)`."""
        return any(token.text == "," for token in self.tokens[self.at : self.closing_from("(", ")")])

    def subscript(self) -> str:
        self.take()
        if self.is_sign("{"):
            return "_" + "".join(token.text for token in self.braced() if token.text not in ("{", "}", ","))
        if self.peek().kind in ("number", "symbol", "word", "command"):
            return "_" + self.take().text
        raise Unreadable("a subscript")

    def letters_product(self, token: Token) -> Any:
        """Read `xy` in a formula as a product."""
        if not token.text.isascii() or token.upright or len(token.text) > 5:
            raise Unreadable("words in a formula")
        if self.unit_follows(self.at - 1) or (self.peek().kind == "number" and self.peek().space):
            raise Unreadable("a word beside a number")
        first, last = token.text[:-1], token.text[-1]
        self.at -= 1
        self.tokens[self.at] = Token("symbol", last)
        factors = [self.symbol(char) for char in first]
        value = self.expression(10)
        for factor in reversed(factors):
            value = ("*", factor, value)
        return value


def _transposed(value: Group | Matrix) -> Matrix:
    if isinstance(value, Group):
        return Matrix(tuple((item,) for item in value.items))
    return Matrix(tuple(zip(*value.rows, strict=True)))


def decimal(text: str) -> Formula:
    """Return the number of digits with an optional point and exponent."""
    mantissa, _, exponent_text = text.casefold().partition("e")
    exponent = int(exponent_text or 0)
    if abs(exponent) > 4_000 or len(mantissa) > 2_000:
        raise Unreadable("too large")
    whole, _, part = mantissa.partition(".")
    value = Fraction(int((whole + part) or "0")) * Fraction(10) ** (exponent - len(part))
    significant = len((whole + part).lstrip("0")) if part else 0
    return ("num", value, max(0, len(part) - exponent) if part else 0, significant)


def _repeating(text: str) -> Fraction:
    match = re.fullmatch(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))", text)
    if match is None or len(text) > 300:
        raise Unreadable("a repeating decimal")
    return _periodic(match[1], match[2], match[3] or match[4])


def _periodic(whole: str, fixed: str, period: str) -> Fraction:
    scale = 10 ** len(fixed)
    return int(whole or 0) + Fraction(int(fixed or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))


def _period(text: str) -> Fraction | None:
    """Return the value of `0.333...`: the digits at the end repeat at least three times, or twice if they are several."""
    whole, _, digits = text.partition(".")
    if match := re.fullmatch(r"(\d*?)(\d{1,6}?)\2{2,}", digits) or re.fullmatch(r"(\d*?)(\d{2,6})\2", digits):
        return _periodic(whole, match[1], match[2])
    return None
