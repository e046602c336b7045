"""Prints a chat in a terminal or a notebook, with reasoning, code, results and answer in different styles."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from rstar_lab.rl.chat.events import Event, Kind
from rstar_lab.rl.chat.session import Chat, ChatOptions, Reply, open_chat
from rstar_lab.rl.tools.user import run_in_daemon_thread
from rstar_lab.untrusted.text import printable

_STYLES = {Kind.REASON: "dim italic", Kind.TEXT: "", Kind.ANSWER: "bold green"}
_STOPS = {"length": "stopped: token limit", "max_turns": "stopped: turn limit", "time_limit": "stopped: time limit"}


async def show(chat: Chat, question: str, console: Console | None = None) -> Reply:
    """Ask a question, print the reply while it is generated, and return it."""
    console = console or Console(highlight=False)
    previous: Kind | None = None
    async for event in chat.stream(question):
        if previous in _STYLES and event.kind is not previous:
            console.print()
        _print(console, event)
        previous = event.kind
    return chat.replies[-1]


def _print(console: Console, event: Event) -> None:
    shown = printable(event.text)
    match event.kind:
        case Kind.CALL:
            code = Syntax(shown, "python", word_wrap=True, background_color="default")
            console.print(
                Panel(code, title=Text(printable(event.tool or "call")), title_align="left", border_style="cyan")
            )
        case Kind.RESULT:
            style = "green" if event.outcome == "ok" else "red"
            console.print(
                Panel(Text(shown), title=Text(printable(event.outcome)), title_align="left", border_style=style)
            )
        case Kind.STOP:
            if event.text in _STOPS:
                console.print(f"[yellow]{_STOPS[event.text]}[/]")
        case kind:
            console.print(Text(shown, style=_STYLES[kind]), end="", soft_wrap=True)


async def chat_command(
    model_or_url: str, options: ChatOptions, *, prompt: str | None, as_json: bool, **opening: Any
) -> None:
    """Run `rstar-lab chat`. opening: see `open_chat`. Raises UserError."""
    opened = open_chat(model_or_url, options, **opening)
    console = Console(highlight=False)
    async with opened as chat:
        if prompt is None:
            await _interactive(chat, console)
        elif as_json:
            reply = await chat.ask(prompt)
            run = {"run": str(chat.log.run_dir), "traj_id": reply.trajectory.traj_id} if chat.log else {}
            print(json.dumps(reply.as_dict() | run))
        else:
            await show(chat, prompt, console)
        if chat.log and not as_json:
            console.print(Text(f"run {printable(chat.log.run_dir)}", style="dim"))


async def _interactive(chat: Chat, console: Console) -> None:
    console.print(
        "[dim]Type a question. /new: new conversation. /quit or Ctrl-D: exit. Ctrl-C: stop the reply (twice: exit).[/]"
    )
    while True:
        try:
            # In a daemon thread: one that waits for input must not keep the process alive.
            question = (await run_in_daemon_thread(lambda: console.input("[bold]> [/]"))).strip()
        except EOFError:
            return
        if question == "/quit":
            return
        if question == "/new":
            chat.reset()
        elif question:
            with suppress(asyncio.CancelledError):
                await show(chat, question, console)
