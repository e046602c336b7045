"""Check SFT conversations.

1. Roles: an optional system message, then alternating user and assistant; one tool message for each call, after its turn.
2. Each call can be parsed, names an existing tool and has the required arguments.
3. An assistant message is a closed <reason>, followed by calls or by exactly one answer.
4. The text contains no control tokens, which the tokenizer would encode as special tokens, and no tags of a tool's response,
   which would end or imitate one.
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rstar_lab.rl.problems import ProblemError, read_problem, read_rows
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.base import count_answers
from rstar_lab.tool_calls import parse_tool_calls, parse_turn
from rstar_lab.untrusted.text import counted
from rstar_lab.verify import readable
from rstar_lab.verify.gold import fault_of_answer

if TYPE_CHECKING:
    from rstar_lab.rl.renderers.conversations import Conversation


RESPONSE_TAGS = ("<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class LintFinding:
    """A fault of a conversation. message: index of the message; None: the whole conversation."""

    message: int | None
    rule: str
    text: str

    def __str__(self) -> str:
        place = "conversation" if self.message is None else f"message {self.message}"
        return f"{place}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class ProblemFinding:
    """A fault of a row of a problem file. row: from 1. rule: `row`, `repeated problem` or `answer`."""

    row: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}: {self.text}"


def lint_problems(
    path: Path, fields: Mapping[str, str] | None = None, max_answers: int | None = None
) -> Iterator[ProblemFinding]:
    """Yield the faults of a problem file: rows that cannot be read, repeated problems, and answers that are text.

    An answer that is not read as mathematics is compared as text only, so only the same text is correct (see
    docs/evaluation.md).

    Args:
        path: A .jsonl, .json or .parquet file.
        fields: Our field name -> column name, see `load_problems`.
        max_answers: Number of answers that are checked. Default: all.
    """
    seen: dict[tuple[str, str], int] = {}
    answers: list[tuple[int, str]] = []
    for row, content in read_rows(path):
        name = f"row {row}"
        try:
            problem = read_problem(content, where=name, fields=fields or {}, default_id=name, default_source="")
        except ProblemError as error:
            yield ProblemFinding(row, "row", str(error).removeprefix(f"{name}, ").removeprefix(f"{name}: "))
            continue
        if (before := seen.setdefault((problem.question, problem.task()), row)) != row:
            yield ProblemFinding(row, "repeated problem", f"its question is also in row {before}")
        if problem.answer:
            answers.append((row, problem.answer))
    answers = answers[:max_answers]
    with ThreadPoolExecutor(4) as threads:
        for (row, answer), found in zip(answers, threads.map(lambda item: readable(item[1]), answers), strict=True):
            if not found:
                fault = fault_of_answer(answer) or "is not read as mathematics; only this text is correct"
                yield ProblemFinding(row, "answer", f"{answer[:80]!r} {fault}")


def lint(conversation: "Conversation") -> list[LintFinding]:
    """Return all faults of a conversation. If the list is empty, the conversation can be used for training."""
    return [*_roles(conversation), *_calls(conversation), *_turns(conversation), *_control(conversation)]


def _roles(conversation: "Conversation") -> Iterator[LintFinding]:
    unanswered, expected = 0, "user"  # unanswered: calls without a tool message
    for place, message in enumerate(conversation.messages):
        role = message.role
        if role == "system" and place == 0:
            continue
        if role == "tool":
            if not unanswered:
                yield LintFinding(place, "roles", "tool message without a call")
            unanswered = max(0, unanswered - 1)
            expected = "assistant"
            continue
        if unanswered:
            yield LintFinding(place, "roles", f"{counted(unanswered, 'call')} before it without a tool message")
        if role != expected:
            yield LintFinding(place, "roles", f"{role} message, expected {expected}")
        unanswered = len(parse_tool_calls(message.content)) if role == "assistant" else 0
        expected = "user" if role == "assistant" else "assistant"
    if conversation.messages[-1].role != "assistant":
        yield LintFinding(None, "roles", "the last message is not from the assistant")
    if unanswered:
        yield LintFinding(None, "roles", f"{counted(unanswered, 'call')} at the end without a tool message")


def _calls(conversation: "Conversation") -> Iterator[LintFinding]:
    functions = [tool.get("function") for tool in conversation.tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        yield LintFinding(None, "tools", 'a tool is not {"type": "function", "function": {"name": ...}}')
    schemas = {function.get("name"): function.get("parameters") for function in functions if isinstance(function, dict)}
    for place, message in enumerate(conversation.messages):
        for call in parse_tool_calls(message.content) if message.role == "assistant" else []:
            schema = schemas.get(str(call.name))
            required = (schema.get("required") if isinstance(schema, dict) else None) or []
            if call.error or call.arguments is None:
                yield LintFinding(place, "tool call", str(call.error))
            elif call.name not in schemas:
                yield LintFinding(place, "tool call", f"there is no tool {call.name!r}")
            elif missing := [name for name in required if name not in call.arguments]:
                yield LintFinding(place, "tool call", f"{call.name} lacks {', '.join(map(str, missing))}")


def _turns(conversation: "Conversation") -> Iterator[LintFinding]:
    for place, message in enumerate(conversation.messages):
        if message.role != "assistant":
            if not message.content.strip() and message.role != "tool":
                yield LintFinding(place, "empty", f"the {message.role} message is empty")
            continue
        reason, closed, rest = message.content.removeprefix("<reason>").partition("</reason>")
        answers = count_answers(rest)
        if not closed or "<answer>" in reason or "<tool_call>" in reason:
            yield LintFinding(place, "turn", "no closed <reason> at the beginning")
        elif "<tool_call>" in rest:
            if "<answer>" in parse_turn(rest).outside:
                yield LintFinding(place, "turn", "both a call and an answer")
        elif answers != 1:
            yield LintFinding(place, "turn", f"{answers} answers and no call")
        elif not re.sub(r"</?answer>", "", rest).strip():
            yield LintFinding(place, "empty", "the answer is empty")


def _control(conversation: "Conversation") -> Iterator[LintFinding]:
    for place, message in enumerate(conversation.messages):
        for token in (*chat.SPECIAL_TOKENS, *RESPONSE_TAGS):
            if token in message.content and (token not in RESPONSE_TAGS or message.role != "assistant"):
                yield LintFinding(place, "control token", token)
