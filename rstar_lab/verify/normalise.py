r"""Bring an answer into one written form: the same LaTeX for answers that differ only in layout, notation or unit.

`clean` rewrites characters and commands of a complete answer. `read` separates one element of it into its value, unit
and percent sign. The tables are in `rules`.
"""

import re
import unicodedata
from collections.abc import Callable
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

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_COLOUR = re.compile(r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}\s*(?=\{)|\\color\s*\{[^{}]*\}\s*(?=\{)")
_COLOUR_SWITCH = re.compile(
    r"\\color\s*\{[^{}]*\}|\\h?space\*?\s*\{[^{}]*\}|\\v?phantom\s*\{[^{}]*\}|\\label\s*\{[^{}]*\}"
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox|num)\s*(?=\{)")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;!:]|\\!,|,\\!)(?=\d{3}(?!\d))")
_ARRAY = re.compile(r"\\begin\{array\}\s*\{[^{}]*\}")
_EXPONENT_SIGN = re.compile(r"\^\s*(-\s*(?:\d+(?:\.\d+)?|\\?[A-Za-z]+)|\+?\d+(?:\.\d+)?(?!\d))")
_SCRIPT = re.compile(r"([\^_])\s*(\\[A-Za-z]+|[A-Za-z0-9*])")
_FRAC = re.compile(r"\\frac(?![A-Za-z])")
_ARGUMENT = re.compile(r"\s*(\d|[A-Za-z]|\\[A-Za-z]+)")
_SQRT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\\[A-Za-z]+(?![A-Za-z{]))")
_ROOT_CALL = re.compile(r"\\sqrt\s*(?=\()")
_POWER_CALL = re.compile(r"\^\s*(?=\()")
_SLASH_FRACTION = re.compile(r"\^\{(\d+)\}\s*/\s*_\{(\d+)\}")
_BARE_FUNCTION = re.compile(
    rf"(?<![\\A-Za-z])(?:({'|'.join(sorted(rules.FUNCTIONS, key=len, reverse=True))})(?![A-Za-z])"
    r"|sec(?![A-Za-z])(?=\s*[\\({^A-Za-z0-9])|(?:max|min|lim|det)(?=\s*(?:\(|\\?\{)))"
)
_BARE_SYMBOL = re.compile(rf"(?<![\\A-Za-z])({'|'.join(rules.SYMBOLS)})(?![A-Za-z])")
_TEXT = re.compile(r"\\text(?=\{)")
_FONT = re.compile(
    r"(\\(?:math[a-z]{2,4}|boldsymbol|bm|vec|hat|bar|d?dot))(?:\s+([A-Za-z])(?![A-Za-z])|\s*(\\[a-z]+)(?![A-Za-z{]))"
)
_PRIMES = re.compile(r"\^\s*\{?\s*((?:\\prime\s*)+)\}?")
_MORNING = re.compile(r"(?<=\d)(\s*)([ap])\.\s?m\.?(?![A-Za-z])", re.IGNORECASE)
_BASE_NAME = re.compile(r"^((?=\w*\d\w*_|[A-F]{2})[0-9A-Fa-f]+)_(\d{2}|[a-z]{3,})$")
_BUILDER_COLON = re.compile(r"(\\\{[^:|{}]*):")
_CIS = re.compile(r"(?:\\text\{\s*cis\s*\}|\\?(?<![A-Za-z])cis(?![A-Za-z]))\s*(.+)$")
_PREFIX = re.compile(
    r"^\W*(?:(?:the|my|our|so|thus|hence|therefore)\s+)*(?:final\s+|correct\s+)?(?:answer|result|solution)\s*(?:is|are|=|:)\s*:?\s*"
    r"|^\s*(?:所以|因此|故)?[,，]?\s*(?:最终)?(?:答案|结果|解)\s*(?:是|为|[::=])?\s*[::]?\s*|^\s*答\s*[::]\s*|^\s*(?:一?共|总共|大?约|等于)\s*(?=[\d\\$-])"
    r"|^\s*\\?(?:therefore|so|thus|hence)(?![a-z]),?\s*(?=[\d\\$(-]|[a-z]\s*=)",
    re.IGNORECASE,
)
_AFTER_NUMBER = re.compile(r"(?:[\d})/]|\}\s*\\cdot)(?:\s|~|\\[,;: ])*$")
_CHOICES = re.compile(r"\(?[A-Z]\)?(?:\s*(?:,|and|&|,\s*and)\s*\(?[A-Z]\)?)+")
_NAMES = re.compile(r"[A-Z][a-z]+(?:,\s*[A-Z][a-z]+)*,?\s+and\s+[A-Z][a-z]+")
_SENTENCE_START = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)?", re.IGNORECASE)
_OPTION = re.compile(r"^(?:option|choice|\\text\{\s*(?:option|choice)\s*\})\s*(\(?[A-Z]\)?)$", re.IGNORECASE)
_MULTIPLIER = re.compile(rf"(?<=\d)\s*(?:\\text\{{\s*)?({'|'.join(rules.MULTIPLIERS)})(?:\s*\}}|(?=\s|$))")
_MULTIPLIER_IN_TEXT = re.compile(rf"(?<=\d)\s*\\text\{{\s*({'|'.join(rules.MULTIPLIERS)})\s+([^{{}}]*)\}}")
_E_NOTATION = re.compile(r"(?<=[0-9.])\s?[eE]\s?([+-]?[0-9]+)(?![0-9A-Za-z.])")
_CJK_MULTIPLIER = re.compile(
    rf"(?<=\d)\s*({'|'.join(sorted(rules.CJK_MULTIPLIERS, key=len, reverse=True))})(?![米克瓦卡])"
)
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,2})(?=[^\s*_])([^*_]+|[^*]+)(?<=\S)\1")
_DISPLAY = re.compile(
    r"\s*\\begin\{(equation|displaymath|math|gather|align|aligned|gathered)(\*?)\}(.*)\\end\{\1\2\}\s*", re.DOTALL
)
_ARROW = re.compile(r"\\(?:vec|hat|widehat|overrightarrow)\s*\{\s*\\?([ijk]|imath|jmath)\s*\}")  # of a unit vector
_IN_BASE = re.compile(
    r"(?<=[0-9A-Fa-f])\s*\(?\s*(?:\\text\{\s*\(?\s*)?(?:in\s+)?base[\s-]*\}?\s*(\d+|[a-z]+)\s*\)?\s*\}?\)?$"
)
_OUT_OF = re.compile(r"^(\d+)\s*(?:\\text\{\s*)?(?:out of|in)(?:\s*\}|(?=\s))\s*(\d+)$")
_MICRO = re.compile(r"(?<=[\d}])\s*\\mu\s*(?:\\text\{\s*([mgsALVFC])\s*\}|([mgs](?![A-Za-z])))")
_OHM = re.compile(r"(?<=[\d}])\s*(k?)\\Omega\s*$")
_UNIT_FRACTION = re.compile(
    r"(?<=[\d}])\s*\\frac\{\s*(\\text\{[^{}\d]+\}|[A-Za-z]{1,3})\s*\}\{\s*((?:\\text\{[^{}\d]+\}|[A-Za-z]{1,3})(?:\^\{\d\})?)\s*\}$"
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


@lru_cache(4096)
def clean(text: str) -> str:
    r"""Return an answer in normalised LaTeX, with `\text{...}` only around words."""
    for char, latex in rules.VULGAR_FRACTIONS.items():
        text = text.replace(char, latex)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(rules.SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎]+", lambda m: f"_{{{m[0].translate(rules.SUBSCRIPTS)}}}", text)
    text = text.replace("√", r"\sqrt ").replace("∛", r"\sqrt[3]").translate(rules.UNICODE)
    text = unicodedata.normalize("NFKC", text).translate(rules.UNICODE)
    text = re.sub(r"(?<=\d),(?=\$)|\$\s*,\s*(?=\$)", ", ", re.sub(r"\$\s*,\s*\$", ", ", text))
    text = (
        re.sub(r"\\[()\[\]]", " ", text)
        if not text.rstrip().endswith("\\")
        else re.sub(r"\\[()\[\]]|\\+\s*$", " ", text)
    )
    text = text.replace(r"\$", "＄")  # a currency sign; a plain $ delimits a formula
    if text.count("$") % 2 and re.match(r"\s*\$\s*[\d.]", text):
        text = text.replace("$", "＄", 1)
    text = text.replace("$", " ")
    if match := _EMPHASIS.fullmatch(text.strip()):
        text = match[2]
    text = re.sub(r"\*\*([^*]+)\*\*(?![\w(])", r"\1", text)
    if (match := _DISPLAY.fullmatch(text)) and r"\\" not in match[3].strip().removesuffix(r"\\"):
        text = match[3].replace("&", "")
    text = _THOUSANDS.sub("", text)
    text = _ARRAY.sub(r"\\begin{array}", rules.FORMATTING.sub("", text))
    text = text.replace(r"\!", "").replace(r"\#", "").replace(r"\&", "&")
    text = _COLOUR_SWITCH.sub(" ", _replace_calls(text, _COLOUR, lambda _, inner: f" {inner} "))
    for _ in range(3):  # nested commands
        text = _replace_calls(text, _BOX, lambda _, inner: f" {inner} ")
    text = _as_text(_FONT.sub(lambda m: f"{m[1]}{{{m[2] or m[3]}}}", text))
    text = _PRIMES.sub(lambda m: "'" * m[1].count("p"), text)
    text = _ARROW.sub(lambda m: f" {m[1][0]} ", _COMMAND.sub(_synonym, text))
    text = _replace_calls(text, _TEXT, lambda match, inner: _text_content(inner, match.string[: match.start()]))
    text = re.sub(r"\\\\\s*$", "", text)
    text = rules.SPACES.sub(" ", text)
    text = text.strip().strip('"`').strip()
    text = re.sub(r"^'(.+)'$|^[【「『《](.+)[】」』》]$", lambda m: m[1] or m[2], text)
    text = _OPTION.sub(r"\1", _PREFIX.sub("", text)).removeprefix("=").strip()
    text = re.sub(r"^([A-Z])\)$", r"\1", text)
    if _CHOICES.fullmatch(text):
        text = re.sub(r"and|&", ",", text)
    text = re.sub(r"\\\{\s*\\\}|^\{\s*\}$", r"\\emptyset ", text)
    text = _MORNING.sub(r"\1\2m", _BASE_NAME.sub(r"\1_{\2}", _BUILDER_COLON.sub(r"\1|", text)))
    text = _CIS.sub(r"e^{i(\1)}", text)
    text = _MULTIPLIER.sub(lambda m: " " + rules.MULTIPLIERS[m[1]], text)
    text = _MULTIPLIER_IN_TEXT.sub(lambda m: rf" {rules.MULTIPLIERS[m[1]]}\text{{{m[2]}}}", text)
    text = _CJK_MULTIPLIER.sub(lambda m: rf" \times 10^{{{rules.CJK_MULTIPLIERS[m[1]]}}} ", text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\times ", text)
    if re.fullmatch(r"[+-]?\d{1,3}(?:[ ']\d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "").replace("'", "")
    text = text.replace("**", "^")
    text = re.sub(r"\{\s*([^{}]+?)\s*\\choose\s*([^{}]+?)\s*\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\{\s*([^{}]+?)\s*\\over\s*([^{}]+?)\s*\}", r"\\frac{\1}{\2}", text)
    text = _BARE_FUNCTION.sub(lambda m: rf"\{m[0]} ", text)
    text = _BARE_SYMBOL.sub(lambda m: rules.SYMBOLS[m[1]], text)
    text = _replace_calls(text, _ROOT_CALL, lambda _, inner: rf"\sqrt{{{inner}}}")
    text = _replace_calls(text, _POWER_CALL, lambda _, inner: f"^{{{inner}}}")
    text = _EXPONENT_SIGN.sub(lambda m: "^{" + m[1].replace(" ", "") + "}", text)
    text = _SCRIPT.sub(r"\1{\2}", text)
    text = _SLASH_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _brace_fractions(text)
    text = _SQRT.sub(lambda m: rf"\sqrt{m[1] or ''}{{{m[2]}}}", text)
    text = _E_NOTATION.sub(r" \\times 10^{\1}", text)
    text = REPEATING.sub(repeating_as_fraction, text)
    text = re.sub(r"\\text\{(?:st|nd|rd|th)\}|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", "", text)
    text = re.sub(r"\^\{\s*\}", "", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", _and_or(text), text)
    text = re.sub(r"(?:\s*,)+\s*,", ", ", re.sub(r"\.{2,}", r"\\ldots ", text))
    text = _IN_BASE.sub(r"_{\1}", _OHM.sub(r"\\text{\1ohm}", _MICRO.sub(r"\\text{µ\1\2}", text)))
    text = _OUT_OF.sub(r"\\frac{\1}{\2}", _UNIT_FRACTION.sub(r"\1/\2", text))
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;: ").strip()
    if text[:1].isalpha() or text.startswith(r"\text"):
        text = r"(-\infty,\infty)" if words(text) in rules.ALL_REALS else rules.NUMBER_WORDS.get(words(text), text)
    return text


def _and_or(text: str) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = any(before.count(a) > before.count(b) for a, b in ("()", "[]"))
        return match[0] if inside else ","

    return replace


def _synonym(match: re.Match[str]) -> str:
    name = rules.SYNONYMS.get(match[1])
    if name is None:
        return match[0]
    if name in "{}":
        return "\\" + name
    return "\\" + name if name.isalpha() and name != "i" else ("＄" if name == "$" else name)


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


_UNBRACE = re.compile(r"\{([A-Za-z0-9])\}(?![A-Za-z0-9])")
_KEY_SPACE = re.compile(r"(?<=\d)\s+(?=\d)")


@lru_cache(4096)
def key(text: str) -> str:
    """Return a cleaned answer without layout: two answers with equal keys are the same text."""
    text = _KEY_SPACE.sub("␣", text)
    text = re.sub(r"\s+", "", text).replace("&=", "=")
    text = re.sub(r"\\begin\{(?:[pbvB]?matrix|array|smallmatrix)\}", r"\\begin{matrix}", text)
    text = re.sub(r"\\end\{(?:[pbvB]?matrix|array|smallmatrix)\}", r"\\end{matrix}", text)
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

_UNIT_NAMES = "|".join(sorted((re.escape(name) for name in rules.UNITS), key=len, reverse=True))
_LONG_UNITS = "|".join(sorted((re.escape(name) for name in rules.UNITS if len(name) > 1), key=len, reverse=True))
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
_CURRENCY_NAMES = "|".join(sorted(map(re.escape, rules.CURRENCIES), key=len, reverse=True)).replace(r"\$", "＄")
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
