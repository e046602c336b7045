"""Word problems in the style of GSM8K: a setting, an opening, one or more steps and a question, with two to four operations.

A template is one choice of opening, steps and question in a setting; names, things and numbers fill it. A template belongs either to
the training problems (`words`) or to the held-out ones (`words_held_out`): the settings `bus` and `garden` and a fifth of the
templates of the other settings are held out. So a held-out problem has a sequence of sentences that no training problem has,
and in two settings also new sentences.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rstar_lab.rl.problems import Problem

TRAINING, HELD_OUT = "words", "words_held_out"
HELD_OUT_SETTINGS = ("bus", "garden")
MAX_OPERATIONS = 4
_HELD_OUT_SHARE = 5  # one template in five
_NAMES = (
    "Ada Amir Anna Ben Carla Chen Clara David Diego Elena Emma Farid Felix Grace Hana Hugo Ines Ivan Jack Jane Kofi Laura Leo "
    "Lily Lucas Maria Maya Mia Nadia Noah Nora Olga Omar Oscar Paul Priya Rosa Ruth Sam Sara Sofia Tariq Tom Vera Victor Yuki "
    "Zoe"
)
# Replacements of an operator that give a program with a wrong result.
_MISTAKES = {"+": "-", "-": "+", "*": "+", "//": "-"}


@dataclass(frozen=True)
class _Sentence:
    """A sentence and its operation on the current amount x: "" for none, "*" or "+" of an opening, else see _OPERATIONS.

    text has the fields {who}, {friend}, {thing} and {n}; in an opening {a} and, for a product or sum, {b}.
    """

    text: str
    operation: str


@dataclass(frozen=True)
class _Setting:
    things: tuple[str, ...]
    openings: tuple[_Sentence, ...]
    steps: tuple[_Sentence, ...]
    questions: tuple[_Sentence, ...]


def _divisors(x: int) -> list[int]:
    return [n for n in range(2, 13) if x % n == 0 and x // n > 1]


def _percentages(x: int) -> list[int]:
    return [n for n in (10, 20, 25, 40, 50, 75) if x * n % 100 == 0]


# operation -> (possible values of n for the amount x and the size of numbers, result, line of the program)
_OPERATIONS: dict[str, tuple[Callable[[int, int], Sequence[int]], Callable[[int, int], int], str]] = {
    "more": (lambda x, size: range(2, size), lambda x, n: x + n, "x = x + {n}"),
    "less": (lambda x, size: range(2, min(x - 1, size)), lambda x, n: x - n, "x = x - {n}"),
    "times": (lambda x, size: range(2, 7), lambda x, n: x * n, "x = x * {n}"),
    "split": (lambda x, size: _divisors(x), lambda x, n: x // n, "x = x // {n}"),
    "share": (lambda x, size: _percentages(x), lambda x, n: x - x * n // 100, "x = x - x * {n} // 100"),
    "missing": (lambda x, size: range(x + 3, x + size), lambda x, n: n - x, "x = {n} - x"),
    "both": (lambda x, size: range(2, 6), lambda x, n: x + x * n, "x = x + x * {n}"),
}

SETTINGS = {
    name: _Setting(
        tuple(content["things"]),
        *(
            tuple(_Sentence(text, operation) for operation, text in content[part])
            for part in ("openings", "steps", "questions")
        ),
    )
    for name, content in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def is_held_out(template: str) -> bool:
    """Return whether a template (`info["template"]` of a problem) is held out from training."""
    if template.partition("/")[0] in HELD_OUT_SETTINGS:
        return True
    return hashlib.blake2b(template.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def named_problem(question: str, answer: object, source: str, level: int, **info: object) -> Problem:
    """Return a synthetic problem, whose id is a hash of its question."""
    name = hashlib.sha256(question.encode()).hexdigest()[:16]
    return Problem(problem_id=name, question=question, answer=str(answer), source=source, difficulty=level, info=info)


def draw(rng: random.Random, family: str, level: int) -> Problem:
    """Return a random problem. family: TRAINING or HELD_OUT. Levels 1 to 3 have 2 to 4 operations, and level 4 larger numbers.

    `info` has the template, and the programs for SFT traces (`families.programs`): a correct one and wrong ones.
    """
    while True:
        problem = _draw(rng, family, level)
        if problem and is_held_out(problem.info["template"]) == (family == HELD_OUT):
            return problem


def _draw(rng: random.Random, family: str, level: int) -> Problem | None:
    """Return a problem of any template, or None if the drawn template has no numbers with whole results."""
    name = rng.choice(list(SETTINGS))
    setting = SETTINGS[name]
    opening, question = rng.choice(setting.openings), rng.choice(setting.questions)
    count = min(level + 1, MAX_OPERATIONS) - bool(opening.operation) - bool(question.operation)
    if not 1 <= count <= len(setting.steps):
        return None
    steps = rng.sample(setting.steps, count)
    if sum(step.operation == "times" for step in (*steps, question)) > 1:
        return None  # the numbers would grow too large
    size = 15 * level + 10
    a = rng.randrange(3, 13) if opening.operation == "*" else rng.randrange(5, 2 * size)
    b = rng.randrange(3, size)
    x = {"": a, "*": a * b, "+": a + b}[opening.operation]
    lines = [f"x = {a} {opening.operation} {b}" if opening.operation else f"x = {a}"]
    who, friend = rng.sample(_NAMES.split(), 2)
    words = {"who": who, "friend": friend, "thing": rng.choice(setting.things)}
    texts = [opening.text.format(a=a, b=b, **words)]
    for sentence in (*steps, question):
        n = 0
        if sentence.operation:
            choices, result, line = _OPERATIONS[sentence.operation]
            if not (possible := choices(x, size)):
                return None
            n = rng.choice(possible)
            x = result(x, n)
            lines.append(line.format(n=n))
        texts.append(sentence.text.format(n=n, **words))
    text = " ".join(texts)
    places = [setting.openings.index(opening), *map(setting.steps.index, steps), setting.questions.index(question)]
    template, wrong = f"{name}/{'-'.join(map(str, places))}", _wrong_programs(rng, lines)
    return named_problem(text, x, family, level, template=template, program=_program(lines), wrong_programs=wrong)


def _program(lines: Sequence[str]) -> str:
    return "\n".join([*lines, "print(x)"])


def _wrong_programs(rng: random.Random, lines: Sequence[str]) -> list[str]:
    """Return a program without one of its steps, and one with a wrong operator."""
    place = rng.randrange(1, len(lines))
    without = [line for number, line in enumerate(lines) if number != place]
    changed = list(lines)
    words = changed[place].split(" ")
    words[3] = _MISTAKES[words[3]]
    changed[place] = " ".join(words)
    return [_program(without), _program(changed)]
