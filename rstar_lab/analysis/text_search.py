"""Search for a text in the messages of transcripts, which are stored as JSON with or without escapes.

The arguments of a tool call are JSON inside of JSON, so a character can be escaped twice.
"""

import json
import re

_UNICODE = re.compile(r"\\{1,2}u([0-9a-fA-F]{4})")


def search_pattern(text: str, *, any_case: bool = True) -> str:
    """Return a regular expression (RE2 and Python) that finds a text in stored messages. any_case: search with the flag `i`, for ASCII."""
    return "".join(_one_of(char, any_case) for char in text)


def in_any_case(pattern: str) -> str:
    """Return an RE2 pattern with both cases of ASCII letters. pattern: of lower-case texts, where upper-case letters find nothing."""
    return re.sub("[a-zA-Z]", lambda c: f"[{c[0]}{c[0].upper()}]" if c[0].islower() else r"\b\B", pattern)


def _one_of(char: str, any_case: bool) -> str:
    if char in '"\\':
        return rf"\\{{1,3}}{re.escape(char)}"
    cases = dict.fromkeys((char, char.lower(), char.upper()) if any_case and not char.isascii() else (char,))
    # As JSON writes it, with each escape once or twice.
    escapes = {case: re.escape(json.dumps(case)[1:-1]).replace(r"\\", r"\\{1,2}") for case in cases}
    forms = [form for case in cases for form in (re.escape(case), escapes[case])]
    return f"(?:{'|'.join(dict.fromkeys(forms))})" if len(set(forms)) > 1 else forms[0]


def excerpt(messages: str, pattern: str) -> str:
    """Return the text around the first place that a pattern finds, with its escapes."""
    found = re.search(pattern, messages, re.IGNORECASE)
    start, end = found.span() if found else (0, 0)
    return messages[max(0, start - 60) : end + 100]


def unescaped(text: str) -> str:
    """Return an excerpt of stored messages as one readable line."""
    text = re.sub(r"\\{1,2}(u[0-9a-fA-F]{0,3})?$", "", text)  # half an escape
    text = _UNICODE.sub(lambda found: chr(int(found[1], 16)), text)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub(r"\\{1,2}[nrt]|\s+", " ", text).replace('\\"', '"').replace("\\\\", "\\")
