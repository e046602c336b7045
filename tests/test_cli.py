"""The command line as a user meets it: help that teaches, one line for what can be mended, exit codes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import run

COMMAND = [str(Path(sys.executable).parent / "rstar-lab")]


def rstar_lab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240)


def test_help_without_a_command_is_no_error_line(tmp_path):
    done = run("jobs", cwd=tmp_path)
    assert "submit" in done.stdout + done.stderr and "error:" not in done.stdout + done.stderr


@pytest.mark.slow
def test_synthetic_problems_are_the_same_for_a_seed_and_can_be_read(tmp_path):
    for name in ("a", "b"):
        done = run("data", "synthesize", "--seed", "5", "--count", "30", "--out", f"{name}.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 30 and len({row["problem_id"] for row in rows}) == 30
    assert set(rows[0]) == {"problem_id", "question", "answer", "source", "difficulty"}


def test_an_empty_folder_has_no_runs(tmp_path):
    done = run("runs", "list", "--runs-dir", str(tmp_path), "--json")
    assert done.returncode == 0 and done.stdout.strip() == ""


def test_recipes_lists_every_shipped_recipe_with_a_summary():
    lines = run("recipes").stdout.splitlines()
    names = {line.split()[0] for line in lines}
    assert {"tiny", "tiny_fast", "release_dapo", "evaluate"} <= names
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.slow
def test_an_evaluation_problem_in_training_data_is_reported_before_sft(tmp_path):
    run("data", "synthesize", "--count", "5", "--out", "a.jsonl", cwd=tmp_path)
    sets = ["stages.0.problems={file: a.jsonl}", "evaluate.sets.held_out={file: a.jsonl}"]
    done = run("train", "tiny_fast", *(part for item in sets for part in ("--set", item)), cwd=tmp_path)
    assert done.returncode == 1 and "is also in an evaluation set" in " ".join(done.stderr.split())
    assert not (tmp_path / "runs" / "tiny_fast-sft").exists()


@pytest.mark.slow
def test_a_run_of_an_older_version_is_one_line_error(tmp_path):
    golden = Path(__file__).parent / "golden" / "runs"
    shutil.copytree(golden, tmp_path / "runs")
    (tmp_path / "runs" / "tiny_fast-sft").mkdir(exist_ok=True)
    info = json.loads((golden / "tiny_fast-rl" / "run.json").read_text()) | {"run_id": "tiny_fast-sft"}
    (tmp_path / "runs" / "tiny_fast-sft" / "run.json").write_text(json.dumps(info))
    done = run("demo", "--fast", cwd=tmp_path)
    text = " ".join(done.stderr.split())
    assert done.returncode == 1 and "Traceback" not in text
    assert "was made by another version of rstar_lab (0.1.0)" in text


def leaf_commands(command, context, path=()):
    """Yield (path, command) of every command that is not a group."""
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        if hasattr(inner, "list_commands"):
            yield from leaf_commands(inner, context, (*path, name))
        else:
            yield (*path, name), inner


def test_every_command_has_examples_that_parse(monkeypatch):
    import shlex

    import typer

    from rstar_lab.cli.command_line import app

    root = typer.main.get_command(app)
    seen = 0
    for path, command in leaf_commands(root, typer.Context(root)):
        lines = re.findall(r"`([^`]*rstar-lab [^`]*)`", command.epilog or "")
        assert lines, f"{' '.join(path)}: no example in the help"
        assert command.help and all(option.help for option in command.params if option.name != "help"), path
        for line in lines:
            words = shlex.split(re.sub(r" > [\w.]+$", "", line))
            start = words.index("rstar-lab")
            for assignment in words[:start]:
                monkeypatch.setenv(*assignment.split("=", 1))
            words = words[start + 1 :]
            assert tuple(words[: len(path)]) == path, line
            command.make_context(path[-1], words[len(path) :])
            seen += 1
    assert seen > 20


def test_no_help_text_is_cut_off_at_80_columns():
    import typer
    from typer.testing import CliRunner

    from rstar_lab.cli.command_line import app

    root = typer.main.get_command(app)
    runner = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    for path in [(), *(path for path, _ in leaf_commands(root, typer.Context(root)))]:
        lines = runner.invoke(app, [*path, "--help"]).output.splitlines()
        assert len(lines) > 5 and max(map(len, lines)) <= 80, path
        assert [line for line in lines if "…" in line or "<bool>" in line] == [], path
