r"""Split an answer into tokens: numbers, letters, words, commands, signs. Layout is dropped, so that it cannot matter.

Unicode, LaTeX, Markdown and plain text give the same tokens: `½`, `\dfrac12` and `\tfrac{1}{2}`; `√2`, `\sqrt2` and `sqrt(2)`.
Regular expressions are used up to here only; `syntax` reads the tokens.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rstar_lab.verify.units import TABLES

VULGAR_FRACTIONS = {
    char: r"\frac{{{}}}{{{}}}".format(*tuple(unicodedata.normalize("NFKC", char).split("⁄")))
    for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
_NUMBER_SETS = dict(zip("RZNQC", "ℝℤℕℚℂ", strict=True))
Add = Callable[[str, str], None]  # adds a token of a kind with a text
_LAYOUT = {name: frozenset(text.split()) for name, text in TABLES["layout"].items() if isinstance(text, str)}
_UNICODE = str.maketrans({char: latex for chars, latex in TABLES["unicode"].items() for char in chars})
_SYNONYMS = {other: name for name, others in TABLES["synonyms"].items() for other in others.split()}
_SIGN_COMMANDS = frozenset(name for name in TABLES["synonyms"] if not name.isalnum())
_PLAIN = {name: _SYNONYMS.get(name, name) for name in TABLES["names"]["plain"].split()}
_BEFORE_BRACKET = frozenset(TABLES["names"]["before_bracket"].split())
_WITH_ARGUMENT = _LAYOUT["text"] | _LAYOUT["vectors"] | _LAYOUT["skipped"] | {"mathbb", "mathcal", "begin", "end"}

_GROUP = r"(?:\{,\}|,?\\!\s?|\\[,;:\ ]|'|_)"
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s|~|\\[ ,;:!>])+)
    |(?P<row>\\\\(?:\*|\s*\[-?[\d.]+\s*(?:pt|ex|em|cm|mm|in)\])?)
    |\\[()\[\]]|\\(?:left|right)\.
    |(?P<repeating>\d*\.\d*(?:\\(?:overline|bar|dot)\s*(?:\{{\d+\}}|\d)))
    |(?P<periodic>\d+\.\(\d+\)(?!\s*[\d(^]))
    |(?P<number>(?:\d{{1,3}}(?:{_GROUP}\d{{3}}(?!\d))+|\d+(?:_\d{{3}}(?!\d))*+)(?:\.\d+)?(?:[eE][+-]?\d+(?![A-Za-z0-9.]))?
        |\.\d+(?:[eE][+-]?\d+(?![A-Za-z0-9.]))?)
    |\\(?!not\s*=)(?P<command>[A-Za-z]+)\*?
    |\\(?!not\s*=)(?P<escaped>.)
    |(?P<dots>\.{{2,}})
    |(?P<relation>\\not\s*=|!=|<=|>=|=<|:=|==)
    |(?P<power>\*\*)
    |(?P<word>[A-Za-z]+)
    |(?P<foreign>[^\W\d_a-zA-Z]+)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_FIXED = {"row": ("sign", "\\\\"), "dots": ("command", "ldots"), "power": ("sign", "^")}
_KINDS = {"number": "number", "repeating": "repeating", "periodic": "repeating", "foreign": "word"}
_RELATION_SIGNS = {"=<": "<=", ":=": "=", "==": "="}
_BRACED = re.compile(r"\s*\{")
_LETTER = re.compile(r"\s*([A-Za-z]|\\[ij]math)(?![A-Za-z])")
_REWRITTEN = [(needle, re.compile(pattern), new) for needle, pattern, new in TABLES["layout"]["rewritten"]]
_EMPHASIS = re.compile(r"(\*{1,3}|_{2}|`{1,3}|')(?=[^\s*_`])([^*_`]+)(?<=\S)\1")


class Token(NamedTuple):
    """kind: number, repeating, symbol (one letter or a command that is one), word, command, sign. space: space precedes it.

    upright: it stood in a command for text, such as `\\text`.
    """

    kind: str
    text: str
    space: bool = False
    upright: bool = False


class Unreadable(Exception):
    """A text is not an answer of any type. It is compared as text."""


def _from_unicode(text: str) -> str:
    for char, latex in VULGAR_FRACTIONS.items():
        text = text.replace(char, latex)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+", lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
    return re.sub(r"\d", lambda m: str(unicodedata.decimal(m[0])), text)  # digits of other scripts


def _without_delimiters(text: str) -> str:
    """Remove the delimiters of formulas. A currency sign becomes a full-width dollar."""
    if "$" in text:
        text = re.sub(r"(?<=\d),(?=\$)|\$\s*,\s*(?=\$)", ", ", re.sub(r"\$\s*,\s*\$", ", ", text))
        text = text.replace(r"\$", "＄")
        if text.count("$") % 2 and re.match(r"[\s-]*(?:US)?\s*\$\s*[\d.]", text):
            text = text.replace("$", "＄", 1)
    return text.replace("$", " ")


@lru_cache(8192)
def tokens_of(text: str) -> tuple[Token, ...]:
    """Return the tokens of an answer. Layout, delimiters of formulas, quotes and a final period are not among them."""
    text = _without_delimiters(text if text.isascii() else _from_unicode(text))
    if match := _EMPHASIS.fullmatch(text.strip()):
        text = match[2]
    for needle, pattern, replacement in _REWRITTEN:
        if needle in text:
            text = pattern.sub(replacement, text)
    found = _scan(text, False, 0)
    if "&" in text and "\\begin" in text and not re.search(r"\\begin\{(?:cases|array|\w*matrix)", text):
        found = [token for token in found if token.text != "&"]
    while found and found[-1].kind == "sign" and found[-1].text in ".,;:\\\\":
        found.pop()
    return tuple(found)


def _group_end(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`."""
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
        place += 1
    raise Unreadable("an open brace")


def _scan(text: str, upright: bool, depth: int) -> list[Token]:
    if depth > 20:
        raise Unreadable("too deep")
    found: list[Token] = []
    place, space = 0, False

    def add(kind: str, value: str) -> None:
        nonlocal space
        found.append(Token(kind, value, space, upright))
        space = False

    while match := _TOKEN.match(text, place):
        place = match.end()
        kind, value = match.lastgroup, match[match.lastgroup or 0]
        if kind in ("space", None):
            space = True
        elif kind in _KINDS:
            add(_KINDS[kind], value)
        elif kind in _FIXED:
            add(*_FIXED[kind])
        elif kind == "relation":
            add("sign", _RELATION_SIGNS.get(value, "!=" if value[0] == "\\" else value))
        elif kind == "escaped":
            add("sign", {"{": r"\{", "}": r"\}"}.get(value, value)) if value != "#" else None
        elif kind == "word":
            _add_word(value, text[place : place + 2], add)
        elif kind == "sign":
            if value not in '"`#':
                add("sign", value)
        else:
            inner = None
            if (brace := _BRACED.match(text, place)) and value in _WITH_ARGUMENT:
                end = _group_end(text, brace.end() - 1)
                inner, place = text[brace.end() : end], end + 1
            elif value in _LAYOUT["vectors"] | {"mathbb", "mathcal"} and (letter := _LETTER.match(text, place)):
                inner, place = letter[1], letter.end()
            if value in _LAYOUT["text"] and inner is not None:
                part = _scan(inner, True, depth + 1)
                if part:
                    found.append(part[0]._replace(space=space or part[0].space or len(inner) > 1))
                    found += part[1:]
                space = True
            else:
                _add_command(value, inner, add, found, depth)
    return found


def _add_word(word: str, rest: str, emit: Add) -> None:
    if len(word) == 1:
        emit("symbol", word)
    elif word in _PLAIN:
        _emit_command(_PLAIN[word], emit)
    elif word in _BEFORE_BRACKET and rest.lstrip()[:1] in ("(", "{", "\\"):
        emit("command", word)
    else:
        emit("word", word)


def _emit_command(name: str, emit: Add) -> None:
    if name in _SIGN_COMMANDS:
        emit("sign", rf"\{name}" if name in "{}" else name)
    elif name in _LAYOUT["symbols"]:
        emit("symbol", name)
    else:
        emit("command", name)


def _add_command(name: str, inner: str | None, add: Add, found: list[Token], depth: int) -> None:
    if name == "times" and found and found[-1].text.startswith("vec "):
        name = "cross"
    name = _SYNONYMS.get(name, name)
    if name in _LAYOUT["ignored"] | _LAYOUT["skipped"] | _LAYOUT["spaces"]:
        return
    if name in ("begin", "end"):
        environment = (inner or "").strip().rstrip("*")
        if environment not in _LAYOUT["displays"]:
            add("command", f"{name}:{environment}")
    elif name in ("mathbb", "mathcal") and inner is not None:
        add("symbol", _NUMBER_SETS.get(inner.strip(), inner) if name == "mathbb" else inner)
    elif name in _LAYOUT["vectors"] and inner is not None:
        if re.fullmatch(r"\s*(?:[A-Za-z]|[A-Z]{2}|\\[ij]math)\s*", inner):
            add("symbol", "vec " + inner.strip().replace("math", "").strip("\\"))
        else:
            found += _scan(inner, False, depth + 1)
    else:
        _emit_command(name, add)


# --- a place in tokens

END = Token("end", "")
RELATIONS: dict[str, str] = TABLES["relations"]
_ITEM_ENDS = frozenset((",", ";", ")", "]", r"\}", "\\\\", "&", ":", *RELATIONS))
_COMMAND_ENDS = frozenset((*RELATIONS, "lor", "land", "cup", "rangle"))


class Cursor:
    """A place in a sequence of tokens."""

    def __init__(self, tokens: Sequence[Token]):
        self.tokens = list(tokens)
        self.at = 0

    def peek(self, offset: int = 0) -> Token:
        try:
            return self.tokens[self.at + offset]
        except IndexError:
            return END

    def take(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def is_sign(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "sign" and token.text in texts

    def is_command(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "command" and token.text in texts

    def is_word(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "word" and token.text.casefold() in texts

    def is_symbol(self, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == "symbol" and token.text in texts

    def at_end(self) -> bool:
        return self.at >= len(self.tokens)

    def accept(self, text: str) -> bool:
        """Move behind a sign or a command if it is here."""
        token = self.peek()
        found = token.text == text and token.kind in ("sign", "command")
        self.at += found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"expected {text}, found {self.peek().text}")

    def closing(self, opening: str, closing: str) -> int:
        """Return the place of the token that closes the bracket or the environment that opens here."""
        level = 0
        for place in range(self.at, len(self.tokens)):
            text = self.tokens[place].text
            level += (text == opening) - (text == closing)
            if level == 0:
                return place
        raise Unreadable(f"no {closing}")

    def enclosed(self, opening: str, closing: str) -> list[Token]:
        """Return the tokens in the bracket that opens here, and move behind it."""
        if self.peek().text != opening:
            raise Unreadable(f"expected {opening}, found {self.peek().text}")
        end = self.closing(opening, closing)
        inner = self.tokens[self.at + 1 : end]
        self.at = end + 1
        return inner

    def item_end(self, place: int) -> bool:
        """Return whether an item of a list can end before a token."""
        token = self.tokens[place] if place < len(self.tokens) else END
        if token.kind == "sign":
            return token.text in _ITEM_ENDS
        if token.kind == "command":
            return token.text in _COMMAND_ENDS
        return token.kind == "end" or (token.kind == "word" and token.text.casefold() in ("and", "or"))
