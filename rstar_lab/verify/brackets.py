"""Reads commands and brackets: functions, roots, sums, groups, sets, absolute values, matrices, cases."""

import re
from collections.abc import Sequence
from typing import Any

from rstar_lab.verify.formulas import FUNCTIONS, FormulaParser
from rstar_lab.verify.tokens import Token, Unreadable
from rstar_lab.verify.values import Builder, Cases, Group, Matrix, Nothing, number

_CONDITIONS = ("if", "when", "for", "where")
_ORDERS = frozenset(("<", ">", "leq", "geq", "if", "neq"))


class BracketParser(FormulaParser):
    """Reads what starts with a command or a bracket."""

    def command(self, name: str) -> Any:
        if name == "frac":
            return self.fraction()
        if name == "pi":
            return ("const", "pi") if not self.is_sign("_") else ("sym", "pi" + self.subscript())
        if name == "infty":
            return ("const", "inf")
        if name == "emptyset":
            return Nothing()
        if name == "sqrt":
            return self.root()
        if name == "binom":
            return ("call", "binom", self.argument(), self.argument())
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("sum", "prod", "lim", "int"):
            return self.bounded(name)
        if name in ("lfloor", "lceil"):
            value = self.expression(0)
            if not self.is_command("rfloor" if name == "lfloor" else "rceil"):
                raise Unreadable("an open floor")
            self.at += 1
            return ("call", name[1:], value)
        if name == "langle":
            return self.angle_group()
        if name.startswith("begin:") or name == "pmatrix":
            return self.environment(name.removeprefix("begin:"), name == "pmatrix")
        if name in ("overline", "dot", "ddot", "tilde", "widetilde", "angle", "triangle", "mathring"):
            tokens = self.braced() if self.is_sign("{") else self.marked()
            return ("sym", name + " " + "".join(token.text for token in tokens))
        raise Unreadable(f"the command {name}")

    def marked(self) -> list[Token]:
        """Return the letters behind `\\angle` or an accent."""
        token = self.take()
        if token.kind not in ("symbol", "word"):
            raise Unreadable("an accent without a letter")
        found = [token]
        while (
            self.tokens[self.at - 2].text in ("angle", "triangle")
            and self.peek().kind in ("symbol", "word")
            and self.peek().text.isupper()
        ):
            found.append(self.take())
        return found

    def angle_group(self) -> Group:
        self.listed += 1
        values, _ = self.items(lambda: self.is_command("rangle"))
        self.listed -= 1
        if not self.is_command("rangle"):
            raise Unreadable("an open bracket")
        self.at += 1
        return Group("(", tuple(values), ")")

    def fraction(self) -> Any:
        texts = [token.text for token in self.tokens[self.at : self.at + 2]]
        if texts[:1] == ["{"] and re.fullmatch("d[A-Za-z]?", texts[1] if len(texts) > 1 else ""):
            start = self.at
            above, below = ("".join(token.text for token in self.braced()) for _ in range(2))
            if re.fullmatch(r"d\w+", above) and re.fullmatch(r"d\w", below):
                return ("sym", f"{above}/{below}")
            self.at = start
        above = self.argument()
        return ("/", above, self.argument())

    def root(self) -> Any:
        degree: Any = number(2)
        if self.accept("["):
            end = self.closing("[", "]")
            degree = self.sub(self.tokens[self.at : end]).expression(0)
            self.at = end + 1
        if self.is_sign("("):
            value = self.primary()
        elif self.peek().kind == "number":
            value = self.literal(self.take())
        else:
            value = self.argument()
        return ("call", "root", value, degree)

    def function(self, name: str) -> Any:
        exponent = base = None
        while self.is_sign("^", "_"):
            if self.take().text == "^":
                exponent = self.exponent()
            elif self.peek().kind == "number" and name == "log" and not self.peek().text.startswith("1"):
                base = self.argument()
            elif self.peek().kind == "number":
                base = self.literal(self.take())
            else:
                base = self.argument()
        if name in ("gcd", "lcm", "max", "min") and self.is_sign("(", r"\{", "{"):
            opening = self.take().text
            inner, _ = self.bracketed({"(": ")", r"\{": r"\}", "{": "}"}[opening])
            return ("call", name, *inner)
        if name == "det" and not self.is_sign("("):
            return ("call", "det", self.primary())
        if exponent == ("neg", number(1)) and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        value = self.function_argument()
        if name == "cis":
            return ("^", ("const", "e"), ("*", ("const", "i"), value))
        found: Any = ("call", name, value) if base is None else ("call", name, value, base)
        if name == "exp":
            found = ("^", ("const", "e"), value)
        return found if exponent is None else ("^", found, exponent)

    def function_argument(self) -> Any:
        if self.is_sign("(", "["):
            opening = self.take().text
            inner, _ = self.bracketed(")" if opening == "(" else "]")
            if len(inner) != 1 or not isinstance(inner[0], tuple | Matrix):
                raise Unreadable("an argument of a function")
            return inner[0]
        if self.is_sign("{"):
            value = self.brace_value()
        else:
            value = self.expression(12) if not self.is_sign("-") else ("neg", (self.take(), self.expression(12))[1])
        while self.is_sign("^"):
            value = self.power(value)
        while self.starts_factor() and not self.is_command(*FUNCTIONS) and not self.is_sign("(", "|", "["):
            value = ("*", value, self.expression(12))
            while self.is_sign("^"):
                value = self.power(value)
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
                inner = self.sub(self.braced())
                variable = inner.take().text
                if not (inner.accept("=") or (inner.is_command("to") and inner.take())):
                    raise Unreadable("a bound")
                low = inner.expression(0)
        self.indices = [*self.indices, variable]
        body = self.expression(5)
        self.indices = self.indices[:-1]
        if name == "lim":
            return ("lim", body, variable, low)
        if name != "int":
            return (name, variable, low, high, body)
        body, variable = _differential(body)
        return ("int", body, variable, low, high)

    def bracketed(self, closing: str) -> tuple[list[Any], str]:
        """Return the items up to a closing bracket, and move behind it."""
        self.deeper()
        self.listed += 1
        values: list[Any] = []
        bars, self.bars = self.bars, 0
        joined = ","
        if not self.is_sign(closing):
            values, joined = self.items(lambda: self.is_sign(closing))
        self.bars = bars
        self.listed -= 1
        self.depth -= 1
        self.expect(closing)
        return values, joined

    def bracket(self, opening: str) -> Any:
        if opening == "{":
            if self.accept("}"):
                return self.primary()
            self.at -= 1
            return self.brace_value()
        if opening in ("^", "_"):
            return self.raised()
        if opening == "|":
            return self.absolute()
        if opening == r"\{":
            return self.set_group()
        if opening not in ("(", "[", "]"):
            raise Unreadable(f"unexpected {opening}")
        self.deeper()
        self.listed += 1
        builder, self.builder = self.builder, 0
        bars, self.bars = self.bars, 0
        values, _ = self.items(self.closes)
        self.bars, self.builder = bars, builder
        self.listed -= 1
        self.depth -= 1
        closing = self.take().text if self.closes() else ""
        if not closing or (closing == "[" and opening == "("):
            raise Unreadable("an open bracket")
        if len(values) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
            value = values[0]
            if opening == "(" or not isinstance(value, Group):
                return value
        opening, closing = {"]": "("}.get(opening, opening), {"[": ")"}.get(closing, closing)
        return Group(opening, tuple(values), closing)

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
        if letter.text not in ("C", "P") or not self.accept("_"):
            raise Unreadable("an exponent without a base")
        return ("call", "binom" if letter.text == "C" else "perm", first, self.argument())

    def absolute(self) -> Any:
        self.bars += 1
        self.deeper()
        value = self.expression(0)
        self.depth -= 1
        self.bars -= 1
        self.expect("|")
        return ("call", "det" if isinstance(value, Matrix) else "abs", value)

    def set_group(self) -> Any:
        if self.is_command("begin:array", "begin:cases", "begin:matrix"):
            if any(token.text == r"\}" for token in self.tokens[self.at :]):
                raise Unreadable("a set of rows")
            return self.environment("cases", False)
        if self.accept(r"\}"):
            return Nothing()
        self.deeper()
        self.listed += 1
        self.builder += 1
        element = self.item()
        if self.is_sign("|", ":"):
            self.at += 1
            self.builder -= 1
            conditions, joined = self.items(lambda: self.is_sign(r"\}"))
            self.listed -= 1
            self.depth -= 1
            self.expect(r"\}")
            if joined == "or":
                conditions = [Group("", tuple(conditions), "", "or")]
            return Builder(element, tuple(conditions))
        self.builder -= 1
        values = [element]
        while self.is_sign(",", ";"):
            self.at += 1
            values.append(self.item())
        self.listed -= 1
        self.depth -= 1
        self.expect(r"\}")
        return Group("{", tuple(values), "}")

    def environment(self, name: str, braces: bool) -> Any:
        """Read the rows of a matrix, a determinant, cases or a system of equations."""
        rows = self.rows(name, braces)
        if name in ("cases", "rcases") or self.at_cases(rows, name):
            return self.cases(rows)
        matrix = Matrix(tuple(tuple(self.sub(cell).whole() if cell else ("sym", "") for cell in row) for row in rows))
        return ("call", "det", matrix) if name in ("vmatrix", "Vmatrix") else matrix

    @staticmethod
    def at_cases(rows: Sequence[Sequence[Sequence[Token]]], name: str) -> bool:
        signs = {"=", "<", ">", "leq", "geq", "neq"}
        return name == "array" and any(
            token.text in signs or token.text.casefold() in ("if", "otherwise")
            for row in rows
            for cell in row
            for token in cell
        )

    def rows(self, name: str, braces: bool) -> list[list[list[Token]]]:
        """Return the cells of each row of an environment, and move behind it."""
        if braces:
            tokens = self.braced()
        else:
            if self.is_command("begin:" + name, "begin:array", "begin:cases", "begin:matrix"):
                name = self.take().text.removeprefix("begin:")
            level, start = 1, self.at
            while level:
                token = self.take()
                if token.kind == "end":
                    raise Unreadable("an open environment")
                level += _levels(token)
            tokens = self.tokens[start : self.at - 1]
        texts = [token.text for token in tokens]
        if name == "array" and texts[:1] == ["{"] and "}" in texts:
            tokens = tokens[texts.index("}") + 1 :]
        if "".join(token.text for token in tokens[:3]) in ("[r]", "[l]", "[c]"):
            tokens = tokens[3:]
        rows: list[list[list[Token]]] = [[[]]]
        level = 0
        for token in tokens:
            level += _levels(token)
            if level == 0 and token.text == "\\\\":
                rows.append([[]])
            elif level == 0 and token.text == "&":
                rows[-1].append([])
            else:
                rows[-1][-1].append(token)
        return [row for row in rows if any(row)]

    def cases(self, rows: Sequence[Sequence[Sequence[Token]]]) -> Any:
        pairs, statements = [], []
        for row in rows:
            tokens = [token for cell in row for token in cell]
            words = [token.text.casefold() for token in tokens]
            if len(row) == 1:
                place = next((i for i, word in enumerate(words) if word in (*_CONDITIONS, "otherwise")), len(tokens))
            elif any(token.text == "=" for token in row[0]) and not _ORDERS.intersection(words[len(row[0]) :]):
                place = len(tokens)
            else:
                place = len(row[0])
            value = tokens[:place]
            condition = [t for t in tokens[place:] if t.text.casefold() not in _CONDITIONS and t.text != "&"]
            while value and value[-1].text in (",", ";", "."):
                value.pop()
            while condition and condition[-1].text in (",", ";", "."):
                condition.pop()
            while condition and condition[0].text in (",", ";"):
                condition.pop(0)
            parsed = self.sub(value).whole()
            if condition:
                pairs.append((parsed, self.sub(condition).whole()))
            else:
                statements.append(parsed)
        if pairs and statements:
            raise Unreadable("cases without a condition")
        if self.is_sign(r"\}"):
            self.at += 1
        return Cases(tuple(pairs)) if pairs else Group("", tuple(statements), "")


def _levels(token: Token) -> int:
    """Return by how much a token nests environments deeper."""
    return token.text.startswith("begin:") - token.text.startswith("end:")


def _differential(product: Any) -> tuple[Any, str]:
    """Return (integrand, name) of a product that ends in `dx`."""
    factors = _factors(product)
    if len(factors) >= 2 and factors[-2] == ("sym", "d") and factors[-1][0] == "sym":
        body: Any = number(1)
        for factor in factors[:-2]:
            body = ("*", body, factor)
        return body, factors[-1][1]
    raise Unreadable("an integral without a differential")


def _factors(node: Any) -> list[Any]:
    return [*_factors(node[1]), *_factors(node[2])] if isinstance(node, tuple) and node[0] == "*" else [node]
