"""Draws an answer in two notations, or an answer and a near miss. Whether they are equal is known without any parser."""

import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

Pair = tuple[str, str, bool]
Draw = Callable[[random.Random], Pair]

NAMES = list("xyzabcmnkpqrtuv")
_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen"""
WORDS = _WORDS.split()
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
UNITS = {
    "cm": ("cm", r"\text{ cm}", r"\,\mathrm{cm}", " centimeters"),
    "kg": ("kg", r"\text{ kg}", " kilograms"),
    "km/h": (" km/h", r"\text{ km/h}", r"\ \mathrm{km/h}"),
    "m^2": (r"\text{ m}^2", " square meters", r"\,\mathrm{m}^{2}"),
    "s": (r"\text{ s}", " seconds"),
    "hours": (" hours", r"\text{ hours}"),
}


def either(rng: random.Random, forms: Sequence[str], misses: Sequence[str], golds: Sequence[str] | None = None) -> Pair:
    """Return two notations of an answer, or a miss and a notation. golds: notations of the true answer, if not all forms are."""
    equal = rng.random() < 0.5
    return rng.choice(forms if equal else misses), rng.choice(golds or forms), equal


def write(value: Fraction | int, rng: random.Random) -> str:
    """Return one of the notations of a rational number."""
    value = Fraction(value)
    sign, size = ("-" if value < 0 else ""), abs(value)
    top, bottom = size.numerator, size.denominator
    if bottom == 1:
        forms = [
            f"{sign}{top}", f"{sign}{top}.0", f"{sign}{top}.00", rf"{sign}\frac{{{3 * top}}}{{3}}", f"${sign}{top}$",
            rf"\({sign}{top}\)", f"{sign}{top}.", f"{sign or '+'}{top}",
        ]  # fmt: skip
        if top >= 1000:
            forms += [f"{sign}{top:,}", f"{sign}{top:,}".replace(",", "{,}"), f"{sign}{top:,}".replace(",", r"\,")]
        return rng.choice(forms)
    factor = rng.randint(1, 3)
    forms = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}", rf"{sign}\dfrac{{{top * factor}}}{{{bottom * factor}}}", f"{sign}{top}/{bottom}",
        rf"\frac{{{sign}{top}}}{{{bottom}}}", rf"{sign}\tfrac{{{top}}}{{{bottom}}}",
        rf"{sign}\left(\frac{{{top}}}{{{bottom}}}\right)",
    ]  # fmt: skip
    if top < 10 and bottom < 10:
        forms += [rf"{sign}\frac{top}{bottom}", rf"{sign}\frac {top}{bottom}", rf"{sign}\frac{top}{{{bottom}}}"]
    if top > bottom:
        whole, rest = divmod(top, bottom)
        forms += [
            rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}", f"{sign}{whole} {rest}/{bottom}",
            rf"{sign}{whole}\tfrac{{{rest}}}{{{bottom}}}", rf"{sign}{whole}\,\frac{{{rest}}}{{{bottom}}}",
        ]  # fmt: skip
    if bottom in (2, 4, 5, 8, 10):
        decimal = f"{sign}{Decimal(top) / bottom:f}"
        forms += [decimal, f"{decimal}0"]
    return rng.choice(forms)


def written(rng: random.Random, text: str, value: Fraction, wrong: Fraction) -> Pair:
    equal = rng.random() < 0.5
    return text, write(value if equal else wrong, rng), equal


def rational(rng: random.Random) -> Fraction:
    return Fraction(rng.randint(-40, 40), rng.randint(2, 12))


def expression(rng: random.Random, depth: int = 3) -> tuple[str, Fraction]:
    """Return an arithmetic expression in LaTeX and its value, computed while it is drawn."""
    if depth == 0 or rng.random() < 0.2:
        value = rng.randint(1, 12)
        return str(value), Fraction(value)
    (one, a), (two, b) = expression(rng, depth - 1), expression(rng, depth - 1)
    factor = rng.randint(2, 9)
    forms = [
        (f"{one}+({two})", a + b), (f"{one}-({two})", a - b), (rf"({one}) \cdot ({two})", a * b), (f"({one})({two})", a * b),
        (f"{factor}({one})", factor * a), (rf"\left({one}\right)^2", a * a), (rf"({one})\times({two})", a * b),
        (rf"{factor}\left({one}\right)\left({two}\right)", factor * a * b),
    ]  # fmt: skip
    return rng.choice([*forms, (rf"\frac{{{one}}}{{{two}}}", a / b)] if b else forms)


# --- numbers


def numbers(rng: random.Random) -> Pair:
    value = rng.choice((Fraction(rng.randint(-30, 60)), rational(rng), Fraction(rng.randint(1000, 9_999_999))))
    wrong = rng.choice(
        (-value if value else Fraction(1), value + 1, value * 10 if value else Fraction(7), value + Fraction(1, 7))
    )
    return written(rng, write(value, rng), value, wrong)


def arithmetic(rng: random.Random) -> Pair:
    text, value = expression(rng)
    return written(rng, text, value, value + rng.choice((1, -1, Fraction(1, 3), rng.randint(2, 9))))


def named_value(rng: random.Random) -> Pair:
    value = rational(rng)
    name = rng.choice(("x", "N", "m", "S_{10}", "f(2)", r"\angle ABC", "a_5", "P(A)", r"\text{Area}", "AB", "p+q"))
    text, gold, equal = written(rng, write(value, rng), value, value + 1)
    return f"{name}={text}", gold, equal


def roots(rng: random.Random) -> Pair:
    factor, radicand = rng.randint(1, 9), rng.choice((2, 3, 5, 6, 7, 10, 11))
    digit = radicand < 10

    def forms(a: int) -> list[str]:
        return [
            rf"{a}\sqrt{{{radicand}}}", rf"\sqrt{{{a * a * radicand}}}", rf"{a}\sqrt {radicand}" if digit else f"{a}√({radicand})",
            f"{a}√{radicand}" if digit else f"{a}√({radicand})", f"{a}*sqrt({radicand})", rf"\sqrt{{{radicand}}}\cdot {a}",
            rf"{a}({radicand})^{{1/2}}", rf"\frac{{{a * radicand}}}{{\sqrt{{{radicand}}}}}",
        ]  # fmt: skip

    return either(rng, forms(factor), forms(factor + rng.randint(1, 3)))


def constants(rng: random.Random) -> Pair:
    top, bottom = rng.randint(1, 9), rng.randint(2, 7)

    def forms(a: int) -> list[str]:
        return [
            rf"\frac{{{a}\pi}}{{{bottom}}}", rf"\frac{{{a}}}{{{bottom}}}\pi", rf"{a}\pi/{bottom}", f"{a}π/{bottom}",
            rf"\frac{{{a}}}{{{bottom}}}(\pi)", rf"\pi\cdot\frac{{{a}}}{{{bottom}}}", f"{a}*pi/{bottom}",
        ]  # fmt: skip

    return either(rng, forms(top), forms(top + 1))


def scientific(rng: random.Random) -> Pair:
    mantissa, exponent = rng.randint(11, 99), rng.randint(3, 20) * rng.choice((1, -1))

    def forms(m: int, e: int) -> list[str]:
        return [
            rf"{m / 10} \times 10^{{{e}}}", f"{m / 10}e{e}", rf"{m / 10} \cdot 10^{{{e}}}", f"{m / 10}*10^{e}",
            rf"{m}\times10^{{{e - 1}}}", rf"{m / 10}×10^{{{e}}}",
        ]  # fmt: skip

    misses = forms(mantissa + 1, exponent) + forms(mantissa, exponent + 1) + forms(mantissa, -exponent)
    return either(rng, forms(mantissa, exponent), misses)


def repeating(rng: random.Random) -> Pair:
    digit = rng.randint(1, 8)

    def forms(d: int) -> list[str]:
        return [
            rf"0.\overline{{{d}}}", f"0.({d})", rf"\frac{{{d}}}{{9}}", rf"0.{d}{d}{d}\ldots", f"0.{d}{d}{d}...", rf"0.\dot{{{d}}}",
        ]  # fmt: skip

    return either(rng, forms(digit), [*forms(digit + 1), f"0.{digit}", f"0.{digit}{digit}{digit}"])


def bases(rng: random.Random) -> Pair:
    base = rng.choice((2, 3, 5, 7, 8))
    digits = "1" + "".join(str(rng.randrange(base)) for _ in range(4))

    def forms(d: str, b: int) -> list[str]:
        return [
            f"{d}_{b}",
            f"{d}_{{{b}}}",
            rf"{d}_{{({b})}}",
            f"{d} (base {b})",
            f"{d} base {b}",
            rf"{d}_{{\text{{{b}}}}}",
        ]

    return either(rng, forms(digits, base), forms(digits + "0", base) + forms(digits, base + 1))


def spelled(rng: random.Random) -> Pair:
    def word(value: int) -> str:
        if value < 20:
            return WORDS[value]
        if value < 100:
            return TENS[value // 10 - 2] + (rng.choice("- ") + WORDS[value % 10] if value % 10 else "")
        rest = value % 100
        return f"{WORDS[value // 100]} hundred" + (rng.choice((" and ", " ")) + word(rest) if rest else "")

    value = rng.randint(0, 889)
    text, miss = word(value), word(value + rng.choice((1, 10, 100)))
    return either(rng, (text, rf"\text{{{text}}}", text.capitalize()), (miss, rf"\text{{{miss}}}"), [str(value)])


# --- formulas


def polynomials(rng: random.Random) -> Pair:
    x = rng.choice(NAMES)
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.randint(1, 9)
    forms = [
        f"{a}{x}^2+{b}{x}-{c}", f"-{c}+{b}{x}+{a}{x}^{{2}}", rf"{a}{x}\cdot {x}+{b}{x}-{c}", f"{x}({a}{x}+{b})-{c}",
        f"{b}{x}+{a}{x}^2-{c}",
    ]  # fmt: skip
    misses = [
        f"{a}{x}^2-{b}{x}-{c}", f"{a}{x}^2+{b}{x}-{c + 1}", f"{a}{x}^3+{b}{x}-{c}",
        f"{a}{x.upper()}^2+{b}{x.upper()}-{c}", f"{a}({x}^2+{b}{x}-{c})",
    ]  # fmt: skip
    return either(rng, forms, misses)


def pieces(rng: random.Random) -> Pair:
    """Formulas that are equal on one side of a number only, and those with values on one side only."""
    x, c, n, d = rng.choice("xtyz"), rng.randint(2, 30), rng.choice("nmk"), rng.randint(2, 9)
    absolute = [f"|{x}-{c}|", f"|{c}-{x}|", rf"\sqrt{{({x}-{c})^2}}", rf"\max({x}-{c},{c}-{x})"]
    greatest = [rf"\max({x},{c})", rf"\max({c},{x})", rf"\frac{{{x}+{c}+|{x}-{c}|}}{{2}}"]
    root = [rf"\sqrt{{{x}^2-{c * c}}}", rf"\sqrt{{({x}-{c})({x}+{c})}}", f"(-{c * c}+{x}^2)^{{1/2}}"]
    logarithm = [rf"\ln({x}-{c})", rf"\ln({d}{x}-{d * c})-\ln {d}", rf"-\ln\frac{{1}}{{{x}-{c}}}"]
    steps = [rf"\lfloor {n}/{d}\rfloor", rf"\lfloor\frac{{{n}+{d}}}{{{d}}}\rfloor-1"]
    return either(rng, *rng.choice((
        (absolute, (f"{x}-{c}", f"{c}-{x}", f"|{x}+{c}|")), (greatest, (x, str(c), rf"\min({x},{c})")),
        (root, (f"{x}-{c}", rf"\sqrt{{{x}^2+{c * c}}}")), (logarithm, (rf"\ln({c}-{x})", rf"\ln|{x}-{c}|")),
        (steps, (rf"\frac{{{n}}}{{{d}}}", rf"\lfloor ({n}-1)/{d}\rfloor", rf"\lceil {n}/{d}\rceil")),
    )))  # fmt: skip


def letter_case(rng: random.Random) -> Pair:
    a, b = rng.sample("abkmnprt", 2)
    misses = [f"{a}+{b.upper()}", f"{a}+{b}", f"{a.upper()}+{b.upper()}"]
    return either(rng, [f"{a.upper()}+{b}", f"{b}+{a.upper()}"], misses)


def binomials(rng: random.Random) -> Pair:
    n, k = rng.randint(4, 12), rng.randint(2, 3)
    value = math.comb(n, k)
    forms = [
        rf"\binom{{{n}}}{{{k}}}", rf"{{{n} \choose {k}}}", f"C({n},{k})", rf"{{}}^{{{n}}}C_{{{k}}}",
        rf"\frac{{{n}!}}{{{k}!({n}-{k})!}}", str(value),
    ]  # fmt: skip
    return either(rng, forms, (str(value + 1), rf"\binom{{{n + 1}}}{{{k}}}", f"C({n + 1},{k})"))


def complex_numbers(rng: random.Random) -> Pair:
    a, b = rng.randint(1, 9), rng.randint(2, 9)
    forms = [f"{a}+{b}i", f"{b}i+{a}", rf"{a}+{b}\mathrm{{i}}", rf"{a} + {b}\cdot i", f"{a}+i{b}", rf"i({b})+{a}"]
    return either(rng, forms, (f"{a}-{b}i", f"{a}+{b + 1}i", f"{a + b}", f"-{a}+{b}i"))


def plus_minus(rng: random.Random) -> Pair:
    a, b = rng.randint(1, 9), rng.choice((2, 3, 5, 7))
    forms = [
        rf"{a}\pm\sqrt{{{b}}}", rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}", rf"\{{{a}-\sqrt{b}, {a}+\sqrt{b}\}}",
        rf"x={a}\pm\sqrt{{{b}}}", rf"x={a}+\sqrt{{{b}}} \text{{ or }} x={a}-\sqrt{{{b}}}", f"{a} ± √{b}",
    ]  # fmt: skip
    return either(rng, forms, (rf"{a}+\sqrt{{{b}}}", rf"{a + 1}\pm\sqrt{{{b}}}", rf"{a}\pm{b}"))


def equations(rng: random.Random) -> Pair:
    a, b = rng.randint(2, 9), rng.randint(1, 20)
    forms = [f"y={a}x+{b}", f"y = {b} + {a}x", f"{a}x-y+{b}=0", f"y-{a}x={b}"]
    return either(rng, forms, [f"y={a}x-{b}", f"y={a + 1}x+{b}", f"x={a}y+{b}", f"{a}x+y+{b}=0"])


# --- numbers with something beside them


def quantities(rng: random.Random) -> Pair:
    value, unit = rng.randint(2, 90), rng.choice(list(UNITS))
    different = rng.choice([name for name in UNITS if name != unit])
    forms = [f"{value}{form}" for form in UNITS[unit]]
    if rng.random() < 0.25:
        return rng.choice(forms), str(value), True
    misses = [f"{value + 1}{form}" for form in UNITS[unit]] + [f"{value}{form}" for form in UNITS[different]]
    return either(rng, [str(value), *forms], misses, forms)


def converted(rng: random.Random) -> Pair:
    value = rng.randint(1, 9)
    small, large, factor = rng.choice(
        ((" minutes", " hours", 60), (r"\text{ cm}", r"\text{ m}", 100), (r"\text{ g}", " kg", 1000),
         (r"\text{ seconds}", r"\text{ minutes}", 60))
    )  # fmt: skip
    return either(rng, [f"{value * factor}{small}"], [f"{value * factor + 1}{small}"], [f"{value}{large}"])


def percentages(rng: random.Random) -> Pair:
    value = rng.randint(2, 99)
    golds = [rf"{value}\%", f"{value}%", f"{value} percent", rf"{value}\text{{ percent}}"]
    misses = (rf"{value + 1}\%", rf"0.{value}\%", f"{value * 10}%", f"{value / 1000:.4f}")
    return either(rng, [*golds, str(value), f"{value / 100:.2f}", rf"\frac{{{value}}}{{100}}"], misses, golds)


def currencies(rng: random.Random) -> Pair:
    value = rng.randint(2, 9000)
    golds = [
        rf"\${value}", f"${value}", f"{value} dollars", rf"\${value:,}", rf"\${value}.00", rf"{value}\text{{ dollars}}",
        f"USD {value}",
    ]  # fmt: skip
    return either(rng, [*golds, str(value)], (rf"\${value + 1}", f"€{value}", f"{value} euros", rf"\${value}0"), golds)


_SCALES = """lakh crore mille millones Millionen kilo sevenths ninths ppm max squared root thousand million dozen inverse гектар"""


def scales(rng: random.Random) -> Pair:
    """Words beside a number that change it."""
    value, word = rng.randint(2, 40), rng.choice(_SCALES.split())
    return rng.choice((f"{value} {word}", rf"{value}\text{{ {word}}}")), str(value), False


def ratios(rng: random.Random) -> Pair:
    first, second = rng.sample(range(1, 12), 2)
    factor = rng.randint(1, 4)

    def forms(a: int, b: int) -> list[str]:
        return [f"{a}:{b}", f"{a} : {b}", f"{a} to {b}", rf"{a}\text{{ to }}{b}", f"{a * factor} to {b * factor}"]

    return either(rng, forms(first, second), forms(second, first))


# --- words

TEXTS = (
    ("yes", "Yes", r"\text{yes}", "Yes.", r"\textbf{Yes}", "YES"), ("no", "No", r"\text{No}", "No."),
    ("true", "True", r"\text{True}"), ("false", r"\text{False}", "False."),
    ("no solution", r"\text{no solution}", "No solutions", r"\varnothing", r"\emptyset", "∅", r"\text{No solution.}"),
    ("DNE", r"\text{DNE}", "does not exist", r"\text{undefined}"), ("infinity", r"\infty", "∞", r"+\infty"),
    ("even", r"\text{even}", "Even"), ("odd", r"\text{odd}"),
)  # fmt: skip


def words(rng: random.Random) -> Pair:
    return either(rng, *rng.sample(TEXTS, 2))


def choices(rng: random.Random) -> Pair:
    letter, wrong = rng.sample("ABCDE", 2)

    def forms(letter: str) -> list[str]:
        return [
            letter, f"({letter})", f"{letter}.", rf"\text{{({letter})}}", rf"\textbf{{({letter})}}", rf"\text{{Option {letter}}}",
            f"Option {letter}", rf"\mathrm{{{letter}}}", rf"\boxed{{{letter}}}", f"({letter}) {rng.randint(2, 9)}",
        ]  # fmt: skip

    return either(rng, forms(letter), forms(wrong), forms(letter)[:8])


# --- lists


def tuples(rng: random.Random) -> Pair:
    a, b = rng.sample(range(-20, 40), 2)

    def forms(a: int, b: int) -> list[str]:
        return [
            f"({a},{b})", f"({a}, {b})", rf"\left({a},{b}\right)", rf"\left({a},\, {b}\right)", f"({a}; {b})",
            rf"\langle {a}, {b}\rangle", f"$({a},{b})$",
        ]  # fmt: skip

    return either(rng, forms(a, b), forms(b, a) + forms(a, b + 1))


def grouped(rng: random.Random) -> Pair:
    """Commas in brackets separate items; without brackets they group digits."""
    a, b = rng.randint(1, 99), rng.randint(100, 999)
    if rng.random() < 0.4:
        number = rng.choice((f"{a}{b}", f"{a}{{,}}{b}", rf"{a}\,{b}"))
        return either(rng, [f"{a},{b}"], (f"({a},{b})", rf"\{{{a},{b}\}}"), [number])
    forms = [f"({a},{b})", f"({a}, {b})", f"x={a},y={b}", f"(x,y)=({a},{b})"]
    return either(rng, forms, [f"({b},{a})"])


def named(rng: random.Random) -> Pair:
    names = sorted(rng.sample(NAMES, rng.choice((2, 2, 3))))
    values = rng.sample(range(-20, 40), len(names))
    swapped = values[1:] + values[:1]

    def forms(values: list[int]) -> list[str]:
        pairs = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        mixed = rng.sample(pairs, len(pairs))
        return [
            ", ".join(pairs), ", ".join(mixed), r" \text{ and } ".join(mixed), " and ".join(pairs),
            f"({','.join(names)})=({','.join(map(str, values))})", r"\begin{cases}" + r"\\".join(mixed) + r"\end{cases}",
        ]  # fmt: skip

    def bare(values: list[int]) -> list[str]:
        return [f"({', '.join(map(str, values))})", ", ".join(map(str, values))]

    return either(rng, forms(values) + bare(values), forms(swapped) + bare(swapped), forms(values))


def sets(rng: random.Random) -> Pair:
    values = rng.sample(range(-20, 40), rng.choice((2, 3, 4)))

    def forms(items: list[int]) -> list[str]:
        items = rng.sample(items, len(items))
        if len(items) == 1:
            return [str(items[0])]
        return [
            rf"\{{{', '.join(map(str, items))}\}}", ", ".join(map(str, items)), " or ".join(f"x={item}" for item in items),
            r"\left\{" + ",".join(map(str, items)) + r"\right\}", r" \text{ or } ".join(map(str, items)),
            ", ".join(map(str, items[:-1])) + f" and {items[-1]}",
        ]  # fmt: skip

    return either(rng, forms(values), forms([*values[:-1], values[-1] + 60]) + forms(values[:-1]))


def matrices(rng: random.Random) -> Pair:
    rows = [[rng.randint(-9, 9) for _ in range(2)] for _ in range(2)]

    def forms(rows: list[list[int]]) -> list[str]:
        kind = rng.choice(("pmatrix", "bmatrix", "matrix", "smallmatrix"))
        content = rng.choice((r"\\", r"\\[4pt]", r" \\ ", r"\\*", r"\cr ")).join(
            " & ".join(map(str, row)) for row in rows
        )
        doubled = r"\\".join("&".join(str(2 * cell) for cell in row) for row in rows)
        return [
            rf"\begin{{{kind}}}{content}\end{{{kind}}}", rf"\begin{{pmatrix}}{content}\\ \end{{pmatrix}}",
            rf"\left(\begin{{array}}{{cc}}{content}\end{{array}}\right)", rf"\frac12\begin{{pmatrix}}{doubled}\end{{pmatrix}}",
            str(rows).replace(" ", ""), rf"A=\begin{{bmatrix}}{content}\end{{bmatrix}}",
        ]  # fmt: skip

    wrong = [row[:] for row in rows]
    wrong[rng.randrange(2)][rng.randrange(2)] += rng.choice((1, -1, 5))
    if rng.random() < 0.3 and rows[0][1] != rows[1][0]:
        wrong = [list(column) for column in zip(*rows, strict=True)]
    return either(rng, forms(rows), forms(wrong), forms(rows)[:5])


# --- sets of real numbers


def intervals(rng: random.Random) -> Pair:
    low, width, name = rng.randint(-15, 10), rng.randint(2, 20), rng.choice("xtkm")

    def forms(low: int, left: bool, high: int, right: bool) -> list[str]:
        a, b = r"\le" if left else "<", r"\leq" if right else "<"
        opening, closing = "[" if left else "(", "]" if right else ")"
        return [
            f"{opening}{low},{high}{closing}", f"{'[' if left else ']'}{low}, {high}{']' if right else '['}",
            rf"{low} {a} {name} {b} {high}", rf"\left{opening}{low}, {high}\right{closing}",
            rf"\{{{name} \mid {low} {a} {name} {b} {high}\}}", rf"{name} \in {opening}{low},{high}{closing}",
            rf"{name} {'≥' if left else '>'} {low} \text{{ and }} {name} {'≤' if right else '<'} {high}",
        ]  # fmt: skip

    left, right, high = rng.random() < 0.5, rng.random() < 0.5, low + width
    misses = [
        (low, not left, high, right),
        (low, left, high, not right),
        (low, left, high + 1, right),
        (low - 1, left, high, right),
    ]
    return either(rng, forms(low, left, high, right), forms(*rng.choice(misses)))


def half_lines(rng: random.Random) -> Pair:
    bound, strict, upper = rng.randint(-15, 15), rng.random() < 0.5, rng.random() < 0.5

    def forms(bound: int, strict: bool, upper: bool) -> list[str]:
        factor = rng.randint(2, 5)
        sign, flipped = ("<", ">") if upper else (">", "<")
        sign, flipped = (sign, flipped) if strict else (r"\leq" if upper else r"\ge", flipped + "=")
        opening, closing = "(" if strict else "[", ")" if strict else "]"
        interval = rf"(-\infty, {bound}{closing}" if upper else rf"{opening}{bound}, \infty)"
        return [
            f"x {sign} {bound}", interval, interval.replace(r", \infty", r", +\infty"), f"{factor}x {sign} {factor * bound}",
            f"{bound} {flipped} x", rf"\{{x : x {sign} {bound}\}}", rf"x-{abs(bound)} {sign} {bound - abs(bound)}",
        ]  # fmt: skip

    miss = rng.choice(((bound, not strict, upper), (bound + 1, strict, upper), (bound, strict, not upper)))
    return either(rng, forms(bound, strict, upper), forms(*miss))


def outside(rng: random.Random) -> Pair:
    centre, radius = rng.randint(-5, 5), rng.randint(1, 9)
    low, high = centre - radius, centre + radius
    inner = f"x-{centre}" if centre > 0 else f"x+{-centre}" if centre < 0 else "x"
    forms = [
        rf"(-\infty,{low})\cup({high},\infty)", rf"x<{low} \text{{ or }} x>{high}", f"|{inner}|>{radius}",
        rf"x > {high} \lor x < {low}", rf"({high},\infty)\cup(-\infty,{low})", rf"\left|{inner}\right| > {radius}",
    ]  # fmt: skip
    misses = [
        rf"(-\infty,{low}]\cup({high},\infty)", f"|{inner}|<{radius}", rf"({low},{high})", rf"x<{low} \text{{ or }} x>{high + 1}",
    ]  # fmt: skip
    return either(rng, forms, misses)


def joined(rng: random.Random) -> Pair:
    """Inequalities that `and` joins are no union, even if no number meets both."""
    low, high = sorted(rng.sample(range(-9, 10), 2))
    union = [rf"(-\infty,{low})\cup({high},\infty)", rf"x<{low} \text{{ or }} x>{high}", f"x > {high} or x < {low}"]
    common = [f"({low},{high})", rf"{low} < x < {high}", rf"x>{low} \text{{ and }} x<{high}", f"x<{high} and x>{low}"]
    neither = [rf"x>{high} \text{{ and }} x<{low}", f"x<{low} and x>{high}", rf"x < {low} \land x > {high}"]
    misses = [(one, two) for one in neither for two in (*union, *common, r"\varnothing", "no solution")]
    pair = rng.choice([*misses, *((one, two) for one in union for two in common)])
    if rng.random() < 0.5:
        return (*rng.choice((pair, pair[::-1])), False)
    forms = rng.choice((union, common, neither))
    return rng.choice(forms), rng.choice(forms), True


def excluded(rng: random.Random) -> Pair:
    point = rng.randint(-9, 9)
    forms = [
        rf"x \ne {point}", rf"(-\infty,{point})\cup({point},\infty)", rf"\mathbb{{R}}\setminus\{{{point}\}}",
        rf"x\in\mathbb{{R}}, x \neq {point}", f"x≠{point}",
    ]  # fmt: skip
    misses = [rf"x \ne {point + 1}", r"\mathbb{R}", rf"x={point}", rf"(-\infty,{point}]\cup({point},\infty)"]
    return either(rng, forms, misses)


KINDS: tuple[Draw, ...] = (
    numbers, arithmetic, named_value, roots, constants, scientific, repeating, bases, spelled, polynomials, pieces, letter_case, binomials,
    complex_numbers, plus_minus, equations, quantities, converted, percentages, currencies, scales, ratios, words, choices, tuples,
    grouped, named, sets, matrices, intervals, half_lines, outside, joined, excluded,
)  # fmt: skip


def pairs(seed: int, count: int) -> list[tuple[str, Pair]]:
    """Return (kind, (candidate, true answer, whether they are equal)) for `count` pairs."""
    rng = random.Random(seed)
    return [(draw.__name__, draw(rng)) for draw in (KINDS[n % len(KINDS)] for n in range(count))]
