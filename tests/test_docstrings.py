"""The docstrings of the API page are in Google style: a tool, and Jupyter's tooltip, find every parameter."""

import logging
import re
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = griffe.load("rstar_lab", search_paths=[ROOT], docstring_parser="google")
logging.getLogger("griffe").setLevel(logging.ERROR)


def documented() -> list[str]:
    """Return the names on the API page: MODULE.NAME."""
    page = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"::: (rstar_lab[\w.]*)\n\s+options: \{members: \[([^\]]*)\]", page)
    return [f"{module}.{name.strip()}" for module, names in blocks for name in names.split(",")]


INHERITING = ("LocalSandbox", "SandboxClient")  # their public methods are those of Sandbox


def functions() -> list[griffe.Function]:
    """Return the functions of the page and the public methods of its classes."""
    found = []
    for path in documented():
        if path.rpartition(".")[2] in INHERITING:
            continue
        item = PACKAGE[path.removeprefix("rstar_lab.")]
        item = item.final_target if item.is_alias else item
        members = item.members.values() if item.is_class else [item]
        found += [member for member in members if member.is_function and not member.name.startswith("_")]
    return found


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.path)
def test_every_parameter_of_a_public_function_is_described(function):
    names = [parameter.name for parameter in function.parameters if parameter.name not in ("self", "cls")]
    if not names:
        return
    sections = function.docstring.parse("google") if function.docstring else []
    described = [
        element.name.lstrip("*")
        for section in sections
        if section.kind.value == "parameters"
        for element in section.value
    ]
    assert described == names


def test_the_page_lists_functions():
    assert len(functions()) > 50
