"""Kinds of `answer_pairs`: lists, tuples, sets, intervals, named values, matrices, equations."""

import random

Pair = tuple[str, str, bool]

NAMES = list("xyzabcmnkpqrtuv")


def integer(rng: random.Random, low: int = -30, high: int = 60) -> int:
    return rng.randint(low, high)


def tuples(rng: random.Random) -> Pair:
    first, second = rng.sample(range(-20, 40), 2)

    def forms(a, b):
        return [
            f"({a},{b})",
            f"({a}, {b})",
            rf"\left({a},{b}\right)",
            rf"\left({a},\, {b}\right)",
            f"({a}; {b})",
            rf"\langle {a}, {b}\rangle",
            f"$({a},{b})$",
        ]

    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(forms(first, second)), rng.choice(forms(first, second)), True
    if kind == 1:
        return rng.choice(forms(second, first)), rng.choice(forms(first, second)), False
    return rng.choice(forms(first, second + 1)), rng.choice(forms(first, second)), False


def grouped(rng: random.Random) -> Pair:
    """Commas in brackets separate items; without brackets they group digits."""
    first, second = rng.randint(1, 99), rng.randint(100, 999)
    forms = [f"({first},{second})", f"({first}, {second})", f"x={first},y={second}", f"(x,y)=({first},{second})"]
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(forms), rng.choice(forms), True
    if kind == 1:
        return (
            f"{first},{second}",
            rng.choice((f"{first}{second}", f"{first}{{,}}{second}", rf"{first}\,{second}")),
            True,
        )
    if kind == 2:
        return rng.choice((f"({first},{second})", rf"\{{{first},{second}\}}")), f"{first}{second}", False
    return f"({second},{first})", rng.choice(forms), False


def named(rng: random.Random) -> Pair:
    names = sorted(rng.sample([name for name in NAMES if name not in "e i"], rng.choice((2, 2, 3))))
    values = rng.sample(range(-20, 40), len(names))

    def forms(values: list[int]) -> list[str]:
        pairs = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        mixed = rng.sample(pairs, len(pairs))
        inside, numbers = ",".join(names), ",".join(map(str, values))
        return [
            ", ".join(pairs),
            ", ".join(mixed),
            r" \text{ and } ".join(mixed),
            f"({inside})=({numbers})",
            rf"\begin{{cases}}{chr(92) * 2}".replace(chr(92) * 2, "") + (r"\\".join(mixed)) + r"\end{cases}",
            " and ".join(pairs),
        ]

    bare = [f"({', '.join(map(str, values))})", ", ".join(map(str, values))]
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(forms(values)), rng.choice(forms(values)), True
    swapped = values[1:] + values[:1]
    if kind == 1:
        return rng.choice(forms(swapped)), rng.choice(forms(values)), False
    if kind == 2:
        return rng.choice(bare), rng.choice(forms(values)), True
    wrong = [
        f"({', '.join(map(str, swapped))})",
        ", ".join(map(str, swapped)),
        rf"\{{{', '.join(map(str, values))}\}}" if values != sorted(values) else f"({swapped[0]},{swapped[1]})",
    ]
    return rng.choice(wrong[:2]), rng.choice(forms(values)), False


def sets(rng: random.Random) -> Pair:
    values = rng.sample(range(-20, 40), rng.choice((2, 3, 4)))

    def mixed():
        return rng.sample(values, len(values))

    def forms(items):
        return [
            rf"\{{{', '.join(map(str, items))}\}}",
            ", ".join(map(str, items)),
            " or ".join(f"x={item}" for item in items),
            r"\left\{" + ",".join(map(str, items)) + r"\right\}",
            r" \text{ or } ".join(map(str, items)),
            ", ".join(map(str, items[:-1])) + f" and {items[-1]}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(mixed())), rng.choice(forms(mixed())), True
    other = mixed()
    other = [*other[:-1], other[-1] + 50] if rng.random() < 0.5 else other[:-1]
    return rng.choice(forms(other)) if len(other) > 1 else str(other[0]), rng.choice(forms(mixed())), False


def intervals(rng: random.Random) -> Pair:
    low = rng.randint(-15, 10)
    high = low + rng.randint(2, 20)
    name = rng.choice("xtkm")

    def forms(low: int, left: bool, high: int, right: bool) -> list[str]:
        a, b = r"\le" if left else "<", r"\leq" if right else "<"
        return [
            f"{'[' if left else '('}{low},{high}{']' if right else ')'}",
            f"{'[' if left else ']'}{low}, {high}{']' if right else '['}",
            rf"{low} {a} {name} {b} {high}",
            rf"\left{'[' if left else '('}{low}, {high}\right{']' if right else ')'}",
            rf"\{{{name} \mid {low} {a} {name} {b} {high}\}}",
            rf"{name} \in {'[' if left else '('}{low},{high}{']' if right else ')'}",
            rf"{name} {'≥' if left else '>'} {low} \text{{ and }} {name} {'≤' if right else '<'} {high}",
        ]

    left, right = rng.random() < 0.5, rng.random() < 0.5
    if rng.random() < 0.5:
        return rng.choice(forms(low, left, high, right)), rng.choice(forms(low, left, high, right)), True
    misses = [
        (low, not left, high, right),
        (low, left, high, not right),
        (low, left, high + 1, right),
        (low - 1, left, high, right),
    ]
    return rng.choice(forms(*rng.choice(misses))), rng.choice(forms(low, left, high, right)), False


def half_lines(rng: random.Random) -> Pair:
    bound, strict, upper = rng.randint(-15, 15), rng.random() < 0.5, rng.random() < 0.5

    def forms(bound: int, strict: bool, upper: bool) -> list[str]:
        factor = rng.randint(2, 5)
        if upper:
            sign = "<" if strict else r"\leq"
            return [
                f"x {sign} {bound}",
                rf"(-\infty, {bound}{')' if strict else ']'}",
                f"{factor}x {sign} {factor * bound}",
                f"{bound} {'>' if strict else '>='} x",
                rf"\{{x : x {sign} {bound}\}}",
            ]
        sign = ">" if strict else r"\ge"
        return [
            f"x {sign} {bound}",
            rf"{'(' if strict else '['}{bound}, \infty)",
            rf"{'(' if strict else '['}{bound}, +\infty)",
            f"{bound} {'<' if strict else '<='} x",
            rf"x-{abs(bound)} {sign} {bound - abs(bound)}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(bound, strict, upper)), rng.choice(forms(bound, strict, upper)), True
    miss = rng.choice(((bound, not strict, upper), (bound + 1, strict, upper), (bound, strict, not upper)))
    return rng.choice(forms(*miss)), rng.choice(forms(bound, strict, upper)), False


def outside(rng: random.Random) -> Pair:
    centre, radius = rng.randint(-5, 5), rng.randint(1, 9)
    low, high = centre - radius, centre + radius
    inner = f"x-{centre}" if centre > 0 else f"x+{-centre}" if centre < 0 else "x"
    forms = [
        rf"(-\infty,{low})\cup({high},\infty)",
        rf"x<{low} \text{{ or }} x>{high}",
        f"|{inner}|>{radius}",
        rf"x > {high} \lor x < {low}",
        rf"({high},\infty)\cup(-\infty,{low})",
        rf"\left|{inner}\right| > {radius}",
    ]
    misses = [
        rf"(-\infty,{low}]\cup({high},\infty)",
        f"|{inner}|<{radius}",
        rf"({low},{high})",
        rf"x<{low} \text{{ or }} x>{high + 1}",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return rng.choice(misses), rng.choice(forms), False


def excluded(rng: random.Random) -> Pair:
    point = rng.randint(-9, 9)
    forms = [
        rf"x \ne {point}",
        rf"(-\infty,{point})\cup({point},\infty)",
        rf"\mathbb{{R}}\setminus\{{{point}\}}",
        rf"x\in\mathbb{{R}}, x \neq {point}",
        f"x≠{point}",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return (
        rng.choice((rf"x \ne {point + 1}", r"\mathbb{R}", rf"x={point}", rf"(-\infty,{point}]\cup({point},\infty)")),
        rng.choice(forms),
        False,
    )


def matrices(rng: random.Random) -> Pair:
    rows = [[integer(rng, -9, 9) for _ in range(2)] for _ in range(2)]

    def forms(rows: list[list[int]]) -> list[str]:
        kind = rng.choice(("pmatrix", "bmatrix", "matrix", "smallmatrix"))
        gap = rng.choice((r"\\", r"\\[4pt]", r" \\ ", r"\\*", r"\cr "))
        content = gap.join(" & ".join(map(str, row)) for row in rows)
        doubled = r"\\".join("&".join(str(2 * cell) for cell in row) for row in rows)
        return [
            rf"\begin{{{kind}}}{content}\end{{{kind}}}",
            rf"\begin{{pmatrix}}{content}\\ \end{{pmatrix}}",
            rf"\left(\begin{{array}}{{cc}}{content}\end{{array}}\right)",
            rf"\frac12\begin{{pmatrix}}{doubled}\end{{pmatrix}}",
            str(rows).replace(" ", ""),
            rf"A=\begin{{bmatrix}}{content}\end{{bmatrix}}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(rows)), rng.choice(forms(rows)[:5]), True
    other = [row[:] for row in rows]
    other[rng.randrange(2)][rng.randrange(2)] += rng.choice((1, -1, 5))
    if rng.random() < 0.3 and rows[0][1] != rows[1][0]:
        other = [[rows[0][0], rows[1][0]], [rows[0][1], rows[1][1]]]
    return rng.choice(forms(other)[:5]), rng.choice(forms(rows)[:5]), False


def plus_minus(rng: random.Random) -> Pair:
    a, b = rng.randint(1, 9), rng.choice((2, 3, 5, 7))
    forms = [
        rf"{a}\pm\sqrt{{{b}}}",
        rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}",
        rf"\{{{a}-\sqrt{b}, {a}+\sqrt{b}\}}",
        rf"x={a}\pm\sqrt{{{b}}}",
        rf"x={a}+\sqrt{{{b}}} \text{{ or }} x={a}-\sqrt{{{b}}}",
        f"{a} ± √{b}",
    ]
    if rng.random() < 0.5:
        return rng.choice(forms), rng.choice(forms), True
    return rng.choice((rf"{a}+\sqrt{{{b}}}", rf"{a + 1}\pm\sqrt{{{b}}}", rf"{a}\pm{b}")), rng.choice(forms), False


def equations(rng: random.Random) -> Pair:
    a, b = rng.randint(2, 9), rng.randint(1, 20)
    forms = [f"y={a}x+{b}", f"y = {b} + {a}x", f"{a}x-y+{b}=0", f"y-{a}x={b}", rf"f(x)={a}x+{b}"]
    misses = [f"y={a}x-{b}", f"y={a + 1}x+{b}", f"x={a}y+{b}", f"{a}x+y+{b}=0"]
    if rng.random() < 0.5:
        return rng.choice(forms[:4]), rng.choice(forms[:4]), True
    return rng.choice(misses), rng.choice(forms[:4]), False


def ratios(rng: random.Random) -> Pair:
    first, second = rng.sample(range(1, 12), 2)
    factor = rng.randint(1, 4)

    def forms(a, b):
        return [
            f"{a}:{b}",
            f"{a} : {b}",
            f"{a} to {b}",
            rf"{a}\text{{ to }}{b}",
            f"{a * factor} to {b * factor}",
        ]

    if rng.random() < 0.5:
        return rng.choice(forms(first, second)), rng.choice(forms(first, second)), True
    return rng.choice(forms(second, first)), rng.choice(forms(first, second)), False
