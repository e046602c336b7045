"""Every command that README, docs, notebooks and messages show works as written, in a shell that did only what the page said.

Commands are parsed by the real command line: a wrong option, a missing argument or an unknown command fails. `.venv/bin/` is
never needed, because every page that shows a command says `source .venv/bin/activate` or is reached from one that does.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from rstar_lab.cli.command_line import app

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("notebooks/py/*.py")),
    *sorted(ROOT.glob("cluster/**/*.md")),
]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FENCE = re.compile(r"^[ #]*```(\w*)[^\n]*\n(.*?)^[ #]*```[ ]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:rstar-lab|make) [^`]+)`")


def shell_commands(text: str) -> list[str]:
    """Return the commands of the shell blocks and the inline code of a page, with continued lines joined."""
    found = INLINE.findall(text)
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "bash", "console"):
            found += [line.strip(" #").removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in found if re.match(r"(\S+=\S+ )?(rstar-lab|make) ", line)]


def words_of(line: str) -> list[str]:
    """Return the words of the first simple command of a line, without assignments, comments and redirections."""
    line = re.sub(r" \[(--[^\]]+)\]", r" \1", line)  # `[--option VALUE]` is optional
    words = ["1" if word in ("K", "M", "N") else word for word in shlex.split(line, comments=True)]
    while words and "=" in words[0] and not words[0].startswith("-"):
        words.pop(0)
    for mark in ("|", "&&", ";", ">", "2>", "&", ">>"):
        words = words[: words.index(mark)] if mark in words else words
    return words


def parse(words: list[str]) -> None:
    """Parse the words of `rstar-lab ...` as the command line does, without running anything."""
    command: Any = typer.main.get_command(app)
    rest, path = words[1:], ["rstar-lab"]
    while hasattr(command, "list_commands"):
        if not rest or rest[0] in ("--help", "--version"):
            return
        inner = command.get_command(typer.Context(command), rest[0])
        assert inner is not None, f"there is no command {' '.join([*path, rest[0]])}"
        command, path, rest = inner, [*path, rest[0]], rest[1:]
    if "--help" not in rest and "..." not in rest and rest:  # a command may be named alone
        command.make_context(path[-1], rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_parses(page):
    wrong = []
    for line in shell_commands(page.read_text(encoding="utf-8")):
        try:
            words = words_of(line)
            if words[0] == "make":
                assert {word for word in words[1:] if "=" not in word and word.isascii()} <= MAKE_TARGETS, (
                    "no such target"
                )
            else:
                parse(words)
        except Exception as error:  # the exceptions of typer's parser have no public name
            wrong.append(f"{line}: {getattr(error, 'message', None) or error}")
    assert not wrong, "\n".join(wrong)


def test_no_page_needs_the_path_of_the_environment():
    named = [str(page.relative_to(ROOT)) for page in PAGES if ".venv/bin/rstar-lab" in page.read_text(encoding="utf-8")]
    assert not named


def test_nothing_names_a_distribution_that_no_index_has():
    """`pip install 'rstar_lab[...]'` fails: the package is installed from a clone."""
    files = [*PAGES, *ROOT.glob("rstar_lab/**/*.py"), ROOT / "environment.yml"]
    named = [
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"pip install [\"']?rstar_lab|REPOSITORY_URL", path.read_text(encoding="utf-8"))
    ]
    assert not named
