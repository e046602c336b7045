"""Formats are compared only in the renderers and in the recipe's section of prompts."""

import re
from pathlib import Path

import rstar_lab
from rstar_lab.rl.renderers.base import PROMPT_FORMATS
from rstar_lab.rl.renderers.formats import RENDERERS

PACKAGE = Path(rstar_lab.__file__).parent
ALLOWED = ("rl/renderers/", "rl/recipe/")


def test_every_format_has_a_renderer():
    assert tuple(RENDERERS) == PROMPT_FORMATS
    assert [renderer.name for renderer in RENDERERS.values()] == list(PROMPT_FORMATS)


def test_no_other_module_compares_formats():
    comparison = re.compile(r"\bformat\s*(==|!=|in|not in)\s*[(\[\"']|prompt_format\s*(==|!=)|\bas_released\b")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        if not str(path.relative_to(PACKAGE)).startswith(ALLOWED)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if comparison.search(line) and "prompt" in line
    ]
    assert found == []
