"""The `--set` values of the commands in the documentation are accepted by the recipes that the commands name."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from rstar_lab.rl.overrides import load_recipe, parse_overrides, shipped_recipes

ROOT = Path(__file__).parents[3]


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (page, shipped recipe, values of --set) for each command with both."""
    result = []
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")]):
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                pairs = tuple(value for word, value in itertools.pairwise(words) if word == "--set")
                recipe = next((word for word in words[2:] if word in shipped_recipes()), None)
                if recipe and pairs:
                    result.append((page.name, recipe, pairs))
    return result


@pytest.mark.parametrize(("page", "recipe", "pairs"), commands())
def test_a_documented_command_has_valid_keys(page, recipe, pairs):
    load_recipe(recipe, parse_overrides([pair for pair in pairs if not pair.startswith("verl.")]))


def test_commands_are_found():
    assert len({page for page, _, _ in commands()}) >= 3
