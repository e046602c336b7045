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
    """A sentence and its operation on the current amount x.

    text has the fields {who}, {friend}, {thing} and {n}. operation: see _OPERATIONS; "" for none.
    """

    text: str
    operation: str = ""


@dataclass(frozen=True)
class _Opening:
    """The first sentence, with the fields {a} and, for a product or sum, {b}. operation: "", "*" or "+"."""

    text: str
    operation: str = ""


@dataclass(frozen=True)
class _Setting:
    things: tuple[str, ...]
    openings: tuple[_Opening, ...]
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

_S, _O = _Sentence, _Opening
SETTINGS = {
    "collection": _Setting(
        ("marbles", "stickers", "stamps", "coins", "cards", "shells", "buttons", "toy cars"),
        (
            _O("{who} has {a} {thing}."),
            _O("{who} has {a} boxes with {b} {thing} in each box.", "*"),
            _O("{who} owns {a} red {thing} and {b} blue {thing}.", "+"),
            _O("{who} starts a collection with {a} {thing}."),
        ),
        (
            _S("{who} gives {n} {thing} to {friend}.", "less"),
            _S("{who} loses {n} {thing}.", "less"),
            _S("{friend} gives {who} {n} more {thing}.", "more"),
            _S("Then {who} buys {n} {thing}.", "more"),
            _S("After a year {who} has {n} times as many {thing}.", "times"),
            _S("{who} sells {n}% of the {thing}.", "share"),
        ),
        (
            _S("How many {thing} does {who} have now?"),
            _S("{who} puts all {thing} into {n} albums, the same number in each. How many {thing} are in one album?", "split"),
            _S("{who} sells all of them for {n} dollars each. How many dollars does {who} get?", "times"),
            _S("{who} wants to have {n} {thing}. How many more {thing} does {who} need?", "missing"),
            _S("{friend} has {n} times as many {thing} as {who}. How many {thing} do they have together?", "both"),
        ),
    ),
    "bakery": _Setting(
        ("muffins", "cookies", "rolls", "pies", "cupcakes", "bagels"),
        (
            _O("A bakery makes {a} {thing} in the morning."),
            _O("{who} bakes {a} trays of {thing} with {b} {thing} on each tray.", "*"),
            _O("{who} bakes {a} {thing} on Monday and {b} {thing} on Tuesday.", "+"),
        ),
        (
            _S("Customers buy {n} {thing}.", "less"),
            _S("{n} {thing} are burnt and thrown away.", "less"),
            _S("Another {n} {thing} come out of the oven.", "more"),
            _S("For a party the number of {thing} is multiplied by {n}.", "times"),
            _S("{n}% of the {thing} are eaten before noon.", "share"),
        ),
        (
            _S("How many {thing} are left?"),
            _S("The {thing} are packed into bags of {n}. How many bags are there?", "split"),
            _S("Each of them costs {n} dollars. How many dollars do all of these {thing} cost?", "times"),
            _S("A customer orders {n} {thing}. How many {thing} are missing?", "missing"),
        ),
    ),
    "money": _Setting(
        ("dollars", "euros"),
        (
            _O("{who} saves {a} {thing}."),
            _O("{who} earns {a} {thing} an hour and works for {b} hours.", "*"),
            _O("{who} gets {a} {thing} from an aunt and {b} {thing} from an uncle.", "+"),
            _O("{who} has {a} {thing} in a bank account."),
        ),
        (
            _S("{who} spends {n} {thing} on a book.", "less"),
            _S("A cinema ticket costs {who} {n} {thing}.", "less"),
            _S("{who} finds {n} {thing} in a coat.", "more"),
            _S("{friend} pays back {n} {thing} to {who}.", "more"),
            _S("In a good month this amount grows to {n} times as much.", "times"),
            _S("{who} donates {n}% of the money.", "share"),
        ),
        (
            _S("How many {thing} does {who} have now?"),
            _S("{who} divides the money equally among {n} children. How many {thing} does each child get?", "split"),
            _S("A bicycle costs {n} {thing}. How many more {thing} does {who} need to buy it?", "missing"),
            _S("{friend} has {n} times as much money. How many {thing} do {who} and {friend} have together?", "both"),
        ),
    ),
    "reading": _Setting(
        ("pages",),
        (
            _O("{who} reads {a} {thing} on Saturday."),
            _O("{who} reads {a} {thing} every day for {b} days.", "*"),
            _O("{who} reads {a} {thing} before lunch and {b} {thing} after lunch.", "+"),
        ),
        (
            _S("On the next day {who} reads {n} {thing} more.", "more"),
            _S("On the train {who} reads another {n} {thing}.", "more"),
            _S("{friend} has read {n} {thing} less than {who} in total.", "less"),
            _S("Over the holidays the total becomes {n} times as large.", "times"),
        ),
        (
            _S("How many {thing} is that?"),
            _S("The book has {n} {thing}. How many {thing} of the book remain after that number?", "missing"),
            _S("This number of {thing} is read in {n} equal parts. How many {thing} does one part have?", "split"),
        ),
    ),
    "road": _Setting(
        ("kilometers", "miles"),
        (
            _O("A truck drives {a} {thing} on the first day."),
            _O("{who} cycles {a} {thing} a day for {b} days.", "*"),
            _O("{who} drives {a} {thing} to the lake and {b} {thing} to the hotel.", "+"),
        ),
        (
            _S("Then come {n} {thing} through the hills.", "more"),
            _S("A detour adds {n} {thing}.", "more"),
            _S("A new bridge makes the whole trip {n} {thing} shorter.", "less"),
            _S("The whole trip is made {n} times.", "times"),
        ),
        (
            _S("How many {thing} is that in all?"),
            _S("One liter of fuel lasts for {n} {thing}. How many liters are used?", "split"),
            _S("The goal is {n} {thing}. How many {thing} are missing?", "missing"),
            _S("Each of these {thing} costs {n} dollars. How many dollars does it cost?", "times"),
        ),
    ),
    "factory": _Setting(
        ("toys", "lamps", "chairs", "bottles", "radios", "shoes"),
        (
            _O("A factory has {a} {thing} in stock."),
            _O("A machine makes {a} {thing} an hour and runs for {b} hours.", "*"),
            _O("One machine makes {a} {thing} and another one makes {b} {thing}.", "+"),
        ),
        (
            _S("{n} of the {thing} are broken and removed.", "less"),
            _S("A shop takes {n} {thing}.", "less"),
            _S("The night shift adds {n} {thing}.", "more"),
            _S("With new machines the number of {thing} becomes {n} times as large.", "times"),
            _S("{n}% of the {thing} are shipped.", "share"),
        ),
        (
            _S("How many {thing} are there at the end?"),
            _S("The {thing} are loaded into {n} trucks, equally many into each. How many {thing} are in one truck?", "split"),
            _S("Each is sold for {n} dollars. How many dollars does the factory earn?", "times"),
            _S("An order asks for {n} {thing}. How many more {thing} must be made?", "missing"),
        ),
    ),
    "school": _Setting(
        ("pencils", "notebooks", "crayons", "rulers", "erasers"),
        (
            _O("A school has {a} {thing}."),
            _O("A teacher opens {a} packs of {b} {thing}.", "*"),
            _O("There are {a} {thing} in one cupboard and {b} {thing} in another cupboard.", "+"),
        ),
        (
            _S("The children use up {n} {thing}.", "less"),
            _S("{who} takes {n} {thing} to another school.", "less"),
            _S("Parents donate {n} {thing}.", "more"),
            _S("A sponsor multiplies the number of {thing} by {n}.", "times"),
            _S("{n}% of the {thing} are lost.", "share"),
        ),
        (
            _S("How many {thing} does the school have then?"),
            _S("The {thing} are shared equally among {n} classes. How many {thing} does each class get?", "split"),
            _S("For a test {n} {thing} are necessary. How many {thing} are missing?", "missing"),
            _S("Another school has {n} times as many {thing}. How many {thing} do both schools have together?", "both"),
        ),
    ),
    "water": _Setting(
        ("liters", "gallons"),
        (
            _O("A tank holds {a} {thing} of water."),
            _O("A pump fills a tank with {a} {thing} a minute for {b} minutes.", "*"),
            _O("{who} pours {a} {thing} and then {b} {thing} of water into a barrel.", "+"),
        ),
        (
            _S("{n} {thing} leak out.", "less"),
            _S("{who} uses {n} {thing} for the plants.", "less"),
            _S("Rain adds {n} {thing}.", "more"),
            _S("After a storm there is {n} times as much water.", "times"),
            _S("{n}% of the water evaporates.", "share"),
        ),
        (
            _S("How many {thing} of water are there now?"),
            _S("The water is filled into {n} buckets, equally much into each. How many {thing} are in one bucket?", "split"),
            _S("It holds up to {n} {thing}. How many more {thing} fit in?", "missing"),
        ),
    ),
    "bus": _Setting(
        ("passengers",),
        (
            _O("A bus leaves the station with {a} {thing}."),
            _O("{a} buses with {b} {thing} each arrive at a stadium.", "*"),
            _O("{a} {thing} sit upstairs and {b} {thing} sit downstairs.", "+"),
        ),
        (
            _S("At the first stop {n} {thing} get off.", "less"),
            _S("{n} tired {thing} go home.", "less"),
            _S("{n} other {thing} join them.", "more"),
            _S("An hour later there are {n} times as many {thing}.", "times"),
            _S("{n}% of the {thing} leave.", "share"),
        ),
        (
            _S("How many {thing} are there now?"),
            _S("They form {n} groups of the same size. How many {thing} are in each group?", "split"),
            _S("Everyone pays {n} dollars. How many dollars is that?", "times"),
            _S("There are {n} seats. How many seats are free?", "missing"),
        ),
    ),
    "garden": _Setting(
        ("apples", "tomatoes", "carrots", "lemons", "pumpkins"),
        (
            _O("{who} picks {a} {thing}."),
            _O("{who} plants {a} rows with {b} {thing} in each row.", "*"),
            _O("{who} harvests {a} {thing} and {friend} harvests {b} {thing}; they put them together.", "+"),
        ),
        (
            _S("Birds destroy {n} {thing}.", "less"),
            _S("A neighbour gets {n} {thing} as a present.", "less"),
            _S("{friend} brings {n} {thing} from another field.", "more"),
            _S("With a new fertilizer there are {n} times as many {thing}.", "times"),
            _S("{n}% of the {thing} rot.", "share"),
        ),
        (
            _S("How many {thing} are left over?"),
            _S("They fill baskets of {n} {thing}. How many baskets do they fill?", "split"),
            _S("At the market each one brings {n} dollars. How many dollars do they bring in total?", "times"),
            _S("{friend} needs {n} {thing} for a feast. How many {thing} are still missing?", "missing"),
        ),
    ),
}  # fmt: skip


def is_held_out(template: str) -> bool:
    """Return whether a template (`info["template"]` of a problem) is held out from training."""
    if template.partition("/")[0] in HELD_OUT_SETTINGS:
        return True
    return hashlib.blake2b(template.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def draw(rng: random.Random, family: str, level: int) -> Problem:
    """Return a random problem. family: TRAINING or HELD_OUT. Levels 1 to 3 have 2 to 4 operations, and level 4 larger numbers.

    `info` has the template, and the programs for SFT traces (`families.programs`): a correct one and wrong ones.
    """
    while True:
        problem = _draw(rng, level)
        if problem and is_held_out(problem.info["template"]) == (family == HELD_OUT):
            return problem.model_copy(update={"source": family})


def _draw(rng: random.Random, level: int) -> Problem | None:
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
    return Problem(
        problem_id=hashlib.sha256(text.encode()).hexdigest()[:16],
        question=text,
        answer=str(x),
        difficulty=level,
        info={
            "template": f"{name}/{'-'.join(map(str, places))}",
            "program": _program(lines),
            "wrong_programs": _wrong_programs(rng, lines),
        },
    )


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
