r"""Read the tokens of an answer as a typed value: lists, relations, quantities, choices and words of formulas.

What is not read raises Unreadable.
"""

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rstar_lab.verify import units
from rstar_lab.verify.beside import currency, number_in_words, unit_follows, with_unit
from rstar_lab.verify.formulas import SUM, Parser
from rstar_lab.verify.tokens import END, RELATIONS, Token, Unreadable, tokens_of
from rstar_lab.verify.values import Choice, Combined, Group, Nothing, Relation, Tagged, Text, plus_minus, product

PUNCTUATION = frozenset(",.'-:!(){};")  # between words
MAX_WORDS = 4  # of an answer in words that `readable` accepts

_PHRASES = {name: text.strip().split("\n") for name, text in units.TABLES["phrases"].items()}
_INTRODUCTIONS = tuple(tuple(phrase.split()) for phrase in _PHRASES["introductions"])
_LABELS = tuple("ABCDEFGHIJ")
_QUALIFIERS = frozenset(("for", "where", "forall", "with"))
_DOMAINS = tuple(("sym", name) for name in "ℝℤℕℚℂ")
# Names by the kinds of their tokens: s, S: small and capital letter, w: word, n: number, A: an angle, a triangle or a line.
_NAME = re.compile(
    r"\([sS](?:_[nsSw])?(?:,[sS](?:_[nsSw])?)*\)"
    r"|(?:A[sSw]+|\|[^|]*\||w[sSw]*|S+|s|[sS]+(?=[_'(\[|]))(?:'|_[nsSwA]+|\^(?:-?n|'+)|[(\[][^+/=]*[)\]])*"
)
_WORD_SIGNS = frozenset("-'.{}!")  # signs of an item in words
_BASES = {**units.NUMBER_WORDS, **{str(n): n for n in range(100)}}
_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})|(\d{1,2})/(\d{1,2})/(\d{4})")
_TIME = re.compile(
    r"(\d{1,2})(?=:|.*m)(?::([0-5]\d))?(?:\s|\\[ ,~]|\\text\{|\\mathrm\{|~)*(?:([ap])\.?\s?m\.?)?\s*\}?", re.I
)
_GROUPED = re.compile(r"-?\d{1,3}(?:(?:\.\d{3}){2,}|(?: \d{3})+(?:\.\d+)?)")
_TEXT = r"(?:\\(?:text|mathrm)\s*\{)?\s*"
_HEX = re.compile(
    rf"\(?\s*{_TEXT}(?:0x(?P<hex>[0-9A-Fa-f]+)|(?P<digits>[0-9A-Fa-f]+))\s*\}}?\s*\)?\s*"
    rf"(?:_\s*\{{?\s*{_TEXT}\(?\s*(?P<base>\d+|[a-z]+)\s*\)?\s*\}}?\s*\}}?"
    rf"|\(?\s*{_TEXT}\(?\s*(?:in\s+)?base[\s-]*\}}?\s*(?P<named>\d+|[a-z]+)\s*\)?\s*\}}?\s*\)?)?"
)


def based(text: str) -> Tagged | None:
    """Return a number in a base, such as `1011_2`, `2D_{16}`, `101 (base 2)` and `0x2D`; None for anything else."""
    match = _HEX.fullmatch(text)
    if not match:
        return None
    digits = (match["hex"] or match["digits"]).lower().lstrip("0")
    base = 16 if match["hex"] else _BASES.get(match["base"] or match["named"] or "", 0)
    written = match["hex"] or any(char.isdigit() for char in digits) or (base == 16 and len(digits) > 1)
    return Tagged("base", (digits, base)) if base > 1 and written else None


@lru_cache(8192)
def read(text: str) -> Any:
    """Return the value of an answer. Raises Unreadable for a text that is of no type."""
    plain = text.strip().strip("$")
    if (found := based(plain)) is not None:
        return found
    if date := _DATE.fullmatch(plain):
        parts = [int(part) for part in date.groups() if part]
        return Tagged("date", tuple(parts if date[1] else (parts[2], parts[0], parts[1])))
    if (time := _TIME.fullmatch(plain)) and int(time[1]) < 25:
        return Tagged("time", (Fraction(time[1]), Fraction(time[2] or 0), (time[3] or "").lower()))
    if _GROUPED.fullmatch(plain):
        text = plain.replace(" " if " " in plain else ".", "")
    return whole(Parser(tokens_of(text), item, whole))


def plain_words(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return the words of tokens in lower case, without articles, plural s and punctuation."""
    words = [token.text.casefold() for token in tokens if token.text not in PUNCTUATION]
    if len(words) > 1 and words[0] in ("a", "an", "the"):
        words = words[1:]
    return tuple(word[:-1] if len(word) > 4 and word.endswith("s") and word.isascii() else word for word in words)


def whole(parser: Parser) -> Any:
    """Return the value that all tokens of a parser are."""
    _skip_introduction(parser)
    while parser.is_sign("{") and parser.closing("{", "}") == len(parser.tokens) - 1:
        parser.tokens = parser.tokens[parser.at + 1 : -1]
        parser.at = 0
    parser.accept("=")
    parser.accept("approx")
    if (found := _phrase(parser)) is not None:
        return found
    values, joined = parser.items(parser.at_end)
    if not parser.at_end():
        raise Unreadable(f"unexpected {parser.peek().text}")
    values = [sign for value in _without_domains(values) for sign in plus_minus(value)]
    text = "".join(token.text for token in parser.tokens)
    return Group("", tuple(values), "", joined, text) if len(values) > 1 else values[0]


def _skip_introduction(parser: Parser) -> None:
    if parser.peek().kind != "word":
        return
    texts = [token.text.casefold() if token.kind == "word" else "" for token in parser.tokens[:5]]
    for words in _INTRODUCTIONS:
        if tuple(texts[: len(words)]) == words and len(words) < len(parser.tokens):
            parser.at = len(words)
            while parser.is_sign(":", "="):
                parser.at += 1
            return


def _phrase(parser: Parser) -> Any:
    """Return the value of an answer that is a phrase for no solution, all real numbers or an undefined value, or None."""
    rest = parser.tokens[parser.at :]
    text = " ".join(token.text for token in rest if token.text not in ("{", "}")).casefold().strip(" .!")
    if text in _PHRASES["all_reals"]:
        return ("sym", "ℝ")
    if text in _PHRASES["nothing"] or re.fullmatch(r"(?:there (?:is|are) )?no such [a-z ]{1,40}", text):
        return Nothing()
    return Text(("undefined",)) if text in _PHRASES["undefined"] else None


def item(parser: Parser) -> Any:
    """Read the next item of a list."""
    for read_item in (_choice, _words):
        if (found := read_item(parser)) is not None:
            return found
    value = _statement(parser)
    token = parser.peek()
    if token.kind in ("word", "command") and token.text.casefold() in _QUALIFIERS and not parser.listed:
        while not parser.at_end() and not parser.is_sign(")", "]", r"\}"):  # a remark such as `for all real x`
            parser.at += 1
    return value


def _choice(parser: Parser) -> Choice | None:
    """Read `(C)`, `C.`, `C) 12`, `(C) 12`, `Option C`; None and no move if a choice does not start here."""
    start = parser.at
    named = parser.is_word("option", "choice")
    parser.at += named
    opened = parser.accept("(")
    letter = parser.take()
    apart = parser.peek(1).space or parser.peek(1).kind == "end"
    closed = parser.is_sign(")") if opened else parser.is_sign(")", ".", ":") and apart and not parser.listed
    parser.at += closed
    if letter.kind == "symbol" and letter.text in _LABELS and (closed or (named and parser.item_end(parser.at))):
        while parser.is_sign(".", ":"):
            parser.at += 1
        if parser.item_end(parser.at) and not parser.is_sign("="):
            return Choice(letter.text)
        rest = parser.tokens[parser.at :]
        factor = parser.is_sign("^", "=", "_", "*", "/", "+", "-") if opened else letter.upright and parser.is_sign("(")
        if start == 0 and not parser.listed and not factor:
            labels = (one.text == "(" and two.text in _LABELS for one, two in itertools.pairwise(rest))
            if parser.is_sign("(") or any(labels):
                raise Unreadable("several choices")
            parser.at = len(parser.tokens)
            return Choice(letter.text, parser.all_of(rest))
    parser.at = start
    return None


def _words(parser: Parser) -> Any:
    """Read an item that consists of words; short words with letters or hyphens can be a formula (`ab c`, `xy - z`)."""
    start = end = parser.at
    negative = parser.is_word("minus", "negative")
    parser.at += negative
    if (value := number_in_words(parser)) is not None and parser.item_end(parser.at):
        return ("neg", value) if negative else value
    counted = value is not None and not negative and unit_follows(parser, parser.at)
    parser.at = start
    while not parser.item_end(end) and (
        parser.tokens[end].kind in ("word", "symbol") or parser.tokens[end].text in _WORD_SIGNS
    ):
        end += 1
    tokens = parser.tokens[start:end]
    words = [token for token in tokens if token.kind in ("word", "symbol")]
    letters = [token for token in words if token.kind == "symbol" and not token.upright]
    hyphens = [token for token in tokens if token.text == "-"]
    following = parser.tokens[end] if end < len(parser.tokens) else END
    stated = not parser.item_end(end) or following.kind == "command" or following.text in RELATIONS
    short = all(len(token.text) <= 3 for token in words)
    if counted or stated or not words or (short and (letters or hyphens)) or any(token.space for token in hyphens):
        return None
    if len(tokens) == 1 and tokens[0].kind == "symbol":
        return None
    parser.at = end
    alone = len(tokens) == 1 and not tokens[0].upright and tokens[0].text.isascii()
    return _letters(tokens[0].text) if alone else Text(plain_words(tokens))


def _letters(word: str) -> Any:
    """Return the value of a word that stands alone: a product of variables for `xy`, else a text."""
    if len(word) <= 3 and word.islower() and word != "yes" and any(char in "xyz" for char in word):
        return product(word)
    labels = len(word) < 3 or (word.isupper() and word[-1] != "S")
    return Text((word,) if labels else plain_words([Token("word", word)]))


def _statement(parser: Parser) -> Any:
    """Read a quantity, or several with relations between them, or a residue with its modulus."""
    sides: list[Any] = []
    signs: list[str] = []
    names: list[str] = []
    while True:
        start = parser.at
        side = _quantity(parser)
        tokens = parser.tokens[start : parser.at]
        sides.append(side if side is not None else Text(plain_words(tokens)))
        names.append(_name(tokens))
        token = parser.peek()
        if token.kind not in ("sign", "command") or token.text not in RELATIONS:
            break
        signs.append(RELATIONS[parser.take().text])
    if parser.accept("mod"):
        digits = parser.peek().kind == "number"
        return Tagged("mod", (sides[-1], parser.literal(parser.take()) if digits else parser.argument()))
    if signs == ["="] and names[1] and not names[0]:  # `42 = x`
        sides, names = sides[::-1], names[::-1]
    if signs:
        return Relation(tuple(sides), tuple(signs), tuple(names))
    return side


def _name(tokens: Sequence[Token]) -> str:
    """Return the name that tokens are: `x`, `f(x)`, `S_{10}`, `\\angle ABC`, `(x, y)`, `f'(x)`, `\\text{Area}`; "" for others."""
    kept = [token for token in tokens if token.text not in ("{", "}", "°")]
    kinds = "".join(map(_kind_in_name, kept))
    return " ".join(token.text for token in kept) if len(kept) <= 24 and _NAME.fullmatch(kinds) else ""


def _kind_in_name(token: Token) -> str:
    if token.kind == "symbol":
        return "S" if token.text.isupper() else "s"
    if token.kind == "command":
        return "A" if token.text in ("angle", "triangle", "overline") else "C"
    return token.text if token.kind == "sign" and len(token.text) == 1 else token.kind[0]


def _quantity(parser: Parser) -> Any:
    """Read a formula or a set with its unit; None for a name that is no formula, such as `\\text{Area}`."""
    start = parser.at
    money = currency(parser)
    if parser.peek().kind == "word" and money is None:
        if (spelled := number_in_words(parser)) is not None:
            return with_unit(parser, spelled, None)
        while (
            parser.peek().kind == "word"
            or (parser.peek().kind == "symbol" and parser.peek().upright)
            or (parser.is_sign("(") and parser.at > start)
        ):
            parser.at = parser.closing("(", ")") + 1 if parser.is_sign("(") else parser.at + 1
        if parser.is_sign("=") or parser.is_command("approx"):
            return None
        parser.at = start
    value = _sets(parser)
    if isinstance(value, tuple):
        if (parser.is_sign(":") and not parser.builder) or parser.is_word("to"):
            return _ratio(parser, value)
        remainder = parser.is_word("remainder") or parser.is_symbol("R", "r")
        if remainder and parser.peek(1).kind == "number" and value[0] == "num":
            parser.at += 1
            return Tagged("remainder", (value[1], parser.literal(parser.take())[1]))
    return with_unit(parser, value, money)


def _ratio(parser: Parser, first: Any) -> Any:
    parts = [first]
    while parser.is_sign(":") or parser.is_word("to"):
        parser.at += 1
        parts.append(parser.expression(SUM + 1))
    return Tagged("ratio", tuple(parts))


def _sets(parser: Parser) -> Any:
    """Read sets joined by operations, or one formula."""
    parts, operation = [parser.expression(0)], ""
    while parser.is_command("cup", "cap", "setminus") and _is_set(parts[-1]):
        found = parser.take().text
        if operation and found != operation:
            parts = [Combined(operation, tuple(parts))]
        operation = found
        parts.append(parser.expression(0))
    return Combined(operation, tuple(parts)) if operation else parts[0]


def _is_set(value: Any) -> bool:
    return not isinstance(value, tuple) or (value[0] == "sym" and (value in _DOMAINS or value[1].isupper()))


def _without_domains(values: list[Any]) -> list[Any]:
    """Return the items of a list without remarks such as `c in R` about a name of another item."""
    domains = [isinstance(v, Relation) and v.signs == ("in",) and v.sides[1] in _DOMAINS for v in values]
    kept = [value for value, domain in zip(values, domains, strict=True) if not domain]
    excluded = all(isinstance(value, Relation) and value.signs == ("!=",) for value in kept)
    return values if len(values) != 2 or excluded else kept
