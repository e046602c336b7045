r"""Bring an answer into one written form: the same LaTeX for answers that differ only in layout, notation or unit.

`clean` rewrites characters and commands of a complete answer. `read` separates one element of it into its value, unit
and percent sign. The tables are in `rules`.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from rstar_lab.verify import rules
from rstar_lab.verify.exact import REPEATING, repeating_as_fraction

OPENING, CLOSING = "([{", ")]}"


# --- brackets --------------------------------------------------------------------------------------------------------


def group_end(text: str, start: int) -> int | None:
    """Return the index after the bracket that closes the one at `start`, or None if it is never closed."""
    depth = 0
    place = start
    while place < len(text):
        char = text[place]
        if char == "\\" and text[start] == "{":
            place += 2
            continue
        if char in OPENING:
            depth += 1
        elif char in CLOSING:
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return None


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """Split a text at the separators that are outside all brackets and environments."""
    parts, depth, last = [], 0, 0
    tokens = re.compile(
        rf"\\begin\{{|\\end\{{|(?P<separator>{separators.pattern})|\\[lr]angle(?![a-z])|\\.|[(\[{{)\]}}]", re.DOTALL
    )
    for match in tokens.finditer(text):
        token = match[0]
        if match["separator"] is not None and depth <= 0:
            parts.append(text[last : match.start()])
            last = match.end()
        elif token in (r"\begin{", "(", "[", "{", r"\{", r"\langle"):
            depth += 2 if token == r"\begin{" else 1
        elif token == r"\end{":
            depth += 0
        elif token in (")", "]", "}", r"\}", r"\rangle"):
            depth -= 1
    return [*parts, text[last:]]


def _replace_calls(text: str, pattern: re.Pattern[str], replace: Callable[[re.Match[str], str], str]) -> str:
    """Replace `NAME{...}` (balanced) for each match of `pattern`, which ends before the opening bracket."""
    pieces, place = [], 0
    while match := pattern.search(text, place):
        end = group_end(text, match.end()) if match.end() < len(text) and text[match.end()] in OPENING else None
        if end is None:
            pieces.append(text[place : match.end()])
            place = match.end()
            continue
        pieces += [text[place : match.start()], replace(match, text[match.end() + 1 : end - 1])]
        place = end
    return "".join([*pieces, text[place:]])


# --- a complete answer -----------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\text(?=\{)")
_AFTER_NUMBER = re.compile(r"(?:[\d})/]|\}\s*\\cdot)(?:\s|~|\\[,;: ])*$")
_CHOICES = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|and|&|,\s*and)\s*\(?[A-Z]\)?)+")
_NAMES = re.compile(r"[A-Z][a-z]+(?:,\s*[A-Z][a-z]+)*,?\s+and\s+[A-Z][a-z]+")
_SENTENCE_START = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)?", re.IGNORECASE)
_FRAC = re.compile(r"\\(?:frac|binom)(?![A-Za-z])")
_ARGUMENT = re.compile(r"\s*(\d|[A-Za-z]|\\[A-Za-z]+)")
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,2})(?=[^\s*_])([^*_]+|[^*]+)(?<=\S)\1")
_DISPLAY = re.compile(
    r"\s*\\begin\{(equation|displaymath|math|gather|align|aligned|gathered)(\*?)\}(.*)\\end\{\1\2\}\s*", re.DOTALL
)


def _text_content(content: str, before: str) -> str:
    """Return what a `\\text{...}` becomes: its content if that is a formula or a separator, else the command itself.

    before: the text before it; after a number, a letter can be a unit.
    """
    inner = content.strip()
    if not inner:
        return " "
    if r"\text{" in inner:
        inner = _replace_calls(inner, _TEXT, lambda match, part: _text_content(part, match.string[: match.start()]))
    if re.search(r"\\[A-Za-z]+$", before):  # `\pi\text{r}` is not `\pir`
        return " " + _text_content(content, before + " ")
    if _AFTER_NUMBER.search(before) and _UNIT_TEXT.fullmatch(rules.SPACES.sub(" ", inner)):
        return rf"\text{{{rules.SPACES.sub(' ', inner).strip()}}}"
    if _CHOICES.fullmatch(inner):
        return re.sub(r"and|&", ",", inner)
    if _SENTENCE_START.fullmatch(inner):
        return inner + " "
    if re.fullmatch(r",?\s*(?:and|or)\s*,?", inner, re.IGNORECASE):
        return ", "
    if not re.search(r"[^\W\d_]{2,}", inner) or re.search(r"\\[A-Za-z]|\$", inner):
        return f" {inner} " if re.search(r"\d", inner) else inner
    if _NAMES.fullmatch(inner):
        return ", ".join(rf"\text{{{name}}}" for name in re.findall("[A-Z][a-z]+", inner))
    if re.fullmatch(r"[A-Za-z]{2,}", inner):
        return rf"\text{{{inner}}}"
    if re.match(r"\d", inner) or not inner.isascii():
        return f" {inner} "
    return rf"\text{{{inner}}}"


def _as_text(text: str) -> str:
    r"""Replace every command for upright or bold text by `\text`, also inside of others."""
    return _replace_calls(text, rules.TEXT_COMMANDS, lambda _, inner: rf"\text{{{_as_text(inner)}}}")


def _brace_fractions(text: str) -> str:
    r"""Put braces around both arguments of `\frac`: `\frac1x` is `\frac{1}{x}`."""
    pieces, place = [], 0
    while match := _FRAC.search(text, place):
        pieces.append(text[place : match.end()])
        place = match.end()
        for _ in range(2):
            start = place + len(text[place:]) - len(text[place:].lstrip())
            if text[start : start + 1] == "{":
                end = group_end(text, start)
                if end is None:
                    break
                pieces.append("{" + _brace_fractions(text[start + 1 : end - 1]) + "}")
                place = end
            elif argument := _ARGUMENT.match(text, place):
                pieces.append(f"{{{argument[1]}}}")
                place = argument.end()
    return "".join([*pieces, text[place:]])


# --- rewrites ---------------------------------------------------------------------------------------------------------

# A rewrite is applied to texts that contain its mark, which saves most of the time.
_Rewrite = tuple[str, Callable[[str], str]]


def _sub(mark: str, pattern: str, replacement: str | Callable[[re.Match[str]], str], flags: int = 0) -> _Rewrite:
    compiled = re.compile(pattern, flags)
    return mark, lambda text: compiled.sub(replacement, text)


def _call(mark: str, pattern: str, replacement: Callable[[re.Match[str], str], str]) -> _Rewrite:
    """Rewrite `NAME{...}`; `pattern` ends before the opening bracket."""
    compiled = re.compile(pattern)
    return mark, lambda text: _replace_calls(text, compiled, replacement)


def _apply(text: str, rewrites: tuple[_Rewrite, ...]) -> str:
    for mark, rewrite in rewrites:
        if mark in text:
            text = rewrite(text)
    return text


def _list_words(text: str) -> str:
    """Replace `and` and `or` outside of brackets by commas."""

    def replace(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = any(before.count(a) > before.count(b) for a, b in ("()", "[]"))
        return match[0] if inside else ","

    return re.sub(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", replace, text)


def _synonym(match: re.Match[str]) -> str:
    name = rules.SYNONYMS.get(match[1])
    if name is None:
        return match[0]
    if name in "{}":
        return "\\" + name
    return "\\" + name if name.isalpha() and name != "i" else ("＄" if name == "$" else name)


def _longest_first(names: Iterable[str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


_DETERMINANT = re.compile(
    r"\\begin\{(vmatrix)\}(.*?)\\end\{\1\}|\\det\s*(\(\s*)?\\begin\{([pbB]?matrix|array)\}(.*?)\\end\{\4\}(?(3)\s*\))"
    r"|\|\s*\\begin\{(array|matrix)\}(.*?)\\end\{\6\}\s*\|"
)


def _determinant(match: re.Match[str]) -> str:
    """Return a determinant of 2 or 3 rows as a formula, others as they are."""
    cells = [row.split("&") for row in (match[2] or match[5] or match[7] or "").split(r"\\") if row.strip()]
    square = len(cells) in (2, 3) and all(len(row) == len(cells) and all(map(str.strip, row)) for row in cells)
    return f" ({_expanded(cells)}) " if square else match[0]


def _expanded(cells: list[list[str]]) -> str:
    if len(cells) == 1:
        return cells[0][0].strip()
    minors = [[row[:place] + row[place + 1 :] for row in cells[1:]] for place in range(len(cells))]
    terms = zip("+-+", cells[0], minors, strict=False)
    return "".join(rf"{sign}({cell.strip()})\cdot({_expanded(minor)})" for sign, cell, minor in terms).lstrip("+")


_BOX = _call("box", r"\\(?:boxed|fbox|framebox)\s*(?=\{)", lambda _, inner: f" {inner} ")
# Commands for layout, fonts and colours, and other names of one command.
_COMMANDS: tuple[_Rewrite, ...] = (
    _sub("\\", r"(?<=\d)(?:\{,\}|\\[,;!:]|\\!,|,\\!)(?=\d{3}(?!\d))", ""),
    _sub("{,}", r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),
    ("\\", lambda text: rules.FORMATTING.sub("", text)),
    _sub("array", r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{array}"),
    ("\\", lambda text: text.replace(r"\!", "").replace(r"\#", "").replace(r"\&", "&")),
    _call("color", r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}\s*(?=\{)|\\color\s*\{[^{}]*\}\s*(?=\{)", lambda _, inner: f" {inner} "),
    _sub("\\", r"\\color\s*\{[^{}]*\}|\\h?space\*?\s*\{[^{}]*\}|\\v?phantom\s*\{[^{}]*\}|\\label\s*\{[^{}]*\}", " "),
    _BOX, _BOX, _BOX,  # nested
    _call("\\num", r"\\num\s*(?=\{)", lambda _, inner: f" {inner} "),
    _sub(
        "\\",
        r"(\\(?:math[a-z]{2,4}|boldsymbol|bm|vec|hat|bar|d?dot))(?:\s+([A-Za-z])(?![A-Za-z])|\s*(\\[a-z]+)(?![A-Za-z{]))",
        lambda m: f"{m[1]}{{{m[2] or m[3]}}}",
    ),
    ("\\", lambda text: _as_text(text)),
    _sub("\\prime", r"\^\s*\{?\s*((?:\\prime\s*)+)\}?", lambda m: "'" * m[1].count("p")),
    _sub("\\", r"\\([A-Za-z]+)", _synonym),
    # a unit vector
    _sub("\\", r"\\(?:vec|hat|widehat|overrightarrow)\s*\{\s*\\?([ijk]|imath|jmath)\s*\}", lambda m: f" {m[1][0]} "),
    _call("\\text", _TEXT.pattern, lambda match, inner: _text_content(inner, match.string[: match.start()])),
    _sub("\\\\", r"\\\\\s*$", ""),
)  # fmt: skip
# What surrounds an answer.
_SURROUNDINGS: tuple[_Rewrite, ...] = (
    _sub("", r"^'(.+)'$|^[【「『《](.+)[】」』》]$", lambda m: m[1] or m[2]),
    _sub(
        "",
        r"^\W*(?:(?:the|my|our|so|thus|hence|therefore)\s+)*(?:final\s+|correct\s+)?(?:answer|result|solution)\s*(?:is|are|=|:)\s*:?\s*"
        r"|^\s*(?:所以|因此|故)?[,，]?\s*(?:最终)?(?:答案|结果|解)\s*(?:是|为|[::=])?\s*[::]?\s*|^\s*答\s*[::]\s*|^\s*(?:一?共|总共|大?约|等于)+\s*(?=[\d\\$-])"
        r"|^\s*\\?(?:therefore|so|thus|hence)(?![a-z]),?\s*(?=[\d\\$(-]|[a-z]\s*=)",
        "",
        re.IGNORECASE,
    ),
    _sub("", r"^(?:option|choice|\\text\{\s*(?:option|choice)\s*\})\s*(\(?[A-Z]\)?)$", r"\1", re.IGNORECASE),
    ("=", lambda text: text.removeprefix("=").strip()),
    _sub(")", r"^([A-Z])\)$", r"\1"),
)
_NOTATION: tuple[_Rewrite, ...] = (
    _sub("{", r"\\\{\s*\\\}|^\{\s*\}$", r"\\emptyset "),
    _sub(":", r"(\\\{[^:|{}]*):", r"\1|"),  # of a set
    _sub("_", r"^((?=\w*\d\w*_|[A-F]{2})[0-9A-Fa-f]+)_(\d{2}|[a-z]{3,})$", r"\1_{\2}"),  # of a base
    _sub(".", r"(?<=\d)(\s*)([ap])\.\s?m\.?(?![A-Za-z])", r"\1\2m", re.IGNORECASE),
    _sub("cis", r"(?:\\text\{\s*cis\s*\}|\\?(?<![A-Za-z])cis(?![A-Za-z]))\s*(.+)$", r"e^{i\\cdot(\1)}"),
    _sub(
        "",
        rf"(?<=\d)\s*(?:\\text\{{\s*)?({'|'.join(rules.MULTIPLIERS)})(?:\s*\}}|(?=\s|$))",
        lambda m: " " + rules.MULTIPLIERS[m[1]],
    ),
    _sub(
        "\\text",
        rf"(?<=\d)\s*\\text\{{\s*({'|'.join(rules.MULTIPLIERS)})\s+([^{{}}]*)\}}",
        lambda m: rf" {rules.MULTIPLIERS[m[1]]}\text{{{m[2]}}}",
    ),
    _sub(
        "",
        rf"(?<=\d)\s*({_longest_first(rules.CJK_MULTIPLIERS)})(?![米克瓦卡])",
        lambda m: rf" \times 10^{{{rules.CJK_MULTIPLIERS[m[1]]}}} ",
    ),
    _sub("10", r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\times "),
    _sub("", r"^[+-]?\d{1,3}(?:[ ']\d{3})+(?:\.\d+)?$", lambda m: m[0].replace(" ", "").replace("'", "")),
    ("**", lambda text: text.replace("**", "^")),
    _sub("\\choose", r"\{\s*([^{}]+?)\s*\\choose\s*([^{}]+?)\s*\}", r"\\binom{\1}{\2}"),
    _sub("\\over", r"\{\s*([^{}]+?)\s*\\over\s*([^{}]+?)\s*\}", r"\\frac{\1}{\2}"),
    _sub("\\text", rf"\\text\{{\s*({'|'.join(rules.FUNCTIONS)}|(?:max|min|det)(?=\s*\}}\s*(?:\(|\\?\{{|\\begin)))\s*\}}", r"\\\1 "),
    _sub(
        "",
        rf"(?<![\\A-Za-z])(?:({_longest_first(rules.FUNCTIONS)})(?![A-Za-z])"
        r"|sec(?![A-Za-z])(?=\s*[\\({^A-Za-z0-9])|(?:max|min|lim|det)(?=\s*(?:\(|\\?\{)))",
        r"\\\g<0> ",
    ),
    ("\\begin", lambda text: _DETERMINANT.sub(_determinant, text)),
    _sub("", rf"(?<![\\A-Za-z])({'|'.join(rules.SYMBOLS)})(?![A-Za-z])", lambda m: rules.SYMBOLS[m[1]]),
    _call("\\sqrt", r"\\sqrt\s*(?=\()", lambda _, inner: rf"\sqrt{{{inner}}}"),
    _call("^", r"\^\s*(?=\()", lambda _, inner: f"^{{{inner}}}"),
    _sub("^", r"\^\s*(-\s*(?:\d+(?:\.\d+)?|\\?[A-Za-z]+)|\+?\d+(?:\.\d+)?(?!\d))", lambda m: "^{" + m[1].replace(" ", "") + "}"),
    _sub("^", r"(\^)\s*(\\[A-Za-z]+|[A-Za-z0-9*])", r"\1{\2}"),
    _sub("_", r"(_)\s*(\\[A-Za-z]+|[A-Za-z0-9*])", r"\1{\2}"),
    _sub("^", r"\^\{(\d+)\}\s*/\s*_\{(\d+)\}", r"\\frac{\1}{\2}"),
    ("\\frac", lambda text: _brace_fractions(text)),
    ("\\binom", lambda text: _brace_fractions(text)),
    _sub(
        "\\sqrt",
        r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\\[A-Za-z]+(?![A-Za-z{]))",
        lambda m: rf"\sqrt{m[1] or ''}{{{m[2]}}}",
    ),
    _sub("", r"(?<=[0-9.])\s?[eE]\s?([+-]?[0-9]+)(?![0-9A-Za-z.])", r" \\times 10^{\1}"),
    (".", lambda text: REPEATING.sub(repeating_as_fraction, text)),
    _sub("", r"\\text\{(?:st|nd|rd|th)\}|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", ""),
    _sub("^", r"\^\{\s*\}", ""),
    ("and", _list_words),
    ("or", _list_words),
    _sub("..", r"\.{2,}", r"\\ldots "),
    _sub(",", r"(?:\s*,)+\s*,", ", "),
    _sub("\\mu", r"(?<=[\d}])\s*\\mu\s*(?:\\text\{\s*([mgsALVFC])\s*\}|([mgs](?![A-Za-z])))", r"\\text{µ\1\2}"),
    _sub("\\Omega", r"(?<=[\d}])\s*(k?)\\Omega\s*$", r"\\text{\1ohm}"),
    _sub(
        "base",
        r"(?<=[0-9A-Fa-f])\s*\(?\s*(?:\\text\{\s*\(?\s*)?(?:in\s+)?base[\s-]*\}?\s*(\d+|[a-z]+)\s*\)?\s*\}?\)?$",
        r"_{\1}",
    ),
    _sub(
        "\\frac",
        r"(?<=[\d}])\s*\\frac\{\s*(\\text\{[^{}\d]+\}|[A-Za-z]{1,3})\s*\}"
        r"\{\s*((?:\\text\{[^{}\d]+\}|[A-Za-z]{1,3})(?:\^\{\d\})?)\s*\}$",
        r"\1/\2",
    ),
    _sub("", r"^(\d+)\s*(?:\\text\{\s*)?(?:out of|in)(?:\s*\}|(?=\s))\s*(\d+)$", r"\\frac{\1}{\2}"),
    _sub("", r"\s+", " "),
)  # fmt: skip


def _from_unicode(text: str) -> str:
    for char, latex in rules.VULGAR_FRACTIONS.items():
        text = text.replace(char, latex)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(rules.SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+", lambda m: f"_{{{m[0].translate(rules.SUBSCRIPTS)}}}", text)
    text = text.replace("√", r"\sqrt ").replace("∛", r"\sqrt[3]").translate(rules.UNICODE)
    text = unicodedata.normalize("NFKC", text).translate(rules.UNICODE)
    return re.sub(r"\d", lambda m: str(unicodedata.decimal(m[0])), text)  # digits of other scripts


def _without_delimiters(text: str) -> str:
    """Remove the delimiters of formulas. A currency sign becomes a full-width dollar."""
    if "$" in text:
        text = re.sub(r"(?<=\d),(?=\$)|\$\s*,\s*(?=\$)", ", ", re.sub(r"\$\s*,\s*\$", ", ", text))
    if "\\" in text:
        text = re.sub(r"\\[()\[\]]" + (r"|\\+\s*$" if text.rstrip().endswith("\\") else ""), " ", text)
    text = text.replace(r"\$", "＄")
    if text.count("$") % 2 and re.match(r"\s*\$\s*[\d.]", text):
        text = text.replace("$", "＄", 1)
    return text.replace("$", " ")


_TWICE = re.compile(r"(?:\\text\{\s*)?([\w -]{1,40}?)\s*(?:\\text\{\s*)?\(\s*([\w -]{1,40}?)\s*\)\s*\}?")  # `7 (seven)`


@lru_cache(4096)
def clean(text: str) -> str:
    r"""Return an answer in normalised LaTeX, with `\text{...}` only around words."""
    text = _without_delimiters(text if text.isascii() else _from_unicode(text))
    if match := _EMPHASIS.fullmatch(text.strip()):
        text = match[2]
    text = re.sub(r"\*\*([^*]+)\*\*(?![\w(])", r"\1", text)
    if (match := _DISPLAY.fullmatch(text)) and r"\\" not in match[3].strip().removesuffix(r"\\"):
        text = match[3].replace("&", "")
    text = rules.SPACES.sub(" ", _apply(text, _COMMANDS)).strip().strip('"`').strip()
    text = _apply(text, _SURROUNDINGS).strip()
    if _CHOICES.fullmatch(text):
        text = re.sub(r"and|&", ",", text)
    text = _apply(text, _NOTATION).strip().rstrip(".,;: ").strip()
    if text[:1].isalpha() or text.startswith(r"\text"):
        text = r"(-\infty,\infty)" if words(text) in rules.ALL_REALS else rules.NUMBER_WORDS.get(words(text), text)
    if text.endswith((")", ")}")) and (match := _TWICE.fullmatch(text)):
        numbers = [rules.NUMBER_WORDS.get(words(part), part.strip()) for part in match.groups()]
        text = numbers[0] if numbers[0] == numbers[1] and match[1] != match[2] else text
    return text


_UNBRACE = re.compile(r"\{([A-Za-z0-9])\}(?![A-Za-z0-9])")
_KEY_SPACE = re.compile(r"(?<=\d)\s+(?=\d)")


@lru_cache(4096)
def key(text: str) -> str:
    """Return a cleaned answer without layout: two answers with equal keys are the same text."""
    text = _KEY_SPACE.sub("␣", text)
    text = re.sub(r"\s+", "", text).replace("&=", "=")
    text = re.sub(r"\\(begin|end)\{(?:[pbB]?matrix|array|smallmatrix)\}", r"\\\1{matrix}", text)
    text = re.sub(r"\\\\(?=\\end)", "", text)
    text = _UNBRACE.sub(r"\1", text)
    return text.rstrip(".,;")


def words(text: str) -> str:
    r"""Return the words of an answer in lower case, without spaces, punctuation and `\text`."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    plain = re.sub(r"^\s*(?:an?|the)\s+(?=\w{3,})", "", plain, flags=re.IGNORECASE)
    plain = re.sub(r"(?<=[a-z]{4})s$", "", re.sub(r"[\s.,;:!'\"\\(){}$-]+", "", plain).casefold())
    return rules.ALIASES.get(plain, plain)


# --- one element -----------------------------------------------------------------------------------------------------

_UNIT_NAMES = _longest_first(re.escape(name) for name in rules.UNITS)
_LONG_UNITS = _longest_first(re.escape(name) for name in rules.UNITS if len(name) > 1)
_POWERS = r"(?:\s*\^\s*\{\s*-?\d\s*\})?"
_UNIT_FACTOR = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?(?:{_UNIT_NAMES})(?![A-Za-z]){_POWERS}"
_UNIT_CHAIN = rf"{_UNIT_FACTOR}(?:\s*(?:/|per|\\cdot|\*|\s)\s*{_UNIT_FACTOR}){{0,4}}"
_UNIT_TEXT = re.compile(rf"\(?(?:in\s+)?/?\s*(?:{_UNIT_CHAIN})\.?\)?")
_UNIT_IN_TEXT = re.compile(
    rf"(?:\s*(?:/|\\cdot|\*)?\s*\\text\{{\s*\(?(?:in\s+)?/?\s*(?:{_UNIT_CHAIN})\.?\)?\s*\}}{_POWERS}){{1,4}}$"
)
_LONG_FACTOR = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s*(?:{_UNIT_NAMES})|{_LONG_UNITS})(?![A-Za-z]){_POWERS}"
_PLAIN_UNIT = re.compile(
    rf"(?:(?<=[\d}})\]])\s*/?\s*|(?<=\\pi)\s+)(?:{_LONG_FACTOR}(?:\s*(?:/|per|\\cdot|\s)\s*{_UNIT_FACTOR})*"
    rf"|[msghLNJWVAKCF](?=\s*/){_POWERS}\s*/\s*{_UNIT_FACTOR}|[mJ]\s*(?:\\cdot)?\s*s\^\{{-\d\}}|N\s*(?:\\cdot)?\s*m)\.?$"
)
_SINGLE_UNIT = re.compile(r"(?<=[\d})])\s*([mgshLNJWVAKCF])(?:\^\{(\d)\})?$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\\text\{\s*)?([CF](?![A-Za-z]))?\s*\}?$|\s*\\circ$")
_NOUN = re.compile(
    r"(?<=[\d}%)])\s*(?:\\text\{\s*([A-Za-z][A-Za-z .'-]*)\s*\}(?:\^\{\d\})?|\s([A-Za-z][A-Za-z']{1,19}(?:[ -][A-Za-z']{1,19}){0,3}))\.?$"
)
_NOUN_ORDINAL = re.compile(r"(?<=\d)\s*([぀-ヿ一-鿿가-힯]{1,6})$")
# What changes the number before it: negations, bounds, approximations, ranges and fractions. It is not a noun.
_NO_NOUN = re.compile(
    "[不非无没或否错以未超余餘多弱强強倍至到半成折割内外間间]|左右|上下|前[後后]|程度|分之|から|まで|より|ほど|[くぐ]らい|또는|아니|이[상하내]|[미초][만과]|정도|쯤"
)
_CURRENCY_NAMES = _longest_first(map(re.escape, rules.CURRENCIES)).replace(r"\$", "＄")
_CURRENCY_BEFORE = re.compile(rf"^([+-]?)\s*(?:\\text\{{\s*)?({_CURRENCY_NAMES})(?:\s*\}})?\s*(?=[-+.\d\\])")
_CURRENCY_AFTER = re.compile(rf"(?<=[\d}}.)])\s*(?:\\text\{{\s*)?({_CURRENCY_NAMES})(?:\s*\}})?$")
_PERCENT = re.compile(
    r"\s*(?:\\?%|\\text\{\s*(?:percent|per cent|pct)\.?\s*\}|(?<=[\d}\s])(?:percent|per cent|pct)\.?)\s*$"
)
_IN_PERCENT = re.compile(r"\s*\(\s*in\s*\\?%\s*\)$|\s*\(\s*(?:in\s+)?(?:\\text\{\s*)?(?:units?|percent)\s*\}?\s*\)$")
_APPROXIMATE = re.compile(
    r"^\s*(?:\\approx|\\sim|\\simeq|≃|~|approximately|about|\\text\{\s*(?:approximately|about)\s*\})\s*"
)
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|(?:[Ii]s|[Oo]f|[Tt]he|[Ff]or|[Oo]r|[Aa]nd|[Nn]ot|[Aa]re|[Ww]as|[Bb]ut|[Ii]f)(?![A-Za-z]))|\\text\{[^{}]*[^\W\d_]{2,}[^{}]*\}|[぀-ヿ一-鿿가-힯Ѐ-ӿ]"
)


@dataclass(frozen=True, slots=True)
class Element:
    r"""One element of an answer.

    text: its value in normalised LaTeX. unit, noun: a known unit in its short form, and another noun after a number.
    percent: whether a percent sign followed. prose: whether words remain, so that only the text can be compared.
    """

    text: str
    unit: str = ""
    noun: str = ""
    percent: bool = False
    prose: bool = False


def _unit_key(text: str) -> str:
    text = re.sub(
        r"\\text\{|[{}~\s().]|\^|\bin\s", lambda m: " " if m[0].isspace() else "", text.replace(r"\cdot", "*")
    )
    parts = re.findall(
        r"square|sq|cubic|cu(?=[a-z])|per|/|\*|\d|-|[A-Za-z]+|[^\W\d_]+", re.sub(r"(?<=sq)\s|(?<=cu)\s", " ", text)
    )
    out: list[str] = []
    power = ""
    for part in parts:
        if part in ("square", "sq"):
            power = "2"
        elif part in ("cubic", "cu"):
            power = "3"
        elif part in ("per", "/"):
            out.append("/")
        elif part != "*":
            out.append(rules.UNITS.get(part, part) + power)
            power = ""
    return "".join(out)


def _compact_units(text: str) -> str:
    return re.sub(r"(square|sq\.?|cubic|cu\.?)\s*", lambda m: m[1].rstrip(".") + " ", text)


@lru_cache(4096)
def read(text: str) -> Element:
    """Return an element of a cleaned answer (see `Element`)."""
    text = text.strip()
    unit = noun = ""
    percent = False
    text = _APPROXIMATE.sub("", text)
    if match := _IN_PERCENT.search(text):
        percent = "%" in match[0] or "percent" in match[0]
        text = text[: match.start()]
    for _ in range(3):
        text = text.strip().rstrip(".,;:").rstrip()
        if match := _CURRENCY_BEFORE.match(text):
            unit, text = rules.CURRENCIES[match[2].replace("＄", "$")], match[1] + text[match.end() :]
        elif match := _CURRENCY_AFTER.search(text):
            unit, text = rules.CURRENCIES[match[1].replace("＄", "$")], text[: match.start()]
        elif match := _PERCENT.search(text):
            if not text[: match.start()].strip():
                break
            percent, text = True, text[: match.start()]
        elif (match := _UNIT_IN_TEXT.search(text) or _PLAIN_UNIT.search(_compact_units(text))) and text[
            : match.start()
        ].strip():
            compact = text if _UNIT_IN_TEXT.search(text) else _compact_units(text)
            unit, text = _unit_key(match[0]) + unit, compact[: match.start()]
        elif not _TRIGONOMETRIC.search(text) and (match := _DEGREES.search(text)) and text[: match.start()].strip():
            scale = match[1] or (unit if unit in ("C", "F") else "")
            unit, text = "deg" + scale, text[: match.start()]
        elif (match := _NOUN_ORDINAL.search(text)) and not _NO_NOUN.search(match[1]):
            noun, text = noun or rules.UNITS.get(match[1], match[1]), text[: match.start()]
        elif (match := _NOUN.search(text)) and _is_noun(match[1] or match[2]):
            noun, text = (match[1] or match[2]).casefold().strip(" .").rstrip("s"), text[: match.start()]
        else:
            break
    text = re.sub("＄", "", text).strip()
    if noun in rules.UNITS and not unit:
        unit, noun = rules.UNITS[noun], ""
    return Element(text, unit, noun, percent, bool(_WORD.search(text)))


def _is_noun(phrase: str) -> bool:
    names = re.findall(r"[A-Za-z']+", phrase.casefold())
    return bool(names) and names[0] not in rules.PREPOSITIONS and not any(name in rules.NOT_UNITS for name in names)


def with_single_unit(element: Element) -> Element:
    """Return `5 m` as 5 with the unit m. A letter after a number can be a variable, so that `read` keeps it."""
    match = _SINGLE_UNIT.search(element.text)
    return (
        replace(element, text=element.text[: match.start()], unit=match[1] + (match[2] or ""))
        if match and not element.unit
        else element
    )


def units_agree(first: Element, second: Element) -> bool:
    """Return whether two elements can have the same unit: equal ones, or one is not given."""
    if (first.percent and second.unit) or (second.percent and first.unit):
        return False
    if first.unit and second.unit and first.unit != second.unit:
        return "unit" in (first.unit[:4], second.unit[:4])
    if first.noun and second.noun and first.noun != second.noun:
        return False
    return not (first.unit and second.noun and not second.unit and not first.noun) and not (
        second.unit and first.noun and not first.unit and not second.noun
    )
