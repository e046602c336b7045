"""The recipe in the folder of a run, which may come from somebody else: it must not choose what runs or where we connect."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rstar_lab.untrusted.files import DataError

# Texts in which a colon names nothing. Every other text with one is a function, a command, an address or a URL.
_FREE_TEXTS = frozenset({"label", "system_prompt", "answer_instruction"})
_LOCAL_LOGGERS = frozenset({"tensorboard"})


class ForeignRecipe:
    """The recipe of a stored run. It is no mapping, so that nobody can use it as a recipe: `accept` returns one after a check."""

    __slots__ = ("_data",)

    def __init__(self, data: Mapping[str, Any]):
        self._data = dict(data)

    def accept(
        self, where: str, allowed: Collection[str] = (), *, sections: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the recipe if it names no function, command, address, URL or external logger, and does not trust code of a model.

        Args:
            where: The run, for the error.
            allowed: What it may name, because the user has named it too.
            sections: The sections to return. Default: all.
            ignored: Dotted keys that are left out.

        Raises:
            DataError: It names something else.
        """
        data = {name: value for name, value in self._data.items() if not sections or name in sections}
        for key in ignored:
            section, _, name = key.partition(".")
            if isinstance(inner := data.get(section), dict):
                data[section] = {own: value for own, value in inner.items() if own != name}
        if refused := sorted(set(_named(data)) - set(allowed)):
            raise DataError(
                f"the recipe of {where} names {', '.join(refused)}. Functions, commands and addresses in a run folder are not "
                f"used, because the folder may come from somebody else. If you know them, name them: functions={refused}, or "
                f"{' '.join(f'--functions {name!r}' for name in refused)}"
            )
        return data

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, for display and comparison. default: for a key that it does not have."""
        value: Any = self._data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def for_display(self) -> Mapping[str, Any]:
        """Return the content to print, store or compare it."""
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ForeignRecipe) and self._data == other._data

    __hash__ = None  # type: ignore[assignment]


def _named(value: object, key: str = "") -> Iterator[str]:
    """Yield what a JSON value names: functions, commands, addresses, URLs, loggers, and the trust in code."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item, key)
    elif isinstance(value, str) and key == "log_to":
        yield from {value} - _LOCAL_LOGGERS
    elif isinstance(value, str) and ":" in value and key not in _FREE_TEXTS:
        yield value
    elif key == "trust_remote_code" and value:
        yield key
