"""A place in the tokens of an answer."""

from collections.abc import Sequence
from functools import partialmethod

from rstar_lab.verify.tokens import Token, Unreadable

END = Token("end", "")
RELATIONS = {
    **{name: name for name in ("=", "<", ">", "approx", "equiv", "in", "notin", "subset", "to", "Rightarrow", "Leftrightarrow", "<=", ">=", "!=")},
    "leq": "<=", "geq": ">=", "neq": "!=", "subseteq": "subset",
}  # fmt: skip
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

    def _is(self, kind: str, *texts: str, offset: int = 0) -> bool:
        token = self.peek(offset)
        return token.kind == kind and (token.text.casefold() if kind == "word" else token.text) in texts

    is_sign = partialmethod(_is, "sign")
    is_command = partialmethod(_is, "command")
    is_word = partialmethod(_is, "word")
    is_symbol = partialmethod(_is, "symbol")

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
        """Return the place of the sign that closes the bracket that opens here."""
        level = 0
        for place in range(self.at, len(self.tokens)):
            token = self.tokens[place]
            if token.kind == "sign":
                level += (token.text == opening) - (token.text == closing)
                if level == 0:
                    return place
        raise Unreadable(f"no {closing}")

    def enclosed(self, opening: str, closing: str) -> list[Token]:
        """Return the tokens in the bracket that opens here, and move behind it."""
        if not self.is_sign(opening):
            raise Unreadable(f"expected {opening}, found {self.peek().text}")
        end = self.closing(opening, closing)
        inner = self.tokens[self.at + 1 : end]
        self.at = end + 1
        return inner

    def braced(self) -> list[Token]:
        """Return the tokens in braces here, and move behind them."""
        return self.enclosed("{", "}")

    def item_end(self, place: int) -> bool:
        """Return whether an item of a list can end before a token."""
        token = self.tokens[place] if place < len(self.tokens) else END
        if token.kind == "sign":
            return token.text in _ITEM_ENDS
        if token.kind == "command":
            return token.text in _COMMAND_ENDS
        return token.kind == "end" or (token.kind == "word" and token.text.casefold() in ("and", "or"))
