"""The `--set` values of the commands in the documentation are accepted by the recipes that the commands name."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.rl.data.sources import load_problems
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


def of_the_release() -> list[str]:
    """Return the commands on the page for users of microsoft/rStar."""
    text = (ROOT / "docs/coming-from-rstar.md").read_text().replace("\\\n", " ")
    return [*re.findall(r"`(rstar-lab [^`]+)`", text), *re.findall(r"^(rstar-lab .+)$", text, re.MULTILINE)]


def rows_of_the_release() -> list[str]:
    """Return the right column of each row of the tables on the page."""
    text = (ROOT / "docs/coming-from-rstar.md").read_text()
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| microsoft")
    ]
    return [row[1].rstrip("| ") for row in rows if row[0] != "| variable"]


@pytest.mark.parametrize("row", rows_of_the_release())
def test_keys_and_options_of_a_row_for_users_of_the_release_exist(row):
    recipe = load_recipe("release_dapo")
    for key, value in re.findall(r"`((?:rl|evaluate|stages|sandbox)\.[\w.]*\w)(?:: ([^`]+))?`", row):
        here = recipe
        for part in key.split("."):
            here = here[int(part)] if part.isdigit() else getattr(here, part)
        if value:
            load_recipe("release_dapo", parse_overrides([f"{key}={value.split(' or ')[0].strip('`')}"]))
    for command, option in re.findall(r"`(sandbox \w+) (--[\w-]+)", row):
        found = get_command(app)
        for word in command.split():
            found = found.commands[word]
        assert option in {name for parameter in found.params for name in parameter.opts}, row


@pytest.mark.parametrize(
    ("name", "rows", "kept"),
    [
        ("dapo", [{"prompt": "What is 1 + 1?", "solution": "2", "extra_info": {"index": "a"}}], 1),
        ("aime24", [{"id": 60, "problem": "What is 1 + 1?", "answer": "2"}], 1),
        ("aime25", [{"id": "1", "problem": "What is 1 + 1?", "answer": "2"}], 1),
        ("math500", [{"unique_id": "a", "problem": "What is half?", "answer": "\\frac{1}{2}"}], 1),
    ],
)
def test_the_data_commands_of_the_page_run_on_the_columns_of_the_sets(tmp_path, name, rows, kept):
    """The sets are on the hub; files with the same columns take their place."""
    line = next(line for line in of_the_release() if line.startswith(f"rstar-lab data prepare {name} "))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = line.replace(f" {name} ", f" {name}={tmp_path / 'rows.jsonl'} ").replace("data/", f"{tmp_path}/data/")
    done = CliRunner().invoke(app, [*shlex.split(words)[1:], "--json"])
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["kept"] == kept and len(load_problems(last["file"])) == kept
