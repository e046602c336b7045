r"""Compare two formulas with sympy. Runs in the worker processes only: parsing and evaluation can hang.

Formulas are parsed by math-verify's LaTeX parser. Numbers stay exact; `i` is the imaginary unit unless it is an index.
Two formulas are equal if their values agree to 40 digits at several points, or if sympy simplifies their difference to 0.
"""

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from sympy.core.function import AppliedUndef

from rstar_lab.verify.exact import Value, plain_value, rounds_to

Decimals = tuple[Value | None, Value | None]  # of two formulas, those that are plain numbers

DIGITS = 50
MAX_DIGITS, MAX_DEGREE, MAX_FACTORIAL = 100_000, 1_000, 10_000
MAX_SOLVED = 60  # operations of an equation that is solved
AGREEMENT = sympy.Float(10) ** -35
# Rational points at which formulas are evaluated, of both signs and without a pattern. Small ones, because a high power of a
# large number hides a summand; integers for formulas with steps, such as floor.
POINTS = tuple(
    sympy.Rational(p, q) for p, q in ((7, 5), (3, 23), (-11, 7), (29, 17), (-5, 13), (8, 19), (17, 61), (-37, 31))
)
STEPS = tuple(sympy.Integer(n) for n in (7, 13, 29, -18, 58, 101, 3, -46))
_NORMALISATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=True, boxed="none")
_INDEX = re.compile(r"_\{?i(?![a-z])|\\(?:vec|hat|mathbf|text)\s*\{\s*i\s*\}|\\sum|\\prod|\\bigcup")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?")
_LG = re.compile(r"\\lg(?![a-z])")
# Names that the parser takes for a constant or a function: the number e, the imaginary unit, the gamma function.
_NAMES = re.compile(
    r"\\text\{[^{}]*\}|(\\[gG]amma)(?![A-Za-z])(?!\s*\()(?:_\{(\w+)\})?|\\[A-Za-z]+|([eE])_\{(\w+)\}|(I)(?:_\{(\w+)\})?"
)

logging.disable(logging.CRITICAL)


class _Parser(latex2sympy2._Latex2Sympy):
    """The LaTeX parser with exact numbers."""

    def parse_number(self, text: str) -> sympy.Expr:
        value = plain_value(text)
        return sympy.Rational(value.number.numerator, value.number.denominator) if value else super().parse_number(text)


def _as_symbol(match: re.Match[str]) -> str:
    parts = [part.lstrip("\\") for part in match.groups() if part]
    return rf"\Upsilon_{{{''.join(reversed(parts))}}}" if parts else match[0]


@lru_cache(256)
def parse(latex: str, lowercase: bool, index: bool, current: bool = True) -> Any:
    """Return the sympy object of a formula. Raises an error of any kind if the complete text is not a formula.

    index: `i` is an index, not the imaginary unit. current: `I` is a name, not the imaginary unit.
    """
    latex = _LG.sub(r"\\log_{10}", latex)
    if _TRIGONOMETRIC.search(latex):
        latex = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", latex)
    latex = re.sub(r"\\(min|max|gcd)\s*\\\{(.*?)\\\}", r"\\\1(\2)", latex)
    latex = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"\1", latex)
    latex = re.sub(r"_\{\s*\\(?:text\s*\{\s*(\w+)\s*\}|([a-z]+)\s*)\s*\}", r"_{\1\2}", latex)
    latex = _NAMES.sub(lambda match: match[0] if match[0] == "I" and not current else _as_symbol(match), latex)
    latex = re.sub(r"\\hbar(?![a-z])", r"h_{bar}", latex)
    config = latex2sympy2.ConversionConfig(lowercase_symbols=lowercase)
    parser = _Parser(is_real=True, config=config)
    result = parser.parse(normalize_latex(latex, _NORMALISATION))
    if isinstance(result, sympy.Basic) and result.has(sympy.Derivative):
        result = result.replace(_is_plain_derivative, lambda node: sympy.Symbol(f"d {node.args}", real=True))
    if not index and isinstance(result, sympy.Basic):
        units = {symbol: sympy.I for symbol in result.free_symbols if symbol.name == "i"}
        result = result.xreplace(units) if units else result
    return result


def _is_plain_derivative(node: Any) -> bool:
    """Return whether a node is the derivative of a name, as in an equation, which is not 0."""
    return isinstance(node, sympy.Derivative) and not node.expr.args


def equal(first: str, second: str) -> bool:
    """Return whether two formulas in normalised LaTeX (see `normalise`) are equal."""
    letters = [set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))) for text in (first, second)]
    greek = (
        re.search(r"\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)(?![A-Za-z])", first + second) is not None
    )
    clash = greek or any(letter.isupper() and letter.lower() in found for found in letters for letter in found)
    index = bool(_INDEX.search(first) or _INDEX.search(second))
    units = [found & {"i", "I"} for found in letters]
    current = sorted(map(sorted, units)) != [["I"], ["i"]]  # `3+4I` is `3+4i`
    try:
        left, right = (parse(text, not clash, index, current) for text in (first, second))
    except RecursionError:
        raise
    except Exception:  # the parser raises errors of many kinds for what is not a formula
        return False
    return objects_equal(left, right, (plain_value(first), plain_value(second)))


def is_formula(text: str) -> bool:
    """Return whether a text in normalised LaTeX is a formula."""
    try:
        parse(text, True, True)
    except RecursionError:
        raise
    except Exception:
        return False
    return True


def objects_equal(left: Any, right: Any, decimals: Decimals) -> bool:
    if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
        return _matrices_equal(left, right, decimals)
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        return _equations_equal(left, right)
    if isinstance(left, sympy.core.relational.Relational) or isinstance(right, sympy.core.relational.Relational):
        return _inequalities_equal(left, right)
    if isinstance(left, sympy.Set) or isinstance(right, sympy.Set):
        return _sets_equal(left, right)
    if isinstance(left, sympy.Tuple) or isinstance(right, sympy.Tuple):
        return left == right
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return False
    return _expressions_equal(left, right, decimals)


def _matrices_equal(left: Any, right: Any, decimals: Decimals) -> bool:
    left, right = (value.doit() if hasattr(value, "doit") else value for value in (left, right))
    if not (isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase)) or left.shape != right.shape:
        return False
    return all(_expressions_equal(a, b, decimals) for a, b in zip(left.flat(), right.flat(), strict=True))


def _sets_equal(left: Any, right: Any) -> bool:
    if not (isinstance(left, sympy.Set) and isinstance(right, sympy.Set)):
        return False
    left, right = left.doit(), right.doit()
    return bool(left == right) or bool(left.symmetric_difference(right).doit() == sympy.S.EmptySet)


def _inequalities_equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    ratio = _constant_ratio(left.lhs - left.rhs, right.lhs - right.rhs)
    return ratio is not None and bool(ratio > 0)


def _equations_equal(left: sympy.Eq, right: sympy.Eq) -> bool:
    first, second = left.lhs - left.rhs, right.lhs - right.rhs
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    if _constant_ratio(first, second) is not None:
        return True
    if first.has(AppliedUndef) or second.has(AppliedUndef) or max(first.count_ops(), second.count_ops()) > MAX_SOLVED:
        return False
    for symbol in sorted(first.free_symbols, key=str):
        try:
            solutions = [sympy.solve(value, symbol) for value in (first, second)]
        except NotImplementedError:
            continue
        if all(isinstance(found, list) and found for found in solutions) and len(solutions[0]) == len(solutions[1]):
            remaining = list(solutions[1])
            for one in solutions[0]:
                match = next((other for other in remaining if _expressions_equal(one, other)), None)
                if match is None:
                    break
                remaining.remove(match)
            else:
                return True
    return False


def _constant_ratio(first: sympy.Expr, second: sympy.Expr) -> sympy.Expr | None:
    """Return first / second if that is the same number at all points, else None."""
    ratios = []
    for values in _assignments(first, second):
        above, below = _number(first, values), _number(second, values)
        if above is None or below is None or not above.is_real or not below.is_real or below == 0:
            continue
        ratios.append(above / below)
    if len(ratios) < 4 or any(not _close(ratio, ratios[0]) for ratio in ratios) or abs(ratios[0]) < AGREEMENT:
        return None
    return ratios[0]


def _assignments(*expressions: sympy.Expr) -> list[dict[Any, Any]]:
    """Return values of all symbols of the expressions, several times."""
    names = sorted(set().union(*(value.free_symbols for value in expressions)), key=lambda symbol: symbol.name)
    steps = any(value.has(sympy.floor, sympy.ceiling, sympy.Mod) for value in expressions)
    return [
        {name: points[(place + shift * (1 + place)) % len(points)] + place * offset for place, name in enumerate(names)}
        for points, offset in ((STEPS, sympy.Integer(2)), (POINTS, sympy.Rational(1, 97)))[0 if steps else 1 :]
        for shift in range(len(points))
    ]


def _number(expression: sympy.Expr, values: dict[Any, Any]) -> Any:
    """Return the value of an expression to DIGITS digits, or None if it has none."""
    try:
        number = expression.subs(values).evalf(DIGITS)
    except RecursionError:
        raise
    except Exception:
        return None
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    return number if number.is_Number or number.has(sympy.I) else None


def _close(first: Any, second: Any) -> bool:
    scale = max(abs(first), abs(second))
    return bool(scale == 0) or bool(abs(first - second) <= scale * AGREEMENT)


def _real_roots(expression: sympy.Expr) -> sympy.Expr:
    """Replace odd roots of negative numbers by the real root, as LaTeX means them."""

    def is_odd_root(node: Any) -> bool:
        return bool(
            isinstance(node, sympy.Pow) and isinstance(node.exp, sympy.Rational) and node.exp.q % 2 and node.exp.q > 1
            and not node.base.free_symbols and node.base.is_extended_negative
        )  # fmt: skip

    return expression.replace(is_odd_root, lambda node: (-1) ** (node.exp.p % 2) * sympy.Pow(-node.base, node.exp))


def _expressions_equal(left: sympy.Expr, right: sympy.Expr, decimals: Decimals = (None, None)) -> bool:
    if left == right:
        return True
    if left.free_symbols or right.free_symbols:
        return _symbolic_equal(left, right)
    if _too_large(left) or _too_large(right):
        return False
    left, right = _real_roots(left), _real_roots(right)
    exact = [_rational(value) for value in (left, right)]
    if exact[0] is not None and exact[1] is not None:
        if exact[0] == exact[1]:
            return True
        return _rounds_to_other(
            [Fraction(int(value.p), int(value.q)) for value in exact if value is not None], decimals
        )
    if left in (sympy.oo, -sympy.oo) or right in (sympy.oo, -sympy.oo):
        return bool(left.doit() == right.doit())
    values = [
        _number(value.doit() if value.has(sympy.Sum, sympy.Product, sympy.Limit, sympy.Integral) else value, {})
        for value in (left, right)
    ]
    if values[0] is None or values[1] is None:
        return bool(sympy.simplify(left - right) == 0)
    if _close(values[0], values[1]):
        return True
    if any(_close_parts(values[0], values[1])):
        return True
    numbers = [Fraction(str(value)) if value.is_real else None for value in values]
    return _rounds_to_other(numbers, decimals)


def _rounds_to_other(values: Sequence[Fraction | None], decimals: Decimals) -> bool:
    """Return whether one of two values is the other, written as a decimal, before rounding."""
    pairs = zip(values, reversed(decimals), strict=True)
    return any(value is not None and decimal is not None and rounds_to(value, decimal) for value, decimal in pairs)


def _close_parts(first: Any, second: Any) -> tuple[bool, ...]:
    """Return whether both numbers have equal real and imaginary parts, of which one can be rounding noise."""
    if not (first.has(sympy.I) or second.has(sympy.I)):
        return ()
    scale = max(abs(first), abs(second))
    return (bool(abs(first - second) <= scale * AGREEMENT),)


def _rational(expression: sympy.Expr) -> sympy.Rational | None:
    """Return the exact value of a rational expression without functions, or None."""
    if isinstance(expression, sympy.Rational):
        return expression
    if expression.has(sympy.I, sympy.pi, sympy.E, sympy.oo):
        return None
    if any(isinstance(node, sympy.Pow) and not node.exp.is_integer for node in sympy.preorder_traversal(expression)):
        return None
    value = expression.doit()
    return value if isinstance(value, sympy.Rational) else None


def _too_large(expression: sympy.Expr) -> bool:
    """Return whether the exact value of an expression has more than MAX_DIGITS digits, so that it cannot be computed."""
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Pow) and node.exp.is_number:
            if node.exp.has(sympy.factorial) or any(
                isinstance(power, sympy.Pow) and _too_large(power) for power in (node.exp,)
            ):
                return True
            if abs(node.exp.evalf(3)) > (MAX_DIGITS if node.base.is_number else MAX_DEGREE):
                return True
        elif isinstance(node, sympy.factorial | sympy.binomial) and any(
            arg.is_number and abs(arg.evalf(3)) > MAX_FACTORIAL for arg in node.args
        ):
            return True
        elif isinstance(node, sympy.Sum | sympy.Product):
            _, low, high = node.limits[0]
            if low.is_number and high.is_number and (high - low).is_finite and high - low > MAX_FACTORIAL:
                return True
    return False


def _symbolic_equal(left: sympy.Expr, right: sympy.Expr) -> bool:
    if _too_large(left) or _too_large(right):
        return False
    bounded = left.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit) or right.has(
        sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit
    )
    agreed = 0
    if not bounded:
        for values in _assignments(left, right):
            ours, theirs = (_number(_real_roots(value.subs(values)), {}) for value in (left, right))
            if ours is None or theirs is None:
                continue
            if ours.is_real and theirs.is_real:
                if not _close(ours, theirs):
                    return False
                agreed += 1
            elif ours.is_real or theirs.is_real:
                return False
    if agreed >= 3:
        return True
    difference = left.doit() - right.doit()
    return bool(difference == 0) or bool(sympy.simplify(difference) == 0)
