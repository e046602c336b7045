"""A chat to look at, in a terminal or in a notebook's cell: thinking, code, results and answer set apart."""

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from rstar_lab.rl.chat.events import Event, Kind
from rstar_lab.rl.chat.session import Chat, ChatOptions, Reply, open_chat

_STYLES = {Kind.REASON: "dim italic", Kind.TEXT: "", Kind.ANSWER: "bold green"}
_STOPS = {"length": "cut: no tokens left", "max_turns": "no turns left", "time_limit": "out of time"}


async def show(chat: Chat, question: str, console: Console | None = None) -> Reply:
    """Ask, and print the reply while it comes."""
    console = console or Console(highlight=False)
    before: Kind | None = None
    async for event in chat.stream(question):
        if before in _STYLES and event.kind is not before:
            console.print()
        _print(console, event)
        before = event.kind
    return chat.replies[-1]


def _print(console: Console, event: Event) -> None:
    match event.kind:
        case Kind.CALL:
            code = Syntax(event.text, "python", word_wrap=True, background_color="default")
            console.print(Panel(code, title=event.tool or "call", title_align="left", border_style="cyan"))
        case Kind.RESULT:
            style = "green" if event.outcome == "ok" else "red"
            console.print(Panel(Text(event.text), title=event.outcome, title_align="left", border_style=style))
        case Kind.STOP:
            if event.text in _STOPS:
                console.print(f"[yellow]{_STOPS[event.text]}[/]")
        case kind:
            console.print(Text(event.text, style=_STYLES[kind]), end="", soft_wrap=True)


async def chat_command(
    model_or_url: str,
    options: ChatOptions,
    *,
    prompt: str | None,
    tokenizer: Path | None,
    plain: bool,
    engine: str,
    sandbox: str,
    save: bool,
    name: str | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """`rstar-lab chat`. Raises UserError."""
    opened = open_chat(
        model_or_url, options, tokenizer=tokenizer, plain=plain, engine=engine, sandbox=sandbox, save=save, name=name,
        runs_dir=runs_dir,
    )  # fmt: skip
    console = Console(highlight=False)
    async with opened as chat:
        if prompt is None:
            await _talk(chat, console)
        elif as_json:
            reply = await chat.ask(prompt)
            run = {"run": str(chat.log.run_dir), "traj_id": reply.trajectory.traj_id} if chat.log else {}
            print(json.dumps(reply.as_dict() | run))
        else:
            await show(chat, prompt, console)
        if chat.log and not as_json:
            console.print(f"[dim]run {chat.log.run_dir}[/]")


async def _talk(chat: Chat, console: Console) -> None:
    console.print("[dim]Ask. /new begins anew, /quit or Ctrl-D ends; Ctrl-C ends a reply, twice the chat.[/]")
    while True:
        try:
            question = (await _line(console)).strip()
        except EOFError:
            return
        if question == "/quit":
            return
        if question == "/new":
            chat.forget()
        elif question:
            with suppress(asyncio.CancelledError):
                await show(chat, question, console)


async def _line(console: Console) -> str:
    """A line from the keyboard. Raises EOFError."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def set_if_wanted(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        try:
            text = console.input("[bold]> [/]")
        except EOFError:
            text = None
        loop.call_soon_threadsafe(set_if_wanted, text)

    # A daemon, for a thread that waits for a line must not keep the process from ending.
    threading.Thread(target=read, daemon=True).start()
    if (text := await line) is None:
        raise EOFError
    return text
