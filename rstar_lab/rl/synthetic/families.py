"""Synthetic problems with integer answers that a tiny model cannot solve without a tool.

A family has a phrase with fields for numbers, a function that draws the numbers, a function that computes the answer, one correct
program and several wrong ones (`traces` makes SFT conversations from the programs). The numbers grow from level 1 to level 3. Level
4 asks for a second computation on the result of the first.
"""

import functools
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rstar_lab.common.errors import UserError
from rstar_lab.rl.plugins import NAME, load_function
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.synthetic import word_problems
from rstar_lab.rl.synthetic.word_problems import named_problem

LEVELS = (1, 2, 3, 4)
WORDS = (word_problems.TRAINING, word_problems.HELD_OUT)
WRAPPED_LEVEL = 4
_SIZE_WHEN_WRAPPED = 1
_PLAIN = "What is {phrase}?"
_WRAPPED = "Let x be {phrase}. What is the remainder when {p} times x plus {q} is divided by {r}?"

Numbers = dict[str, int]


@dataclass(frozen=True)
class Family:
    """A kind of question and its programs.

    phrase and programs have fields `{name}` for the numbers; the last line of a program is an expression. draw(rng, size)
    returns the numbers. answer(**numbers) returns the true answer, computed without the program. The wrong programs run and
    almost always print another number.
    """

    name: str
    phrase: str
    draw: Callable[[random.Random, int], Numbers]
    answer: Callable[..., int]
    program: str
    wrong: tuple[str, ...]


def _digits(rng: random.Random, count: int) -> int:
    return rng.randrange(10 ** (count - 1), 10**count)


def _modulus(rng: random.Random, size: int) -> int:
    # Odd and large, so that guessing a remainder rarely succeeds.
    return _digits(rng, max(3, size + 1)) | 1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _common_factor(rng: random.Random, size: int) -> Numbers:
    # With a common factor, because most random pairs are coprime and guessing 1 would succeed.
    g, span = rng.randrange(3, 30 * size), 10 * 4**size
    return {"a": g * rng.randrange(2, span), "b": g * rng.randrange(2, span)}


def _interval(rng: random.Random, size: int) -> Numbers:
    a = _digits(rng, size + 1)
    return {"a": a, "b": a + _digits(rng, size + 1)}


def _either(rng: random.Random, size: int) -> Numbers:
    a, b = rng.sample(range(3, 30), 2)
    return {"a": a, "b": b, "n": _digits(rng, size + 2)}


def _choose(rng: random.Random, size: int) -> Numbers:
    n = rng.randrange(10, 30 * size)
    # A prime above n does not divide the binomial coefficient, so the answer is not 0.
    primes = [p for p in range(101 if size < 3 else 1009, 200 if size < 3 else 1400) if _is_prime(p)]
    return {"n": n, "k": rng.randrange(3, n - 2), "m": rng.choice(primes)}


def _primes(rng: random.Random, size: int) -> Numbers:
    # Even ends, so that it does not matter whether they are included.
    a = 2 * rng.randrange(10**size // 2 + 1, 5 * 10**size // 2)
    return {"a": a, "b": a + 2 * rng.randrange(15, 45)}


def _sequence(rng: random.Random, size: int) -> Numbers:
    return {
        "a": rng.randrange(2, 20),
        "b": rng.randrange(3, 20),
        "c": rng.randrange(2, 20),
        "m": _modulus(rng, size),
        "n": rng.randrange(5, 60),
    }


def _numeral(rng: random.Random, size: int) -> Numbers:
    base = rng.randrange(5, 10)
    return {"d": int("".join(str(rng.randrange(1, base)) for _ in range(size + 2))), "b": base}


def _two_numbers(rng: random.Random, size: int) -> Numbers:
    return {"a": _digits(rng, size + 2), "b": _digits(rng, size + 2)}


def _sequence_term(a: int, b: int, c: int, m: int, n: int) -> int:
    power = pow(b, n - 1, m * (b - 1))
    return (a * power + c * ((power - 1) // (b - 1))) % m


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="product_remainder",
            phrase="the remainder when {a} times {b} is divided by {m}",
            draw=lambda rng, size: {"a": _digits(rng, size + 1), "b": _digits(rng, size + 1), "m": _modulus(rng, size)},
            answer=lambda a, b, m: (a % m) * (b % m) % m,
            program="{a} * {b} % {m}",
            wrong=("{a} + {b} % {m}", "{a} * {b} // {m}"),
        ),
        Family(
            name="power_remainder",
            phrase="the remainder when {a} to the power {b} is divided by {m}",
            draw=lambda rng, size: {"a": _digits(rng, size + 1), "b": _digits(rng, 2), "m": _modulus(rng, size)},
            answer=lambda a, b, m: a**b % m,
            program="pow({a}, {b}, {m})",
            wrong=("{a} * {b} % {m}", "pow({b}, {a}, {m})"),
        ),
        Family(
            name="common_divisor",
            phrase="the greatest common divisor of {a} and {b}",
            draw=_common_factor,
            answer=lambda a, b: max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0),
            program="import math\nmath.gcd({a}, {b})",
            wrong=("abs({a} - {b})", "{a} % {b}"),
        ),
        Family(
            name="common_multiple",
            phrase="the least common multiple of {a} and {b}",
            draw=_common_factor,
            answer=lambda a, b: a * b // math.gcd(a, b),
            program="import math\nmath.lcm({a}, {b})",
            wrong=("{a} * {b}", "import math\nmath.gcd({a}, {b})"),
        ),
        Family(
            name="multiples_sum",
            phrase="the sum of the multiples of {k} from {a} to {b}",
            draw=lambda rng, size: _interval(rng, size) | {"k": rng.randrange(3, 15)},
            answer=lambda a, b, k: k * sum(range(-(-a // k), b // k + 1)),
            program="sum(n for n in range({a}, {b} + 1) if n % {k} == 0)",
            wrong=("sum(range({a}, {b} + 1))", "sum(n % {k} for n in range({a}, {b} + 1))"),
        ),
        Family(
            name="either_count",
            phrase="the number of integers from 1 to {n} divisible by {a} or {b}",
            draw=_either,
            answer=lambda a, b, n: n // a + n // b - n // math.lcm(a, b),
            program="sum(x % {a} == 0 or x % {b} == 0 for x in range(1, {n} + 1))",
            wrong=("{n} // {a} + {n} // {b}", "sum(x % {a} == 0 and x % {b} == 0 for x in range(1, {n} + 1))"),
        ),
        Family(
            name="power_digits",
            phrase="the sum of the digits of {a} to the power {b}",
            draw=lambda rng, size: {"a": _digits(rng, size + 1), "b": rng.randrange(11, 99)},
            answer=lambda a, b: sum(a**b // 10**i % 10 for i in range(5 * b)),
            program="sum(map(int, str({a} ** {b})))",
            wrong=("len(str({a} ** {b}))", "sum(map(int, str({a} * {b})))"),
        ),
        Family(
            name="divisor_sum",
            phrase="the sum of the divisors of {n}",
            draw=lambda rng, size: {"n": _digits(rng, size + 2)},
            answer=lambda n: sum({d for e in range(1, math.isqrt(n) + 1) if n % e == 0 for d in (e, n // e)}),
            program="sum(d for d in range(1, {n} + 1) if {n} % d == 0)",
            wrong=("sum(d for d in range(1, {n}) if {n} % d == 0)", "sum({n} % d == 0 for d in range(1, {n} + 1))"),
        ),
        Family(
            name="choose_remainder",
            phrase="the remainder when the number of ways to choose {k} of {n} is divided by {m}",
            draw=_choose,
            answer=lambda n, k, m: math.prod(range(n - k + 1, n + 1)) // math.factorial(k) % m,
            program="import math\nmath.comb({n}, {k}) % {m}",
            wrong=("{n} ** {k} % {m}", "import math\nmath.perm({n}, {k}) % {m}"),
        ),
        Family(
            name="prime_sum",
            phrase="the sum of the primes between {a} and {b}",
            draw=_primes,
            answer=lambda a, b: sum(filter(_is_prime, range(a, b))),
            program="sum(n for n in range({a}, {b}) if all(n % d for d in range(2, n)))",
            wrong=("sum(range({a}, {b}))", "sum(all(n % d for d in range(2, n)) for n in range({a}, {b}))"),
        ),
        Family(
            name="sequence_term",
            phrase="term {n} of the sequence that starts at {a} and goes from x to {b} times x plus {c} modulo {m}",
            draw=_sequence,
            answer=_sequence_term,
            program="x = {a}\nfor _ in range({n} - 1):\n    x = ({b} * x + {c}) % {m}\nx",
            wrong=("x = {a}\nfor _ in range({n}):\n    x = ({b} * x + {c}) % {m}\nx", "({a} + {n} * {b} + {c}) % {m}"),
        ),
        Family(
            name="squares_sum",
            phrase="the sum of the squares from {a} to {b}",
            draw=_interval,
            answer=lambda a, b: (b * (b + 1) * (2 * b + 1) - (a - 1) * a * (2 * a - 1)) // 6,
            program="sum(n * n for n in range({a}, {b} + 1))",
            wrong=("sum(n * n for n in range({a}, {b}))", "sum(range({a}, {b} + 1)) ** 2"),
        ),
        Family(
            name="pair_count",
            phrase="the number of pairs of integers from 1 to {n} whose product is divisible by {k}",
            draw=lambda rng, size: {"n": rng.randrange(15, 75 * size), "k": rng.randrange(3, 30)},
            answer=lambda n, k: sum(n // (k // math.gcd(x, k)) for x in range(1, n + 1)),
            program="sum(x * y % {k} == 0 for x in range(1, {n} + 1) for y in range(1, {n} + 1))",
            wrong=("{n} * {n} // {k}", "sum(x % {k} == 0 for x in range(1, {n} * {n} + 1))"),
        ),
        Family(
            name="base_value",
            phrase="the value in base ten of {d} written in base {b}",
            draw=_numeral,
            answer=lambda d, b: sum(d // 10**i % 10 * b**i for i in range(8)),
            program='int("{d}", {b})',
            wrong=("{d} * {b}", "{d} // {b}"),
        ),
        Family(
            name="exclusive_or",
            phrase="the bitwise exclusive or of {a} and {b}",
            draw=_two_numbers,
            answer=lambda a, b: (a | b) - (a & b),
            program="{a} ^ {b}",
            wrong=("{a} | {b}", "{a} & {b}"),
        ),
        Family(
            name="backwards_sum",
            phrase="the sum of {a} and {b} written backwards",
            draw=_two_numbers,
            answer=lambda a, b: a + sum(int(c) * 10**i for i, c in enumerate(str(b))),
            program="{a} + int(str({b})[::-1])",
            wrong=("{a} + {b}", "int(str({a} + {b})[::-1])"),
        ),
    )
}


@dataclass(frozen=True)
class Programs:
    """Programs of one problem: a correct one, and wrong ones that run and almost always print another number."""

    good: str
    wrong: tuple[str, ...]


def programs(problem: Problem) -> Programs:
    """Return the programs of a problem: those of its `info` (`program` and `wrong_programs`), or those of its family with the
    numbers read from its question.

    Raises UserError if the problem has neither.
    """
    if isinstance(good := problem.info.get("program"), str):
        return Programs(good, tuple(problem.info.get("wrong_programs") or (good,)))
    family = FAMILIES.get(problem.source)
    if family is not None:
        for wrapped in (False, True):
            if match := _pattern(family, wrapped).fullmatch(problem.question):
                numbers = {name: int(value) for name, value in match.groupdict().items()}
                filled = [_program(text, numbers, wrapped) for text in (family.program, *family.wrong)]
                if wrapped:
                    filled.append(_program(family.program, numbers, False))
                return Programs(filled[0], tuple(filled[1:]))
    raise UserError(
        f"problem {problem.problem_id} ({problem.source}) is not of a synthetic family, so there is no program for it"
    )


def synthesize(
    seed: int,
    count: int,
    *,
    levels: Sequence[int] | None = None,
    families: Sequence[str] | None = None,
    exclude: Iterable[Problem] = (),
) -> list[Problem]:
    """Return `count` different problems with equal shares of families and levels. The same seed gives the same list.

    levels, families: from LEVELS and FAMILIES; None: all. A family can also be `words` or `words_held_out`
    (`word_problems`), or a user's `module:function`: (random.Random, level) -> (question, answer). exclude: problems whose
    questions are not used, to keep held-out sets disjoint. Raises UserError for unknown levels or families, and if there are
    not enough different questions.
    """
    levels, names = list(levels or LEVELS), list(families or FAMILIES)
    if unknown := [str(level) for level in levels if level not in LEVELS] + [
        name for name in names if name not in (*FAMILIES, *WORDS) and not NAME.fullmatch(name)
    ]:
        raise UserError(
            f"unknown level or family: {', '.join(unknown)} (levels: {LEVELS}; families: {', '.join((*FAMILIES, *WORDS))})"
        )
    rng = random.Random(seed)
    seen = {problem.question for problem in exclude}
    problems: list[Problem] = []
    kinds: list[tuple[str, int]] = []
    repeats = 0
    while len(problems) < count:
        if not kinds:
            kinds = [(name, level) for name in names for level in levels]
            rng.shuffle(kinds)
        name, level = kinds.pop()
        if name in FAMILIES:
            problem = _problem(rng, FAMILIES[name], level)
        elif name in WORDS:
            problem = word_problems.draw(rng, name, level)
        else:
            problem = _user_problem(rng, name, level)
        if problem.question in seen:
            repeats += 1
            if repeats > 1000 + count:
                raise UserError(
                    f"only {len(problems)} of {count} different problems found: request fewer, or more levels"
                )
            continue
        seen.add(problem.question)
        problems.append(problem)
    return problems


def _problem(rng: random.Random, family: Family, level: int) -> Problem:
    wrapped = level == WRAPPED_LEVEL
    numbers = family.draw(rng, _SIZE_WHEN_WRAPPED if wrapped else level)
    answer = family.answer(**numbers)
    if wrapped:
        wrap = {"p": rng.randrange(3, 50), "q": rng.randrange(3, 50), "r": _digits(rng, 3) | 1}
        answer, numbers = (wrap["p"] * answer + wrap["q"]) % wrap["r"], numbers | wrap
    return named_problem(_question(family, wrapped).format(**numbers), answer, family.name, level)


def _user_problem(rng: random.Random, name: str, level: int) -> Problem:
    result = load_function(name, "synthetic.families", ("rng", "level"))(rng, level)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
        raise UserError(f"synthetic.families: {name} returned {result!r}; expected (question, answer)")
    return named_problem(*result, name, level)


def _question(family: Family, wrapped: bool) -> str:
    return (_WRAPPED if wrapped else _PLAIN).replace("{phrase}", family.phrase)


@functools.cache
def _pattern(family: Family, wrapped: bool) -> re.Pattern[str]:
    text = re.escape(_question(family, wrapped))
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", text))


def _program(text: str, numbers: Numbers, wrapped: bool) -> str:
    *setup, expression = text.format(**numbers).splitlines()
    last = (
        [f"x = {expression}", "print(({p} * x + {q}) % {r})".format(**numbers)] if wrapped else [f"print({expression})"]
    )
    return "\n".join([*setup, *last])
