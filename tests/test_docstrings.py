"""The docstrings of the API page are in Google style: a tool, and Jupyter's tooltip, find every parameter."""

import logging
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INHERITING = ("LocalSandbox", "SandboxClient")  # their public methods are those of Sandbox


def documented() -> list[str]:
    """Return the names on the API page: MODULE.NAME."""
    page = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"::: (rstar_lab[\w.]*)\n\s+options: \{members: \[([^\]]*)\]", page)
    return [f"{module}.{name.strip()}" for module, names in blocks for name in names.split(",")]


@cache
def package():
    import griffe

    logging.getLogger("griffe").setLevel(logging.ERROR)
    return griffe.load("rstar_lab", search_paths=[ROOT], docstring_parser="google")


def functions(path: str) -> list:
    """Return the function of this name, or the public methods of the class."""
    item = package()[path.removeprefix("rstar_lab.")]
    item = item.final_target if item.is_alias else item
    members = item.members.values() if item.is_class else [item]
    return [member for member in members if member.is_function and not member.name.startswith("_")]


@pytest.mark.parametrize("path", [path for path in documented() if path.rpartition(".")[2] not in INHERITING])
def test_every_parameter_of_a_public_function_is_described(path):
    for function in functions(path):
        names = [parameter.name for parameter in function.parameters if parameter.name not in ("self", "cls")]
        sections = function.docstring.parse("google") if names and function.docstring else []
        described = [
            element.name.lstrip("*")
            for section in sections
            if section.kind.value == "parameters"
            for element in section.value
        ]
        assert described == names, function.path


def test_the_page_lists_functions():
    assert sum(len(functions(path)) for path in documented()) > 50
