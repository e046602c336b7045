r"""Read the tokens of an answer as a typed value: a Pratt parser for formulas, sets, intervals, relations, matrices and words.

Brackets make a list before commas group digits. A number beside a bracket is a factor, a proper fraction behind an integer a
mixed number. What is not read raises Unreadable.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.brackets import BracketParser
from rstar_lab.verify.cursor import END, RELATIONS
from rstar_lab.verify.formulas import JOINERS
from rstar_lab.verify.tokens import Token, Unreadable, tokens_of
from rstar_lab.verify.values import Based, Choice, Combined, Congruent, Group, Nothing, Relation, Tagged, Text

MAX_TOKENS = 1_500
MAX_WORDS = 4  # of an answer in words that `readable` accepts

_PHRASES = {name: text.strip().split("\n") for name, text in units.TABLES["phrases"].items()}
_INTRODUCTIONS = tuple(tuple(phrase.split()) for phrase in _PHRASES["introductions"])
_QUALIFIERS = frozenset(("for", "where", "forall", "with"))
_DOMAINS = tuple(("sym", name) for name in "ℝℤℕℚℂ")
_NAMING = frozenset(("(", "_", "[", "angle", "triangle", "overline", "'", "frac", "|"))
_BASE_WORDS = {**units.NUMBER_WORDS, "zero": 0}
_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})|(\d{1,2})/(\d{1,2})/(\d{4})")
_HEX = re.compile(
    r"\(?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:0x(?P<hex>[0-9A-Fa-f]+)|(?P<digits>[0-9A-Fa-f]+))\s*\}?\s*\)?\s*"
    r"(?:_\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*\(?\s*(?P<base>\d+|[a-z]+)\s*\)?\s*\}?\s*\}?"
    r"|\(?\s*(?:\\text\s*\{\s*\(?\s*)?(?:in\s+)?base[\s-]*\}?\s*(?P<named>\d+|[a-z]+)\s*\)?\s*\}?\s*\)?)?"
)


def based(text: str) -> Based | None:
    """Return a number in a base, such as `1011_2`, `2D_{16}`, `101 (base 2)` and `0x2D`; None for anything else."""
    match = _HEX.fullmatch(text.strip().strip("$"))
    if not match:
        return None
    if match["hex"]:
        return Based(match["hex"].lower().lstrip("0"), 16)
    name, digits = match["base"] or match["named"] or "", match["digits"].lower().lstrip("0")
    base = int(name) if name.isdigit() and len(name) < 3 else _BASE_WORDS.get(name)
    if base is None or not (any(char.isdigit() for char in digits) or (base == 16 and len(digits) > 1)):
        return None
    return Based(digits, base) if base > 1 else None


@lru_cache(8192)
def read(text: str) -> Any:
    """Return the value of an answer. Raises Unreadable for a text that is of no type."""
    if (found := based(text)) is not None:
        return found
    if date := _DATE.fullmatch(text.strip().strip("$")):
        parts = [int(part) for part in date.groups() if part]
        return Tagged("date", tuple(parts if date[1] else (parts[2], parts[0], parts[1])))
    if re.fullmatch(r"\s*-?\d{1,3}(?:\.\d{3}){2,}\s*", text):
        text = text.replace(".", "")
    tokens = tokens_of(text)
    if not tokens or len(tokens) > MAX_TOKENS:
        raise Unreadable("empty or too long")
    return Parser(tokens).whole()


def plain_words(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return the words of tokens in lower case, without articles, plural s and punctuation."""
    out = [
        token.text.casefold()
        for token in tokens
        if token.text not in (",", ".", "'", "-", ":", "!", "(", ")", "{", "}", ";")
    ]
    if len(out) > 1 and out[0] in ("a", "an", "the"):
        out = out[1:]
    return tuple(word[:-1] if len(word) > 4 and word.endswith("s") and word.isascii() else word for word in out)


class Parser(BracketParser):
    """Reads a whole answer: lists, choices, words, relations, quantities."""

    def whole(self) -> Any:
        self.skip_fillers()
        if not self.tokens[self.at :]:
            raise Unreadable("empty")
        while self.is_sign("{") and self.closing_from("{", "}") == len(self.tokens) - 1:
            self.tokens = self.tokens[self.at + 1 : -1]
            self.at = 0
        self.accept("=")
        if self.is_command("approx"):
            self.at += 1
        if (found := self.worded()) is not None:
            return found
        values, joined = self.items(lambda: self.peek().kind == "end")
        if self.peek().kind != "end":
            raise Unreadable(f"unexpected {self.peek().text}")
        if len(values) == 1:
            return values[0]
        if all(isinstance(value, Choice) and value.value is None for value in values):
            values = [("sym", value.letter) for value in values]
        values = _without_domains(values)
        text = "".join(token.text for token in self.tokens)
        return Group("", tuple(values), "", joined, text) if len(values) > 1 else values[0]

    def skip_fillers(self) -> None:
        texts = [token.text.casefold() if token.kind == "word" else "" for token in self.tokens[:5]]
        for filler in _INTRODUCTIONS:
            rest = self.tokens[len(filler) :]
            if tuple(texts[: len(filler)]) == filler and rest:
                formula = rest[0].kind in ("number", "symbol", "command", "repeating")
                if len(filler) > 1 or formula or rest[0].text in ("=", ":", "(", "-", "＄"):
                    self.at = len(filler)
                    while self.is_sign(":", "="):
                        self.at += 1
                    return

    def worded(self) -> Any:
        """Return the value of an answer that consists of words, or None."""
        rest = self.tokens[self.at :]
        raw = [token.text for token in rest if token.text not in ("{", "}")]
        text = " ".join(raw).casefold().strip(" .!")
        if text in _PHRASES["all_reals"]:
            return ("sym", "ℝ")
        if text in _PHRASES["nothing"] or re.fullmatch(r"(?:there is |there are )?no such [a-z ]{1,40}", text):
            return Nothing()
        if text in _PHRASES["undefined"] or text.replace(" . ", "") in ("d.n.e", "dne"):
            return Text(("undefined",))
        wordlike = all(
            token.kind in ("word", "symbol")
            or (token.kind == "sign" and token.text in ("-", "'", ".", "{", "}", "!", "°"))
            for token in rest
        ) and any(token.kind == "word" for token in rest)
        if not wordlike:
            return None
        words = [token for token in rest if token.kind in ("word", "symbol")]
        if (value := self.number_in_words()) is not None and self.peek().kind == "end":
            return value
        self.at = len(self.tokens) - len(rest)
        if len(words) == 2 and words[0].text.casefold() in ("option", "choice") and len(words[1].text) == 1:
            return Choice(words[1].text.upper())
        if any(token.text.casefold() in ("and", "or") for token in words):
            return None if len(words) <= 9 else Text(plain_words(rest))
        if len(words) == 1 and not words[0].upright and words[0].text.isascii():
            return _letters(words[0].text)
        if all(
            token.kind == "symbol" or (len(token.text) <= 3 and not token.upright and token.text.isascii())
            for token in words
        ) and not all(token.kind == "word" for token in words):
            return None
        minus = [token for token in rest if token.text == "-"]
        if minus and all(len(token.text) <= 3 for token in words):
            return None
        if any(token.space for token in minus) or any(token.text == "°" for token in rest):
            return None
        return Text(plain_words(rest))

    def items(self, ended: Callable[[], bool]) -> tuple[list[Any], str]:
        """Return the values up to the end of a list, and what joins them."""
        values, joined = [], ","
        while True:
            values.append(self.item())
            more = False
            while not ended():
                token = self.peek()
                if self.is_sign(",", ";", "\\\\"):
                    more = True
                elif token.kind in ("word", "command", "sign") and token.text.casefold() in JOINERS:
                    joined, more = JOINERS[token.text.casefold()], True
                elif self.is_command("cup") and not self.listed:
                    joined, more = "or", True
                else:
                    break
                self.at += 1
            if not more or ended():
                return values, joined

    def item(self) -> Any:
        if (choice := self.choice()) is not None:
            return choice
        if (words := self.words_item()) is not None:
            return words
        value = self.statement()
        if self.qualified():
            while self.peek().kind != "end" and not self.is_sign(")", "]", r"\}"):
                self.at += 1
        return value

    def qualified(self) -> bool:
        """Return whether a remark such as `for all real x` starts here."""
        token = self.peek()
        return token.kind in ("word", "command") and token.text.casefold() in _QUALIFIERS and self.listed == 0

    def choice(self) -> Choice | None:
        """Read `(C)`, `C.`, `C) 12`, `(C) 12`, `Option C`; None if a choice does not start here."""
        start = self.at
        if self.is_word("option", "choice") and (len(self.peek(1).text) == 1 or self.is_sign("(", offset=1)):
            self.at += 1
            inner = self.choice()
            if inner is not None:
                return inner
            letter = self.take()
            if letter.kind == "symbol" and letter.text.isupper() and self.item_end(self.at):
                return Choice(letter.text)
            self.at = start
            return None
        opened = self.accept("(")
        letter = self.take()
        if letter.kind == "symbol" and len(letter.text) == 1 and "A" <= letter.text <= "J":
            if opened and self.accept(")") and not self.is_sign("^", "=", "_", "*", "/", "+", "-"):
                return self.choice_value(letter.text, start)
            apart = self.peek(1).space or self.peek(1).kind == "end"
            if not opened and not self.listed and apart and self.is_sign(")", ".", ":"):
                self.at += 1
                return self.choice_value(letter.text, start)
        self.at = start
        return None

    def choice_value(self, letter: str, start: int) -> Choice | None:
        while self.is_sign(".", ":"):
            self.at += 1
        if self.item_end(self.at):
            return Choice(letter)
        upright = any(t.kind == "symbol" and t.upright for t in self.tokens[1:2])
        if start or self.listed or (upright and self.is_sign("(")):
            self.at = start
            return None
        if self.is_sign("(") or any(
            token.text == "(" and self.tokens[i + 1].text in "ABCDEFGHIJ"
            for i, token in enumerate(self.tokens[:-1])
            if i > self.at
        ):
            raise Unreadable("several choices")
        rest = self.sub(self.tokens[self.at :])
        self.at = len(self.tokens)
        return Choice(letter, rest.whole())

    def words_item(self) -> Any:
        """Read an item of a list that consists of words."""
        end = self.at
        while not self.item_end(end):
            token = self.tokens[end]
            hyphen = token.text == "-" and end > self.at
            if token.kind != "word" and not (token.kind == "symbol" and token.upright) and not hyphen:
                return None
            end += 1
        tokens = self.tokens[self.at : end]
        if any(token.text == "-" for token in tokens) and all(len(token.text) <= 3 for token in tokens):
            return None
        following = self.tokens[end] if end < len(self.tokens) else END
        if not tokens or following.kind == "command" or following.text in ("=", "<", ">"):
            return None
        start = self.at
        if (value := self.number_in_words()) is not None and self.at == end:
            return value
        self.at = start
        if len(tokens) == 1 and tokens[0].kind == "symbol":
            return None
        self.at = end
        alone = len(tokens) == 1 and not tokens[0].upright and tokens[0].text.isascii()
        return _letters(tokens[0].text) if alone else Text(plain_words(tokens))

    def relation_sign(self) -> str | None:
        """Return the relation here and move behind it, or None."""
        token = self.peek()
        if self.is_command("not") and self.is_sign("=", offset=1):
            self.at += 2
            return "!="
        if self.is_sign("!") and self.is_sign("=", offset=1) and not self.peek(1).space:
            self.at += 2
            return "!="
        if self.is_sign(":") and self.is_sign("=", offset=1):
            self.at += 1
        if token.kind not in ("sign", "command") or self.peek().text not in RELATIONS:
            return None
        sign = RELATIONS[self.take().text]
        if sign in ("<", ">") and self.is_sign("=") and not self.peek().space:
            self.at += 1
            return sign + "="
        if sign == "=" and self.is_sign("=") and not self.peek().space:
            self.at += 1
        return sign

    def statement(self) -> Any:
        sides, signs, names = [], [], []
        while True:
            start = self.at
            side = self.quantity()
            name = self.name(self.tokens[start : self.at])
            sides.append(side if side is not None else Text(plain_words(self.tokens[start : self.at])))
            names.append(name)
            sign = self.relation_sign()
            if sign is None:
                break
            signs.append(sign)
        modulus = self.modulus()
        if modulus is not None:
            return Congruent(sides[-1], modulus)
        if not signs:
            if side is None:
                raise Unreadable("no formula")
            return sides[0]
        return Relation(tuple(sides), tuple(signs), tuple(names))

    def modulus(self) -> Any:
        """Read `(mod 7)`, `\\pmod 7` behind a formula."""
        start = self.at
        opened = self.accept("(")
        if not self.is_command("mod"):
            self.at = start
            return None
        self.at += 1
        if opened:
            value = self.expression(0)
            self.expect(")")
        else:
            value = self.literal(self.take()) if self.peek().kind == "number" else self.argument()
        return value

    def name(self, tokens: Sequence[Token]) -> str:
        """Return the name that tokens are: `x`, `f(x)`, `S_{10}`, `\\angle ABC`, `(x, y)`, `f'(x)`, `\\text{Area}`; "" for others."""
        kept = [token for token in tokens if token.text not in ("{", "}", "°")]
        if not kept or len(kept) > 24:
            return ""
        if (kept[0].text, kept[-1].text) == ("(", ")") and all(
            token.kind == "symbol" or token.text in (",", "_") or (token.kind == "number" and before.text == "_")
            for before, token in itertools.pairwise(kept[:-1])
        ):
            return "".join(token.text for token in kept)
        kinds = ("symbol", "word")
        if not any(token.kind in kinds for token in kept) or kept[0].kind not in (*kinds, "command", "sign"):
            return ""
        if kept[0].kind == "sign" and kept[0].text != "|":
            return ""
        if kept[0].kind == "command" and kept[0].text not in ("angle", "triangle", "overline", "frac"):
            return ""
        if kept[0].text == "frac" and not (len(kept) == 5 and kept[1].text == kept[3].text == "d"):
            return ""
        depth = 0
        for place, token in enumerate(kept):
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            if depth == 0 and token.kind == "number" and kept[place - 1].text not in ("_", "-", "^"):
                return ""
            if token.kind == "command" and place and not depth:
                return ""
            if token.text == "*":
                return ""
            if depth == 0 and token.kind == "sign":
                following = kept[place + 1].text if place + 1 < len(kept) else "'"
                if token.text not in ("_", "'", ")", "]", "|", "^", "-"):
                    return ""
                if (token.text == "-" and kept[place - 1].text != "^") or (
                    token.text == "^" and following not in ("-", "'")
                ):
                    return ""
        symbols, texts = [token.text for token in kept if token.kind == "symbol"], [token.text for token in kept]
        if len(symbols) > 1 and not _NAMING.intersection(texts) and not all(map(str.isupper, symbols)):
            return ""
        if kept[0].kind == "symbol" and texts[1:2] == ["("] and not {"+", "/", "="}.isdisjoint(texts[2:-1]):
            return ""
        return " ".join(texts)

    def quantity(self) -> Any:
        """Read a formula or a set with its unit; None for a name that is no formula, such as `\\text{Area}`."""
        start = self.at
        currency = self.currency()
        negative = currency is None and self.is_sign("-", "+") and self.peek(1).text in units.CURRENCIES
        if negative:
            sign = self.take().text
            currency = self.currency()
        first = self.peek()
        if first.kind == "word" and currency is None:
            if first.text.casefold() in ("minus", "negative"):
                self.at += 1
                value = self.quantity()
                if not isinstance(value, tuple):
                    raise Unreadable("words")
                return ("neg", value)
            if (spelled := self.number_in_words()) is not None:
                return self.with_unit(spelled, None)
            while (
                self.peek().kind == "word"
                or (self.peek().kind == "symbol" and self.peek().upright)
                or (self.is_sign("(") and self.at > start)
            ):
                self.at = self.closing_from("(", ")") + 1 if self.is_sign("(") else self.at + 1
            if self.is_sign("=") or self.is_command("approx"):
                return None
            self.at = start
        value = self.sets()
        if currency is not None and negative and sign == "-":
            value = ("neg", value)
        if self.is_sign(":") and not self.builder and isinstance(value, tuple):
            return self.ratio(value)
        if self.is_word("to") and isinstance(value, tuple):
            return self.ratio(value)
        if self.is_word("out") and self.is_word("of", offset=1) and isinstance(value, tuple):
            self.at += 2
            return ("/", value, self.expression(0))
        remainder = (self.is_word("remainder") or self.is_symbol("R", "r")) and self.peek(1).kind == "number"
        if remainder and isinstance(value, tuple) and value[0] == "num":
            self.at += 1
            return Tagged("remainder", (value[1], Fraction(self.take().text)))
        return self.with_unit(value, currency)

    def ratio(self, first: Any) -> Any:
        parts = [first]
        clock = first[0] == "num" and self.is_sign(":") and len(self.peek(1).text) == 2
        while self.is_sign(":") or self.is_word("to"):
            self.at += 1
            parts.append(self.expression(6))
        half = self.half_of_day()
        clock = clock and len(parts) == 2 and parts[1][0] == "num" and parts[0][1] < 25 and parts[1][1] < 60
        if half or clock:
            return Tagged("time", (*(part[1] for part in parts), half))
        return Tagged("ratio", tuple(parts))

    def sets(self) -> Any:
        """Read sets joined by operations, or one formula."""
        parts, operation = [self.expression(0)], ""
        while self.is_command("cup", "cap", "setminus"):
            if not _is_set(parts[-1]):
                break
            found = self.take().text
            if operation and found != operation:
                parts = [Combined(operation, tuple(parts))]
            operation = found
            parts.append(self.expression(0))
        return Combined(operation, tuple(parts)) if operation else parts[0]


def _letters(word: str) -> Any:
    """Return the value of a word that stands alone: a product of variables for `xy`, else a text."""
    if len(word) <= 3 and word.islower() and word != "yes" and any(char in "xyz" for char in word):
        value: Any = ("sym", word[0])
        for char in word[1:]:
            value = ("*", value, ("sym", char))
        return value
    if word.casefold() == "none":
        return Nothing()
    return Text((word,) if word.isupper() and len(word) > 1 else plain_words([Token("word", word)]))


def _without_domains(values: list[Any]) -> list[Any]:
    """Return the items of a list without remarks such as `c in R` about a name of another item."""
    if len(values) != 2:
        return values
    relations = [value for value in values if isinstance(value, Relation)]
    domains = [r for r in relations if r.signs == ("in",) and r.sides[1] in _DOMAINS]
    kept = [value for value in values if not any(value is domain for domain in domains)]
    excluded = all(isinstance(value, Relation) and value.signs == ("!=",) for value in kept)
    return values if excluded else kept


def _is_set(value: Any) -> bool:
    return not isinstance(value, tuple) or (value[0] == "sym" and (value[1] in "ℝℤℕℚℂ" or value[1].isupper()))
