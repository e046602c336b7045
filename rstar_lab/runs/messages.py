"""Messages of a transcript, checked when they are read: a run folder may come from somebody else."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rstar_lab.common.outcomes import Outcome
from rstar_lab.untrusted.files import parse_json, without_surrogates

ROLES = ("system", "user", "assistant", "tool", "environment")
OTHER = "other"  # role of a message whose role is none of ROLES
_OUTCOMES = tuple(map(str, Outcome))


def read_messages(messages: str | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the messages of a transcript, each with role, content, and the optional keys that have a valid value.

    Args:
        messages: the column `messages` of a transcript (JSON), or a list of messages.

    Returns:
        Messages with role (one of ROLES or OTHER), content (Unicode text), tool (text or None), outcome (an outcome or None), and
        generate_s, reward, control_token and policy_versions where they are stored.

    Raises:
        DataError: the text is not a JSON list of objects.
    """
    if isinstance(messages, str):
        messages = parse_json(messages, "a transcript", list[dict[str, Any]])
    return [_checked(message) for message in messages or ()]


def own_texts(messages: str | Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Return what the model wrote in each of its turns. messages: as for `read_messages`."""
    return [message["content"] for message in read_messages(messages) if message["role"] == "assistant"]


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content, tool, outcome = map(message.get, ("role", "content", "tool", "outcome"))
    checked = {
        "role": role if role in ROLES else OTHER,
        "content": "" if content is None else _text(content),
        "tool": None if tool is None else _text(tool),
        "outcome": outcome if outcome in _OUTCOMES else None,
    }
    return checked | {name: message[name] for name, is_valid in _OPTIONAL.items() if is_valid(message.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _is_list_of_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in value
    )


_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "generate_s": _is_number,
    "reward": _is_number,
    "control_token": lambda value: value is True,
    "policy_versions": _is_list_of_pairs,
}


def _text(value: Any) -> str:
    text: str = without_surrogates(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text
