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
from rstar_lab.rl.overrides import load_recipe, parse_overrides, shipped_recipes
from rstar_lab.rl.problems import load_problems

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


def of_the_release() -> list[str]:
    """Return the commands on the page for users of microsoft/rStar."""
    text = (ROOT / "docs/coming-from-rstar.md").read_text().replace("\\\n", " ")
    return [*re.findall(r"`(rstar-lab [^`]+)`", text), *re.findall(r"^(rstar-lab .+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("line", of_the_release())
def test_a_command_for_users_of_the_release_exists_with_its_options(line):
    command, words = get_command(app), shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands.get(words.pop(0))
        assert command is not None, line
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options, line


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


# All variables of app/config.py of code-judge, and those of the release's README and scripts.
VARIABLES = """MODEL_PATH WORKSPACE MASTER_ADDR ERROR_CASE_SAVE_PATH MAX_STDOUT_ERROR_LENGTH MAX_EXECUTION_TIME MAX_QUEUE_WORK_LIFE_TIME
LONG_BATCH_MAX_QUEUE_WAIT_TIME MAX_MEMORY MAX_WORKERS RUN_WORKERS MAX_BATCH_CHUNK_SIZE MAX_LONG_BATCH_CHUNK_SIZE PYTHON_EXECUTOR_PATH
CPP_COMPILER_PATH PYTHON_EXECUTE_COMMAND CPP_COMPILE_COMMAND CPP_EXECUTE_COMMAND REDIS_URI REDIS_KEY_PREFIX REDIS_RESULT_QUEUE_PREFIX
REDIS_RESULT_EXPIRE REDIS_RESULT_LONG_BATCH_EXPIRE WORK_QUEUE_NAME REDIS_WORK_QUEUE_BLOCK_TIMEOUT REDIS_WORKER_ID_PREFIX
REDIS_WORKER_REGISTER_TIMEOUT REDIS_SOCKET_TIMEOUT"""
COMMANDS = """install.sh redis-server uvicorn run_workers.py vllm curl chat_with_tool_call.py aime_eval.sh math500_eval.sh
aime2024_rstar2_agent_loop.py aime2025_rstar2_agent_loop.py dapo_rstar2_agent_loop.py math500_rstar2_agent_loop.py huggingface-cli
run_qwen3-14b_rstar2_agent_weave.sh server.log worker.log"""


@pytest.mark.parametrize("names", [VARIABLES, COMMANDS])
def test_every_variable_and_command_of_the_release_has_a_row(names):
    text = (ROOT / "docs/coming-from-rstar.md").read_text()
    left = " ".join(line.split(" | ")[0] for line in text.splitlines() if line.startswith("| "))
    assert [name for name in names.split() if not re.search(rf"[`/ ]{re.escape(name)}[` ]", left)] == []


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
