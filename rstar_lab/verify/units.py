"""Units, currencies, counted things and words for numbers: the words that may stand beside a number. They are in tables.toml."""

import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "tables.toml").read_text(encoding="utf-8"))

Dimensions = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: its factor and its base units with their exponents."""

    factor: Fraction
    dimensions: Dimensions

    def times(self, other: "Unit", power: int = 1) -> "Unit":
        """Return the product with a power of another unit."""
        exponents = dict(self.dimensions)
        for name, exponent in other.dimensions:
            exponents[name] = exponents.get(name, 0) + exponent * power
        return Unit(self.factor * other.factor**power, tuple(sorted((n, e) for n, e in exponents.items() if e)))


def _base_units(text: str) -> Dimensions:
    pairs = []
    for part in text.split():
        name = part.rstrip("-0123456789") or part
        pairs.append((name, int(part[len(name) :] or 1)))
    return tuple(sorted(pairs))


ONE = Unit(Fraction(1), ())
UNITS: dict[str, Unit] = {}
for _name, (_factor, _base, _spellings) in TABLES["units"].items():
    _unit = Unit(Fraction(_factor), _base_units(_base))
    for _spelling in (_name, *_spellings.split()):
        UNITS[_spelling] = _unit
        if len(_spelling) > 2 and _spelling.isascii():
            for _form in (_spelling + "s", _spelling.capitalize(), _spelling.capitalize() + "s"):
                UNITS.setdefault(_form, _unit)

DEGREE, GENERIC = UNITS["deg"], UNITS["unit"]
PERCENT, PERMILLE = (Unit(Fraction(1, n), (("%", 1),)) for n in (100, 1000))
_NOUNS = {name: text.split() for name, text in TABLES["nouns"].items()}
SINGLE_LETTERS, COUNTED = frozenset(_NOUNS["single_letters"]), frozenset(_NOUNS["counted"] + _NOUNS["counted_foreign"])
CURRENCIES = frozenset(_NOUNS["currency_signs"] + _NOUNS["currency_words"])
MULTIPLIERS: dict[str, int] = TABLES["multipliers"]
NUMBER_WORDS = {name: value for value, name in enumerate(_NOUNS["cardinals"])}
NUMBER_WORDS |= {name: 10 * n for n, name in enumerate(_NOUNS["tens"], 2)}
PARTS: dict[str, int] = {form: value for name, value in TABLES["parts"].items() for form in (name, name + "s")}


_PLURALS = {"ies": "y", "ches": "ch", "shes": "sh", "sses": "ss", "xes": "x", "oes": "o"}


def singular(noun: str) -> str:
    """Return a noun in lower case without the s of the plural."""
    noun = noun.casefold()
    for ending, replacement in _PLURALS.items():
        if noun.endswith(ending) and len(noun) > len(ending) + 1:
            return noun.removesuffix(ending) + replacement
    return noun.removesuffix("s") if len(noun) > 3 and not noun.endswith("ss") else noun
