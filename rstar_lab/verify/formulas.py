"""Reads formulas and brackets: a Pratt parser of numbers, letters, operators, functions, groups and sets.

A number beside a bracket is a factor; a proper fraction behind an integer makes a mixed number; brackets make a list before
commas group digits.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rstar_lab.verify import beside, units
from rstar_lab.verify.environments import environment
from rstar_lab.verify.tokens import Cursor, Token, Unreadable
from rstar_lab.verify.values import (
    DIGIT_GROUP,
    Builder,
    Formula,
    Group,
    Matrix,
    Nothing,
    Relation,
    checked,
    decimal,
    determinant,
    difference,
    number,
    operands,
    plus_minus,
    product,
    proper,
    repeating,
)

MAX_DEPTH = 40
SUM, SIGNED, PRODUCT, ARGUMENT, POWER = 5, 9, 10, 12, 15  # how strongly operators bind

# Operators: how strongly they bind to the left and to the right, and the formula of both sides.
_INFIX: dict[str, tuple[int, int, Callable[[Any, Any], Formula]]] = {
    "over": (1, 0, lambda left, right: ("/", left, right)),
    "choose": (1, 0, lambda left, right: ("call", "binom", left, right)),
    "pm": (SUM, SUM, lambda left, right: ("pm", left, right)),
    "mp": (SUM, SUM, lambda left, right: ("mp", left, right)),
    "+": (SUM, SUM, lambda left, right: ("+", left, right)),
    "-": (SUM, SUM, difference),
    "*": (PRODUCT, PRODUCT, lambda left, right: ("*", left, right)),
    "cross": (PRODUCT, PRODUCT, lambda left, right: ("call", "apply cross", left, right)),
    "/": (PRODUCT, PRODUCT, lambda left, right: ("/", left, right)),
}
_NAMES = {name: frozenset(text.split()) for name, text in units.TABLES["names"].items() if isinstance(text, str)}
FUNCTIONS = _NAMES["functions"]
JOINERS: dict[str, str] = units.TABLES["names"]["joiners"]
_STARTERS = FUNCTIONS | _NAMES["starters"]
_ACCENTS = ("overline", "dot", "ddot", "tilde", "widetilde", "angle", "triangle", "mathring")
_COUNTS = {"C": "binom", "P": "perm"}
_OF_TWO = {"frac": ("/",), "binom": ("call", "binom")}
_FIXED = {"pi": ("const", "pi"), "infty": ("const", "inf"), "emptyset": Nothing()}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}


class Parser(Cursor):
    """Reads a formula. Items of lists and cells of matrices are read by functions of their own.

    read_item: reads the next item of a list. read_all: reads all tokens of a parser as one value.
    """

    def __init__(
        self, tokens: Sequence[Token], read_item: Callable[["Parser"], Any], read_all: Callable[["Parser"], Any]
    ):
        super().__init__(tokens)
        self.read_item, self.read_all = read_item, read_all
        self.depth = 0  # nesting of brackets and sub-parsers
        self.listed = 0  # brackets around: commas inside separate items
        self.bars = 0  # absolute values around
        self.builder = 0  # sets around: `|` and `:` separate element and condition
        self.indices: frozenset[str] = frozenset()  # names of summation around: `i` is no imaginary unit

    def sub(self, tokens: Sequence[Token]) -> "Parser":
        """Return a parser of tokens that are inside of what this parser reads."""
        parser = Parser(tokens, self.read_item, self.read_all)
        parser.depth, parser.indices = self.depth, self.indices
        parser.deeper()
        return parser

    def part(self, tokens: Sequence[Token]) -> Any:
        """Return the formula that tokens are."""
        parser = self.sub(tokens)
        value = parser.expression(0)
        if not parser.at_end():
            raise Unreadable("an argument with more than a formula")
        return value

    def all_of(self, tokens: Sequence[Token]) -> Any:
        """Return the value that tokens are: a formula, a list, a relation, words."""
        return self.read_all(self.sub(tokens))

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    # --- operators

    def expression(self, power: int) -> Any:
        """Read a formula whose operators bind stronger than `power`."""
        self.deeper()
        if (self.is_sign("-", "+") or self.is_word("minus", "negative")) and power <= ARGUMENT:
            negative = self.take().text != "+"
            left = self.expression(SIGNED)
            if negative and not isinstance(left, tuple | Matrix):
                raise Unreadable("a negative set")
            left = checked(("neg", left)) if negative else left
        elif self.is_command("pm", "mp"):
            left = (self.take().text, number(0), self.expression(SIGNED))
        else:
            left = self.primary()
        while (found := self.operation(left, power)) is not None:
            left = checked(found)
        self.depth -= 1
        return left

    def operation(self, left: Any, power: int) -> Any:
        """Read the operator behind a formula and what follows it. Return None if none binds stronger than `power`."""
        token = self.peek()
        sign = token.text if token.kind in ("sign", "command") else ""
        if sign == "^" and power < POWER:
            return self.power(left)
        if sign == "!":
            return self.factorial(left)
        if sign == "°":
            self.at += 1
            if self.peek().kind == "number":
                raise Unreadable("minutes of arc")
            return ("deg", left)
        if sign == "'" and isinstance(left, tuple) and left[0] == "sym":
            self.at += 1
            return ("sym", left[1] + "'")
        power_of_ten = self.peek(1).text == "10" and self.is_sign("^", offset=2)
        if token.text in ("x", "X") and power_of_ten and self.tokens[self.at - 1].kind == "number":
            sign = "*"
        if sign not in _INFIX:
            return ("*", left, self.expression(PRODUCT)) if power < PRODUCT and self.starts_factor() else None
        binding, right, formula = _INFIX[sign]
        if power >= binding or (sign == "/" and beside.unit_follows(self, self.at)):
            return None
        self.at += 1
        return formula(left, self.expression(right))

    def starts_factor(self) -> bool:
        """Return whether a factor starts here, without a sign for the product."""
        token, before = self.peek(), self.tokens[self.at - 1]
        if token.kind in ("number", "repeating"):
            return before.kind not in ("number", "repeating", "word")
        if token.kind == "symbol":
            letter = token.space and token.text in units.SINGLE_LETTERS and not self.builder
            if token.upright or before.text == "°" or letter:
                found = beside.phrase(self, self.at, explicit=not token.upright)
                return found is None or found.unit is None or bool(found.noun)
            remainder = token.text in ("R", "r") and self.peek(1).kind == "number" and self.peek(1).space
            return not (token.space and remainder)
        if token.kind == "command":
            return token.text in _STARTERS and not (token.text == "frac" and beside.unit_follows(self, self.at))
        if token.kind == "word":
            if token.upright or not token.text.isascii() or len(token.text) > 4:
                return False
            if token.text.casefold() in _NAMES["no_factors"]:
                return False
            found = beside.phrase(self, self.at, explicit=False)
            if found is None:
                return True
            several = any(other.kind == "word" for other in self.tokens[self.at + 1 : found.end])
            return found.unit is None and not found.counted and not (token.space and several)
        if token.text == "(":
            following = self.peek(1)
            remark = following.kind in ("word", "command") and following.text in ("mod", "in", "or", "units", "base")
            number_word = following.text.casefold() in units.NUMBER_WORDS
            return not (remark or number_word or following.text in ("%", "="))
        if token.text == "[":
            return (before.kind == "number" or before.text in (")", "]")) and not self.item_end(self.at + 1)
        return token.text == "{" or (token.text == "|" and not self.bars and not self.builder)

    def power(self, base: Any) -> Any:
        self.take()
        if isinstance(base, Group | Matrix):
            transposed = self.is_symbol("T") or self.is_command("top", "intercal", "mathsf")
            if transposed or (self.is_sign("{") and self.is_symbol("T", offset=1)):
                self.argument()
                rows = base.rows if isinstance(base, Matrix) else (base.items,)
                return Matrix(tuple(zip(*rows, strict=True)))
        exponent = self.exponent()
        if not isinstance(base, tuple | Matrix):
            raise Unreadable("a power of a set")
        return ("^", base, exponent)

    def exponent(self) -> Any:
        """Read an exponent: braces, or a sign and the next number, letter or bracket, which can have an exponent too."""
        negative = False
        while self.is_sign("-", "+"):
            negative ^= self.take().text == "-"
        value = self.argument() if self.is_sign("{") else self.primary()
        while self.is_sign("!"):
            value = self.factorial(value)
        if self.is_sign("^"):
            value = self.power(value)
        return ("neg", value) if negative else value

    def factorial(self, value: Any) -> Any:
        self.take()
        if self.is_sign("!") and not self.peek().space:
            self.take()
            return ("call", "factorial2", value)
        return ("call", "factorial", value)

    # --- numbers and letters

    def primary(self) -> Any:
        token = self.take()
        if token.kind in ("number", "repeating"):
            return self.literal(token)
        if token.kind in ("symbol", "word"):
            return checked(self.symbol(token) if token.kind == "symbol" else self.letters(token))
        return checked(self.command(token.text) if token.kind == "command" else self.bracket(token.text))

    def argument(self) -> Any:
        """Read the argument of a command: braces, or one digit, letter or command."""
        token = self.peek()
        first, rest = token.text[:1], token.text[1:]
        if token.text == "{" and self.is_sign("}", offset=1):
            raise Unreadable("an empty argument")
        if token.kind == "number" and rest and token.text.isdigit():
            self.tokens[self.at] = Token("number", rest)
            return number(int(first))
        if token.kind == "word" and rest:
            self.tokens[self.at] = Token("symbol" if len(rest) == 1 else "word", rest)
            return self.letter(first)
        return self.primary()

    def literal(self, token: Token) -> Any:
        """Read a number with its groups of digits behind commas or spaces and the proper fraction behind it."""
        text = re.sub(r"\{,\}|,?\\!\s?|\\[,;: ]|['_]", "", token.text)
        if not self.listed and re.fullmatch(r"\d{1,3}", text):
            text = self.digit_groups(text)
        if (token.kind == "repeating" or self.is_command("ldots")) and (periodic := repeating(text)) is not None:
            self.accept("ldots")
            return number(periodic)
        value = decimal(text)
        if text.isdigit() and (fraction := self.proper_fraction()) is not None:
            return number(value[1] + fraction)
        return value

    def digit_groups(self, text: str) -> str:
        """Return a number with the groups of three digits that follow it. In brackets, a comma separates items."""
        offset, groups = 0, [text]
        while "." not in groups[-1] and not text.startswith("0"):
            comma, digits = self.peek(offset), self.peek(offset + 1)
            if comma.text != "," or comma.space or digits.space or not DIGIT_GROUP.fullmatch(digits.text):
                break
            groups.append(digits.text)
            offset += 2
        following = self.peek(offset + 1)
        if self.peek(offset).text == "," and following.kind == "number" and not following.space:
            return text
        self.at += offset
        return "".join(groups)

    def proper_fraction(self) -> Fraction | None:
        """Read the proper fraction of a mixed number: `\\frac12`, ` 1/2`."""
        start, saved = self.at, self.tokens[self.at : self.at + 3]
        found: Any = None
        if self.is_command("frac") and "number" in (self.peek(1).kind, self.peek(2).kind):
            found = self.primary()
        elif self.peek().space and self.is_sign("/", offset=1) and (self.peek().text + self.peek(2).text).isdecimal():
            above, _, below = self.take(), self.take(), self.take()
            found = ("/", decimal(above.text), decimal(below.text))
        if found and (value := proper(found)) is not None:
            return value
        self.at, self.tokens[start : start + 3] = start, saved
        return None

    def letter(self, name: str) -> Formula:
        constant = name == "e" or (name == "i" and "i" not in self.indices)
        return ("const", name) if constant and not self.is_sign("_") else ("sym", name)

    def symbol(self, token: Token) -> Any:
        name = self.letter(token.text)
        if self.is_sign("_"):
            name = ("sym", token.text + self.subscript())
        if not self.is_sign("("):
            return name
        if token.text in ("f", "g", "h", "F", "G") and not self.peek().space:
            return ("call", "apply " + str(name[1]), *self.items_in("("))
        if token.text == "Gamma":
            return ("call", "factorial", ("+", self.primary(), number(-1)))
        several, few = self.peek(1).text, self.peek(3).text
        numbers = self.is_sign(",", offset=2) and self.is_sign(")", offset=4) and (several + few).isdecimal()
        if token.text in _COUNTS and numbers and int(several) >= int(few):
            return ("call", _COUNTS[token.text], *self.items_in("("))
        if token.text.isupper() and not token.upright:
            inner = self.tokens[self.at : self.closing("(", ")")]
            if any(part.text == "," for part in inner):
                return Relation((name, self.primary()), ("=",), (token.text, ""))  # a point with its name: `A(1, 2)`
        return name

    def subscript(self) -> str:
        self.take()
        if self.is_sign("{"):
            return "_" + "".join(token.text for token in self.enclosed("{", "}") if token.text not in ("{", "}", ","))
        if self.peek().kind in ("number", "symbol", "word", "command"):
            return "_" + self.take().text
        raise Unreadable("a subscript")

    def letters(self, token: Token) -> Any:
        """Read `xy` in a formula as a product."""
        if not token.text.isascii() or token.upright or len(token.text) > 5:
            raise Unreadable("words in a formula")
        if beside.unit_follows(self, self.at - 1) or (self.peek().kind == "number" and self.peek().space):
            raise Unreadable("a word beside a number")
        self.at -= 1
        self.tokens[self.at] = Token("symbol", token.text[-1])
        return ("*", product(token.text[:-1]), self.expression(PRODUCT))

    # --- commands

    def command(self, name: str) -> Any:
        if name in _OF_TWO:
            return (*_OF_TWO[name], self.argument(), self.argument())
        if name in _FIXED:
            return _FIXED[name]
        if name == "sqrt":
            degree = self.part(self.enclosed("[", "]")) if self.is_sign("[") else number(2)
            value = self.literal(self.take()) if self.peek().kind == "number" else self.argument()
            return ("call", "root", value, degree)
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("sum", "prod", "lim", "int"):
            return self.bounded(name)
        if name in ("lfloor", "lceil"):
            value = self.expression(0)
            self.expect("r" + name[1:])
            return ("call", name[1:], value)
        if name == "langle":
            items, _ = self.nested_items(lambda: self.is_command("rangle"))
            self.expect("rangle")
            return Group("(", tuple(items), ")")
        if name.startswith("begin:") or name == "pmatrix":
            return environment(self, name.removeprefix("begin:"), self.all_of)
        if name in _ACCENTS:
            return ("sym", f"{name} {self.marked_letters()}")
        raise Unreadable(f"the command {name}")

    def marked_letters(self) -> str:
        """Read the letters behind `\\angle` or an accent."""
        if self.is_sign("{"):
            return "".join(token.text for token in self.enclosed("{", "}"))
        found = self.take()
        if found.kind not in ("symbol", "word"):
            raise Unreadable("an accent without a letter")
        return found.text

    def function(self, name: str) -> Any:
        exponent = base = None
        while self.is_sign("^", "_"):
            if self.take().text == "^":
                exponent = self.exponent()
            elif self.peek().kind == "number" and (name != "log" or self.peek().text.startswith("1")):
                base = self.literal(self.take())
            else:
                base = self.argument()
        if base is not None and name not in ("log", "ln"):
            raise Unreadable("a function with a base")
        if name in ("gcd", "lcm", "max", "min") and self.is_sign(*_CLOSING):
            return ("call", name, *self.items_in(self.peek().text))
        if exponent == ("neg", number(1)) and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        value = self.function_argument()
        if name == "cis":
            return ("^", ("const", "e"), ("*", ("const", "i"), value))
        if isinstance(value, Matrix) and name == "det":
            return determinant(value)
        found = ("call", name, value) if base is None else ("call", name, value, base)
        return found if exponent is None else ("^", found, exponent)

    def function_argument(self) -> Any:
        if self.is_sign("(", "["):
            return self.part(self.enclosed(self.peek().text, _CLOSING[self.peek().text]))
        value = ("neg", self.expression(ARGUMENT)) if self.accept("-") else self.expression(ARGUMENT)
        while self.starts_factor() and not self.is_command(*FUNCTIONS) and not self.is_sign("(", "|", "["):
            value = ("*", value, self.expression(ARGUMENT))
        before = self.tokens[self.at - 1].kind
        if self.is_sign("/") and self.peek(1).kind == "number" and before in ("symbol", "number", "command"):
            self.at += 1
            value = ("/", value, self.literal(self.take()))
        return value

    def bounded(self, name: str) -> Any:
        """Read a sum, a product, a limit or an integral."""
        low = high = None
        variable = ""
        while self.is_sign("_", "^"):
            if self.take().text == "^":
                high = self.argument()
            elif name == "int":
                low = self.argument()
            else:
                inner = self.sub(self.enclosed("{", "}"))
                variable = inner.take().text
                if not (inner.accept("=") or inner.accept("to")):
                    raise Unreadable("a bound")
                low = inner.expression(0)
        outer, self.indices = self.indices, self.indices | {variable}
        body = self.expression(SUM)
        self.indices = outer
        if name == "lim":
            return ("lim", body, variable, low)
        if name != "int":
            return (name, variable, low, high, body)
        *factors, differential, last = ["", "", *operands(body, "*")]
        if differential != ("sym", "d") or last[0] != "sym":
            raise Unreadable("an integral without a differential")
        body = number(1)
        for factor in factors[2:]:
            body = ("*", body, factor)
        return ("int", body, last[1], low, high)

    # --- brackets

    def items(self, ended: Callable[[], bool]) -> tuple[list[Any], str]:
        """Return the values up to the end of a list, and what joins them."""
        values, joined = [], ","
        while True:
            values.append(self.read_item(self))
            more = False
            while not ended():
                token = self.peek()
                if token.kind in ("word", "command", "sign") and token.text.casefold() in JOINERS:
                    joined = JOINERS[token.text.casefold()]
                elif self.is_command("cup") and not self.listed:
                    joined = "or"
                elif not self.is_sign(",", ";", "\\\\"):
                    break
                more = True
                self.at += 1
            if not more or ended():
                return values, joined

    def nested_items(self, ended: Callable[[], bool], builder: int = 0) -> tuple[list[Any], str]:
        """Return `items` up to the end of a bracket: commas separate items there. builder: 1 for the element of a set."""
        self.deeper()
        around = self.listed, self.bars, self.builder
        self.listed, self.bars, self.builder = self.listed + 1, 0, builder
        found = self.items(ended)
        self.listed, self.bars, self.builder = around
        self.depth -= 1
        return found

    def items_in(self, opening: str) -> list[Any]:
        """Return the items in the bracket that opens here, and move behind it."""
        self.at += 1
        values, _ = self.nested_items(lambda: self.is_sign(_CLOSING[opening]))
        self.expect(_CLOSING[opening])
        return values

    def bracket(self, opening: str) -> Any:
        if opening == "{":
            self.at -= 1
            inner = self.enclosed("{", "}")
            return self.part(inner) if inner else self.primary()
        if opening in ("^", "_"):
            return self.raised()
        if opening == "|":
            self.bars += 1
            value = self.expression(0)
            self.bars -= 1
            self.expect("|")
            return determinant(value) if isinstance(value, Matrix) else ("call", "abs", value)
        if opening == r"\{":
            return self.set_group()
        if opening not in ("(", "[", "]"):
            raise Unreadable(f"unexpected {opening}")
        values, _ = self.nested_items(self.closes)
        closing = self.take().text if self.closes() else ""
        if not closing or (closing == "[" and opening == "("):
            raise Unreadable("an open bracket")
        if (
            len(values) == 1
            and closing == _CLOSING.get(opening)
            and not (opening == "[" and isinstance(values[0], Group))
        ):
            return values[0]
        lists = [value.items if isinstance(value, Group) and value.opening == "[" else () for value in values]
        if opening == "[" and len(values) > 1 and all(lists) and len(set(map(len, lists))) == 1:
            return Matrix(tuple(lists))
        return Group({"]": "("}.get(opening, opening), tuple(values), {"[": ")"}.get(closing, closing))

    def closes(self) -> bool:
        """Return whether a bracket ends here; `[1, 3[` ends with an opening one."""
        return self.is_sign(")", "]") or (self.is_sign("[") and self.item_end(self.at + 1))

    def raised(self) -> Any:
        """Read `^5C_2` and `^1/_2`, whose first sign has been read."""
        first = self.argument()
        if self.accept("/"):
            self.expect("_")
            return ("/", first, self.argument())
        letter = self.take()
        if letter.text not in _COUNTS or not self.accept("_"):
            raise Unreadable("an exponent without a base")
        return ("call", _COUNTS[letter.text], first, self.argument())

    def set_group(self) -> Any:
        if self.is_command("begin:array", "begin:cases", "begin:matrix"):
            return environment(self, self.take().text.removeprefix("begin:"), self.all_of, cases=True)
        if self.accept(r"\}"):
            return Nothing()
        values, _ = self.nested_items(lambda: self.is_sign(r"\}", "|", ":"), builder=1)
        if self.accept(r"\}"):
            return Group("{", tuple(sign for value in values for sign in plus_minus(value)), "}")
        self.at += 1
        conditions, joined = self.nested_items(lambda: self.is_sign(r"\}"))
        self.expect(r"\}")
        if len(values) != 1:
            raise Unreadable("several elements")
        return Builder(values[0], (Group("", tuple(conditions), "", "or"),) if joined == "or" else tuple(conditions))
