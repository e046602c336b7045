"""Draws an answer in two notations, or an answer and a near miss. Whether they are equal is known without any parser."""

import random
from collections.abc import Callable
from fractions import Fraction

from helpers.list_pairs import (
    equations,
    excluded,
    grouped,
    half_lines,
    intervals,
    matrices,
    named,
    outside,
    plus_minus,
    ratios,
    sets,
    tuples,
)

Pair = tuple[str, str, bool]
Draw = Callable[[random.Random], Pair]

NAMES = list("xyzabcmnkpqrtuv")
_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen"""
WORDS = _WORDS.split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = _TENS.split()
UNITS = {
    "cm": ("cm", r"\text{ cm}", r"\,\mathrm{cm}", " centimeters"),
    "kg": ("kg", r"\text{ kg}", " kilograms"),
    "km/h": (" km/h", r"\text{ km/h}", r"\ \mathrm{km/h}"),
    "m^2": (r"\text{ m}^2", " square meters", r"\,\mathrm{m}^{2}"),
    "s": (r"\text{ s}", " seconds"),
    "hours": (" hours", r"\text{ hours}"),
}


def integer(rng: random.Random, low: int = -30, high: int = 60) -> int:
    return rng.randint(low, high)


def rational(rng: random.Random) -> Fraction:
    return Fraction(integer(rng, -40, 40), rng.randint(2, 12))


def write(value: Fraction | int, rng: random.Random) -> str:
    """Return one of the notations of a rational number."""
    value = Fraction(value)
    sign, size = ("-" if value < 0 else ""), abs(value)
    top, bottom = size.numerator, size.denominator
    forms = []
    if bottom == 1:
        forms += [
            f"{sign}{top}",
            f"{sign}{top}.0",
            f"{sign}{top}.00",
            rf"{sign}\frac{{{3 * top}}}{{3}}",
            f"${sign}{top}$",
            rf"\({sign}{top}\)",
            f"{sign}{top}.",
        ]
        if top >= 1000:
            forms += [f"{sign}{top:,}", f"{sign}{top:,}".replace(",", "{,}"), f"{sign}{top:,}".replace(",", r"\,")]
        if sign == "":
            forms.append(f"+{top}")
    else:
        factor = rng.randint(1, 3)
        forms += [
            rf"{sign}\frac{{{top}}}{{{bottom}}}",
            rf"{sign}\dfrac{{{top * factor}}}{{{bottom * factor}}}",
            f"{sign}{top}/{bottom}",
            rf"\frac{{{sign}{top}}}{{{bottom}}}",
            rf"{sign}\tfrac{{{top}}}{{{bottom}}}",
            rf"{sign}\left(\frac{{{top}}}{{{bottom}}}\right)",
        ]
        if top < 10 and bottom < 10:
            forms += [rf"{sign}\frac{top}{bottom}", rf"{sign}\frac {top}{bottom}", rf"{sign}\frac{top}{{{bottom}}}"]
        if top > bottom:
            whole, rest = divmod(top, bottom)
            forms += [
                rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}",
                f"{sign}{whole} {rest}/{bottom}",
                rf"{sign}{whole}\tfrac{{{rest}}}{{{bottom}}}",
                rf"{sign}{whole}\,\frac{{{rest}}}{{{bottom}}}",
            ]
        if bottom in (2, 4, 5, 8, 10):
            forms += [f"{sign}{float(size):g}", f"{sign}{float(size):g}0"]
    return rng.choice(forms)


def expression(rng: random.Random, depth: int = 3) -> tuple[str, Fraction]:
    """Return an arithmetic expression in LaTeX and its value, computed while it is drawn."""
    if depth == 0 or rng.random() < 0.2:
        value = rng.randint(1, 12)
        return str(value), Fraction(value)
    (one, a), (two, b) = expression(rng, depth - 1), expression(rng, depth - 1)
    kind = rng.randrange(9)
    if kind == 0:
        return f"{one}+({two})", a + b
    if kind == 1:
        return f"{one}-({two})", a - b
    if kind == 2:
        return rf"({one}) \cdot ({two})", a * b
    if kind == 3:
        return f"({one})({two})", a * b
    if kind == 4:
        factor = rng.randint(2, 9)
        return f"{factor}({one})", factor * a
    if kind == 5 and b:
        return rf"\frac{{{one}}}{{{two}}}", a / b
    if kind == 6:
        return rf"\left({one}\right)^2", a * a
    if kind == 7:
        factor = rng.randint(2, 9)
        return rf"{factor}\left({one}\right)\left({two}\right)", factor * a * b
    return rf"({one})\times({two})", a * b


def numbers(rng: random.Random) -> Pair:
    value = rng.choice((Fraction(integer(rng)), rational(rng), Fraction(rng.randint(1000, 9_999_999))))
    if rng.random() < 0.5:
        return write(value, rng), write(value, rng), True
    other = rng.choice(
        (-value if value else Fraction(1), value + 1, value * 10 if value else Fraction(7), value + Fraction(1, 7))
    )
    return write(other, rng), write(value, rng), False


def arithmetic(rng: random.Random) -> Pair:
    text, value = expression(rng)
    if rng.random() < 0.5:
        return text, write(value, rng), True
    return text, write(value + rng.choice((1, -1, Fraction(1, 3), rng.randint(2, 9))), rng), False


def roots(rng: random.Random) -> Pair:
    factor, radicand = rng.randint(1, 9), rng.choice((2, 3, 5, 6, 7, 10, 11))
    other = factor + rng.randint(1, 3)

    def forms(a):
        return [
            rf"{a}\sqrt{{{radicand}}}",
            rf"\sqrt{{{a * a * radicand}}}",
            rf"{a}\sqrt {radicand}" if radicand < 10 else rf"{a}\sqrt{{{radicand}}}",
            f"{a}√{radicand}" if radicand < 10 else f"{a}√({radicand})",
            f"{a}*sqrt({radicand})",
            rf"\sqrt{{{radicand}}}\cdot {a}",
            rf"{a}({radicand})^{{1/2}}",
            rf"\frac{{{a * radicand}}}{{\sqrt{{{radicand}}}}}",
        ]

    equal = rng.random() < 0.5
    return rng.choice(forms(factor if equal else other)), rng.choice(forms(factor)), equal


def constants(rng: random.Random) -> Pair:
    top, bottom = rng.randint(1, 9), rng.randint(2, 7)

    def forms(a):
        return [
            rf"\frac{{{a}\pi}}{{{bottom}}}",
            rf"\frac{{{a}}}{{{bottom}}}\pi",
            rf"{a}\pi/{bottom}",
            f"{a}π/{bottom}",
            rf"\frac{{{a}}}{{{bottom}}}(\pi)",
            rf"\pi\cdot\frac{{{a}}}{{{bottom}}}",
            f"{a}*pi/{bottom}",
        ]

    equal = rng.random() < 0.5
    return rng.choice(forms(top if equal else top + 1)), rng.choice(forms(top)), equal


def polynomials(rng: random.Random) -> Pair:
    name = rng.choice(NAMES)
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.randint(1, 9)
    forms = [
        f"{a}{name}^2+{b}{name}-{c}",
        f"-{c}+{b}{name}+{a}{name}^{{2}}",
        rf"{a}{name}\cdot {name}+{b}{name}-{c}",
        f"{name}({a}{name}+{b})-{c}",
        f"{b}{name}+{a}{name}^2-{c}",
    ]
    misses = [
        f"{a}{name}^2-{b}{name}-{c}",
        f"{a}{name}^2+{b}{name}-{c + 1}",
        f"{a}{name}^3+{b}{name}-{c}",
        f"{a}{name.upper()}^2+{b}{name.upper()}-{c}",
        f"{a}({name}^2+{b}{name}-{c})",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return rng.choice(misses), rng.choice(forms), False


def quantities(rng: random.Random) -> Pair:
    value, unit = rng.randint(2, 90), rng.choice(list(UNITS))

    def forms(value, unit):
        return [f"{value}{form}" for form in UNITS[unit]]

    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(forms(value, unit)), rng.choice(forms(value, unit)), True
    if kind == 1:
        return rng.choice((str(value), *forms(value, unit))), str(value), True
    if kind == 2:
        return rng.choice(forms(value + 1, unit)), rng.choice(forms(value, unit)), False
    other = rng.choice([name for name in UNITS if name != unit])
    return rng.choice(forms(value, other)), rng.choice(forms(value, unit)), False


def converted(rng: random.Random) -> Pair:
    value = rng.randint(1, 9)
    small, large, factor = rng.choice(
        (
            (" minutes", " hours", 60),
            (r"\text{ cm}", r"\text{ m}", 100),
            (" g", " kg", 1000),
            (r"\text{ seconds}", r"\text{ minutes}", 60),
        )
    )
    small = small.replace(" g", r"\text{ g}")
    equal = rng.random() < 0.5
    return f"{value * factor + (0 if equal else 1)}{small}", f"{value}{large}", equal


def percentages(rng: random.Random) -> Pair:
    value = rng.randint(2, 99)
    forms = [
        rf"{value}\%",
        f"{value}%",
        f"{value} percent",
        rf"{value}\text{{ percent}}",
        str(value),
        f"{value / 100:.2f}",
        rf"\frac{{{value}}}{{100}}",
    ]
    gold = forms[rng.randrange(4)]
    if rng.random() < 0.5:
        return rng.choice(forms), gold, True
    return rng.choice((rf"{value + 1}\%", rf"0.{value}\%", f"{value * 10}%", f"{value / 1000:.4f}")), gold, False


def currencies(rng: random.Random) -> Pair:
    value = rng.randint(2, 9000)
    forms = [
        rf"\${value}",
        f"${value}",
        f"{value} dollars",
        rf"\${value:,}",
        rf"\${value}.00",
        f"{value}",
        rf"{value}\text{{ dollars}}",
        f"USD {value}",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return (
        rng.choice((rf"\${value + 1}", f"€{value}", f"{value} euros", rf"\${value}0")),
        rng.choice([form for form in forms if form != str(value)]),
        False,
    )


def scales(rng: random.Random) -> Pair:
    """Words beside a number that change it."""
    value = rng.randint(2, 40)
    word = rng.choice(
        (
            "lakh",
            "crore",
            "mille",
            "millones",
            "Millionen",
            "kilo",
            "sevenths",
            "ninths",
            "ppm",
            "max",
            "squared",
            "root",
            "thousand",
            "million",
            "dozen",
            "inverse",
            "гектар",
        )
    )
    return rng.choice((f"{value} {word}", rf"{value}\text{{ {word}}}")), str(value), False


def words(rng: random.Random) -> Pair:
    groups = [
        ["yes", "Yes", r"\text{yes}", "Yes.", r"\textbf{Yes}", "YES"],
        ["no", "No", r"\text{No}", "No."],
        ["true", "True", r"\text{True}"],
        ["false", r"\text{False}", "False."],
        [
            "no solution",
            r"\text{no solution}",
            "No solutions",
            r"\varnothing",
            r"\emptyset",
            "∅",
            r"\text{No solution.}",
        ],
        ["DNE", r"\text{DNE}", "does not exist", r"\text{undefined}"],
        ["infinity", r"\infty", "∞", r"+\infty"],
        ["even", r"\text{even}", "Even"],
        ["odd", r"\text{odd}"],
    ]
    first, second = rng.sample(groups, 2)
    if rng.random() < 0.5:
        return rng.choice(first), rng.choice(first), True
    return rng.choice(first), rng.choice(second), False


def choices(rng: random.Random) -> Pair:
    letter, other = rng.sample("ABCDE", 2)

    def forms(letter):
        return [
            letter,
            f"({letter})",
            f"{letter}.",
            rf"\text{{({letter})}}",
            rf"\textbf{{({letter})}}",
            rf"\text{{Option {letter}}}",
            f"Option {letter}",
            rf"\mathrm{{{letter}}}",
            rf"\boxed{{{letter}}}",
            f"({letter}) {rng.randint(2, 9)}",
        ]

    equal = rng.random() < 0.5
    return rng.choice(forms(letter if equal else other)), rng.choice(forms(letter)[:8]), equal


def spelled(rng: random.Random) -> Pair:
    units = WORDS
    tens = TENS

    def word(value: int) -> str:
        if value < 20:
            return units[value]
        if value < 100:
            return tens[value // 10 - 2] + (rng.choice("- ") + units[value % 10] if value % 10 else "")
        rest = value % 100
        return f"{units[value // 100]} hundred" + (rng.choice((" and ", " ")) + word(rest) if rest else "")

    value = rng.randint(0, 999)
    equal = rng.random() < 0.5
    text = word(value if equal else value + rng.choice((1, 10, 100)) if value < 890 else value - 1)
    return rng.choice((text, rf"\text{{{text}}}", text.capitalize())), str(value), equal


def letter_case(rng: random.Random) -> Pair:
    first, second = rng.sample("abkmnprt", 2)
    forms = [f"{first.upper()}+{second}", f"{second}+{first.upper()}"]
    misses = [f"{first}+{second.upper()}", f"{first}+{second}", f"{first.upper()}+{second.upper()}"]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return rng.choice(misses), rng.choice(forms), False


def scientific(rng: random.Random) -> Pair:
    mantissa, exponent = rng.randint(11, 99), rng.randint(3, 20) * rng.choice((1, -1))

    def forms(m, e):
        return [
            rf"{m / 10} \times 10^{{{e}}}",
            f"{m / 10}e{e}",
            rf"{m / 10} \cdot 10^{{{e}}}",
            f"{m / 10}*10^{e}",
            rf"{m}\times10^{{{e - 1}}}",
            rf"{m / 10}×10^{{{e}}}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(mantissa, exponent)), rng.choice(forms(mantissa, exponent)), True
    return (
        rng.choice(forms(mantissa + 1, exponent) + forms(mantissa, exponent + 1) + forms(mantissa, -exponent)),
        rng.choice(forms(mantissa, exponent)),
        False,
    )


def repeating(rng: random.Random) -> Pair:
    digit = rng.randint(1, 8)

    def forms(d):
        return [
            rf"0.\overline{{{d}}}",
            f"0.({d})",
            rf"\frac{{{d}}}{{9}}",
            rf"0.{d}{d}{d}\ldots",
            f"0.{d}{d}{d}...",
            rf"0.\dot{{{d}}}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(digit)), rng.choice(forms(digit)), True
    return rng.choice((*forms(digit + 1), f"0.{digit}", f"0.{digit}{digit}{digit}")), rng.choice(forms(digit)), False


def bases(rng: random.Random) -> Pair:
    base, digits = rng.choice((2, 3, 5, 7, 8)), ""
    digits = "1" + "".join(str(rng.randrange(base)) for _ in range(4))

    def forms(d, b):
        return [
            f"{d}_{b}",
            f"{d}_{{{b}}}",
            rf"{d}_{{({b})}}",
            f"{d} (base {b})",
            f"{d} base {b}",
            rf"{d}_{{\text{{{b}}}}}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(digits, base)), rng.choice(forms(digits, base)), True
    return rng.choice(forms(digits + "0", base) + forms(digits, base + 1)), rng.choice(forms(digits, base)), False


def binomials(rng: random.Random) -> Pair:
    from math import comb

    n, k = rng.randint(4, 12), rng.randint(2, 3)
    forms = [
        rf"\binom{{{n}}}{{{k}}}",
        rf"{{{n} \choose {k}}}",
        f"C({n},{k})",
        rf"{{}}^{{{n}}}C_{{{k}}}",
        rf"\frac{{{n}!}}{{{k}!({n}-{k})!}}",
        str(comb(n, k)),
        rf"\dbinom{{{n}}}{{{k}}}",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return (
        rng.choice(
            (
                rf"\binom{{{n + 1}}}{{{k}}}",
                str(comb(n, k) + 1),
                f"C({n},{k + 1})" if comb(n, k) != comb(n, k + 1) else str(n * 1000),
            )
        ),
        rng.choice(forms),
        False,
    )


def complex_numbers(rng: random.Random) -> Pair:
    a, b = rng.randint(1, 9), rng.randint(2, 9)

    def forms(a, b):
        return [
            f"{a}+{b}i",
            f"{b}i+{a}",
            rf"{a}+{b}\mathrm{{i}}",
            rf"{a} + {b}\cdot i",
            f"{a}+i{b}",
            rf"i({b})+{a}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(a, b)), rng.choice(forms(a, b)), True
    return rng.choice((f"{a}-{b}i", f"{a}+{b + 1}i", f"{a + b}", f"-{a}+{b}i")), rng.choice(forms(a, b)), False


def named_value(rng: random.Random) -> Pair:
    value, name = (
        rational(rng),
        rng.choice(("x", "N", "m", "S_{10}", "f(2)", r"\angle ABC", "a_5", "P(A)", r"\text{Area}", "AB", "p+q")),
    )
    if rng.random() < 0.5:
        return f"{name}={write(value, rng)}", write(value, rng), True
    return f"{name}={write(value + 1, rng)}", write(value, rng), False


KINDS: tuple[Draw, ...] = (
    numbers,
    arithmetic,
    roots,
    constants,
    polynomials,
    tuples,
    grouped,
    named,
    sets,
    intervals,
    half_lines,
    outside,
    excluded,
    matrices,
    quantities,
    converted,
    percentages,
    currencies,
    scales,
    words,
    choices,
    spelled,
    letter_case,
    ratios,
    scientific,
    repeating,
    bases,
    binomials,
    plus_minus,
    equations,
    complex_numbers,
    named_value,
)


def pairs(seed: int, count: int) -> list[tuple[str, Pair]]:
    """Return (kind, (candidate, true answer, whether they are equal)) for `count` pairs."""
    rng = random.Random(seed)
    return [(draw.__name__, draw(rng)) for draw in (KINDS[n % len(KINDS)] for n in range(count))]
