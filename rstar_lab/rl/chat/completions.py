"""Chat through OpenAI-style /v1/chat/completions with tools, for servers that do not accept token ids.

The server renders the conversation with its own template and parses the tool calls (on vLLM: `--tool-call-parser hermes`).
Without a parser on the server, the calls stay in the text and the agent loop's parser finds them.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import MAX_S, limit_answers
from rstar_lab.common.service_tokens import find_token
from rstar_lab.rl.chat.events import Event, Kind, Sections, call_event
from rstar_lab.rl.engines.server import API_KEY, VERSION_PATH, error_text, read_model_card
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question, render_tool_call
from rstar_lab.rl.rollout.agent_loop import execute_call, make_call_record, make_trajectory
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.tool_calls import ToolCall, parse_tool_calls

MAX_TOOL_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server and its first model. folder: model folder, if it is on this machine. context: maximum tokens of prompt
    and response; None if the server does not report it.
    """

    http: httpx.AsyncClient
    url: str
    model: str
    folder: Path | None
    context: int | None

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["ChatServer"]:
        """Connect. Raises UserError if the server does not answer, rejects the token, or is not OpenAI-style."""
        url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(API_KEY) or find_token(url) or _openai_key(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(10.0, read=MAX_S)
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        async with limit_answers(client) as http:
            card = await read_model_card(http, url)
            root = Path(str(card.get("root") or ""))
            folder = root if (root / "config.json").is_file() else None
            yield cls(http, url, card["id"], folder, card.get("max_model_len"))

    async def complete(self, text: str, *, temperature: float, max_tokens: int, seed: int) -> str:
        """Return the reply of the model to one user message, without its reasoning. Raises UserError if the server rejects it."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": temperature,
            "max_tokens": max_tokens, "seed": seed,
        }  # fmt: skip
        try:
            answer = await self.http.post("/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            raise UserError(f"{self.url}: connection lost: {error_text(error)}") from None
        if answer.status_code != 200:
            raise UserError(f"{self.url}: {answer.status_code} {answer.text[:500]}")
        try:
            content: str = answer.json()["choices"][0]["message"]["content"] or ""
            return content.rpartition("</think>")[2].strip()
        except (AttributeError, ValueError, LookupError, TypeError, RecursionError):
            raise UserError(f"{self.url}: not an answer of a chat model: {answer.text[:200]}") from None

    async def weight_version(self) -> int | None:
        """Return the version of the weights that a trainer pushed last.

        Returns None if the server has the weights that it was started with, or does not report the version.
        """
        try:
            return int((await self.http.get(VERSION_PATH)).json()["version"])
        except (httpx.TransportError, ValueError, LookupError, TypeError, RecursionError):
            return None


def _openai_key(url: str) -> str | None:
    """Return OPENAI_API_KEY for the server that OPENAI_BASE_URL names (default: that of OpenAI), None for any other server."""
    try:
        own, asked = urlsplit(os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com"), urlsplit(url)
    except ValueError:
        return None
    return os.environ.get("OPENAI_API_KEY") if (own.scheme, own.netloc) == (asked.scheme, asked.netloc) else None


@dataclass(slots=True)
class _PartialTurn:
    """The part of a turn that has been received so far."""

    text: str = ""
    thought: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str = ""
    tokens: int = 0


class PlainChat:
    """A chat through chat completions. The server renders the conversation and parses the tool calls."""

    def __init__(self, server: ChatServer, tools: Mapping[str, Tool], options: Any):
        """options: see `session.ChatOptions`."""
        self.server, self.tools, self.options = server, tools, options
        self.messages: list[dict[str, Any]] = []
        self._tokens: dict[str, int] = {}

    def reset(self) -> None:
        self.messages = []

    def tokens_of(self, trajectory: Trajectory) -> int:
        return self._tokens[trajectory.traj_id]

    async def reply(
        self, question: str, name: str, number: int, seed: int, on_event: Callable[[Event], None]
    ) -> Trajectory:
        """Answer one question and return the trajectory, without token ids. Raises UserError if the server fails.

        name, number: name of the chat, and number of the question in it. on_event: called with each event.
        """
        if not self.messages:
            self.messages.append({"role": "system", "content": SYSTEM_PROMPT})
        self.messages.append({"role": "user", "content": format_question(question)})
        traj_id = f"{name}-{number:03d}"
        turns: list[Turn] = []
        records: list[ToolCallRecord] = []
        stop, tokens = StopReason.MAX_TURNS, 0
        while len(turns) < self.options.max_turns:
            remaining = self.options.max_tokens - tokens if self.options.max_tokens else None
            started = time.monotonic()
            partial = await self._turn(derive_seed(seed, "turn", len(turns)), remaining, on_event)
            tokens += partial.tokens
            generate_s = time.monotonic() - started
            calls, message, text = _read_turn(partial)
            self.messages.append(message)
            truncated = partial.finish == "length" or (remaining is not None and partial.tokens >= remaining)
            run_tools = bool(calls) and not truncated and len(turns) + 1 < self.options.max_turns
            for index, (call_id, call) in enumerate(calls):
                if call_id:  # `Sections` has emitted the calls without an id, which are in the text
                    on_event(call_event(call))
                if not run_tools:
                    continue
                result = await execute_call(
                    call,
                    self.tools,
                    seed=derive_seed(seed, "call", len(turns), index),
                    traj_id=traj_id,
                    max_chars=MAX_TOOL_CHARS,
                )
                on_event(Event(Kind.RESULT, result.text, call.name or "", str(result.outcome)))
                self.messages.append(
                    {"role": "tool", "tool_call_id": call_id or f"call_{index}", "content": result.text}
                )
                records.append(make_call_record(call, result, turn=len(turns), index=index, position=0))
            turns.append(Turn(0, 0, text, generate_s, time.monotonic() - started - generate_s, 0.0))
            if not run_tools:
                stop = StopReason.LENGTH if truncated else StopReason.MAX_TURNS if calls else StopReason.ANSWERED
                break
        for tool in self.tools.values():
            await tool.close(traj_id)
        self._tokens[traj_id] = tokens
        return make_trajectory(
            turns, records, traj_id=traj_id, problem_id=f"{name}-{number}", group_id=name, sample=number, question=question,
            truth="", prompt_ids=[], response_ids=[], loss_mask=[], log_probs=[], stop_reason=stop, reward=0.0,
            engine=self.server.url, policy_version=0,
        )  # fmt: skip

    async def _turn(self, seed: int, max_tokens: int | None, on_event: Callable[[Event], None]) -> _PartialTurn:
        body: dict[str, Any] = {
            "model": self.server.model,
            "messages": self.messages,
            "temperature": self.options.temperature,
            "top_p": self.options.top_p,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.tools:  # servers reject an empty list
            body["tools"] = [tool.schema for tool in self.tools.values()]
        if max_tokens:
            body["max_tokens"] = max_tokens
        turn, sections = _PartialTurn(), Sections(Kind.TEXT)
        try:
            async with self.server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise UserError(f"{self.server.url}: {answer.status_code} {(await answer.aread()).decode()[:500]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        for event in self._add(turn, sections, line.removeprefix("data: ")):
                            on_event(event)
        except httpx.TransportError as error:
            raise UserError(f"{self.server.url}: connection lost: {error_text(error)}") from None
        for event in sections.end():
            on_event(event)
        return turn

    def _add(self, turn: _PartialTurn, sections: Sections, line: str) -> list[Event]:
        """Add one line of the stream to the turn; return the new events. Raises UserError for a line of another form."""
        try:
            return _add_chunk(turn, sections, json.loads(line), self.server.url)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{self.server.url}: not an answer of chat completions: {line[:200]}") from error


def _add_chunk(turn: _PartialTurn, sections: Sections, chunk: dict[str, Any], url: str) -> list[Event]:
    """Add one chunk of the stream to the turn; return the new events."""
    if "error" in chunk:
        raise UserError(f"{url}: {chunk['error'].get('message', chunk['error'])}")
    if usage := chunk.get("usage"):
        turn.tokens = int(usage["completion_tokens"])
    events: list[Event] = []
    for choice in chunk["choices"]:
        turn.finish = str(choice.get("finish_reason") or turn.finish)
        delta = choice["delta"]
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            turn.thought += thought
            events.append(Event(Kind.REASON, thought))
        if content := delta.get("content"):
            turn.text += content
            events += sections.feed(content)
        for call in delta.get("tool_calls") or ():
            parts = turn.calls.setdefault(int(call["index"]), {"id": "", "name": "", "arguments": ""})
            parts["id"] = str(call.get("id") or parts["id"])
            function = call.get("function") or {}
            parts["name"] += function.get("name") or ""
            parts["arguments"] += function.get("arguments") or ""
    return events


def _read_turn(turn: _PartialTurn) -> tuple[list[tuple[str, ToolCall]], dict[str, Any], str]:
    """Return ((id, call) of each call, the message for the history, the text of the turn in the paper's format). The id is ""
    for a call that was parsed from the text."""
    text = f"<reason>{turn.thought}</reason>{turn.text}" if turn.thought else turn.text
    if not turn.calls:
        return [("", call) for call in parse_tool_calls(turn.text)], {"role": "assistant", "content": turn.text}, text
    calls, sent = [], []
    for index, parts in sorted(turn.calls.items()):
        call_id = parts["id"] or f"call_{index}"
        calls.append((call_id, _call(parts["name"], parts["arguments"])))
        sent.append(
            {"id": call_id, "type": "function", "function": {"name": parts["name"], "arguments": parts["arguments"]}}
        )
        text += "\n" + render_tool_call(parts["name"], parts["arguments"])
    return calls, {"role": "assistant", "content": turn.text, "tool_calls": sent}, text


def _call(name: str, arguments: str) -> ToolCall:
    try:
        value = json.loads(arguments or "{}")
    except ValueError as error:
        return ToolCall(name, None, f"The arguments are not valid JSON: {error}", arguments)
    if not isinstance(value, dict):
        return ToolCall(name, None, 'The "arguments" of the tool call must be a JSON object.', arguments)
    return ToolCall(name, value, None, arguments)
