"""Conversations to imitate: one message schema with tools, written as our chat format has it, and files of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rstar_lab.rl.chat_format import template as chat
from rstar_lab.rl.problems import ProblemError, read_rows
from rstar_lab.runs.files import atomic_write


class Message(BaseModel):
    """One turn. An assistant's content is all it writes, tool calls in their tags included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Conversation(BaseModel):
    """Messages and the tools they may use (JSON schemas in OpenAI's form)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conversation_id: str
    source: str
    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] = ()

    def segments(self) -> list[tuple[str, bool]]:
        """(text, is_the_model's_own) pieces: what `sft` trains on."""
        return chat.render_segments([message.model_dump() for message in self.messages], tools=self.tools)


def reply(text: str) -> str:
    """An assistant's turn that answers. Non-reasoning SFT: the reason is empty, the format is all there is to learn."""
    return f"<reason></reason>\n<answer>{text.strip()}</answer>"


def tool_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], said: str = "") -> str:
    """An assistant's turn that calls tools, with what it said before."""
    return "\n".join(
        [f"<reason>{said.strip()}</reason>", *(chat.render_tool_call(name, arguments) for name, arguments in calls)]
    )


def write_conversations(path: str | Path, conversations: Iterable[Conversation]) -> int:
    """Writes .jsonl (ours), or .parquet with the columns messages and tools (verl's SFT reads those). Returns how many.

    The file appears whole or not at all.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ProblemError(f"{path}: conversations are written as .jsonl or .parquet, not {path.suffix!r}")
    count = 0
    with atomic_write(path) as file:
        if path.suffix == ".jsonl":
            for conversation in conversations:
                file.write((conversation.model_dump_json() + "\n").encode())
                count += 1
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            message = pa.struct([("role", pa.string()), ("content", pa.string())])
            columns = [
                ("conversation_id", pa.string()),
                ("source", pa.string()),
                ("messages", pa.list_(message)),
                ("tools", pa.string()),
            ]
            rows = [{**one.model_dump(), "tools": json.dumps(one.tools, ensure_ascii=False)} for one in conversations]
            pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(columns)), file)
            count = len(rows)
    return count


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """Conversations of a .jsonl or .parquet file. Raises ProblemError that names file, row and field."""
    for number, row in read_rows(path):
        try:
            if isinstance(row, Mapping) and isinstance(row.get("tools"), str):
                row = {**row, "tools": json.loads(row["tools"])}
            yield Conversation.model_validate(row)
        except ValidationError as error:
            detail = error.errors()[0]
            field = ".".join(map(str, detail["loc"])) or "row"
            raise ProblemError(f"{path} row {number}, field {field!r}: {detail['msg']}") from None
        except json.JSONDecodeError as error:
            raise ProblemError(f"{path} row {number}, field 'tools': not JSON: {error}") from None
