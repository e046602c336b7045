"""The command line as a user meets it: help that teaches, one line for what can be mended, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).parent / "rstar-lab")]


def rstar_lab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240)


@pytest.mark.slow
def test_help_names_every_command_and_each_explains_itself():
    text = rstar_lab("--help").stdout
    names = [
        "demo",
        "sft",
        "train",
        "run",
        "evaluate",
        "serve",
        "chat",
        "sandbox",
        "data",
        "jobs",
        "runs",
        "preflight",
        "bench",
    ]
    assert [name for name in names if f" {name} " not in text] == []
    for name in ("demo", "evaluate", "sandbox serve", "runs list", "jobs submit", "data synthesize"):
        done = rstar_lab(*name.split(), "--help")
        assert done.returncode == 0 and len(done.stdout) > 200, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no_such"], "recipe no_such: no such file; shipped recipes: evaluate"),
        (["train", "tiny", "--set", "rl.lrr=1"], "rl.lrr: unknown key; did you mean lr?"),
        (["train", "tiny", "--set", "seed"], "--set seed: give key=value"),
        (
            ["evaluate", "nowhere", "--problems", "none.jsonl"],
            "model nowhere: neither a folder with a config.json nor a run",
        ),
        (["bench", "nothing"], "bench nothing: there is none; choose from trainer"),
        (["train", "tiny", "--set", "model=missing", "--set", "sft=null"], "missing"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments, message, tmp_path):
    done = rstar_lab(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr + done.stdout


def test_synthetic_problems_are_the_same_for_a_seed_and_can_be_read(tmp_path):
    for name in ("a", "b"):
        done = rstar_lab("data", "synthesize", "--seed", "5", "--count", "30", "--out", f"{name}.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 30 and len({row["problem_id"] for row in rows}) == 30
    assert set(rows[0]) == {"problem_id", "question", "answer", "source", "difficulty"}


def test_an_empty_folder_has_no_runs(tmp_path):
    done = rstar_lab("runs", "list", "--runs-dir", str(tmp_path), "--json")
    assert done.returncode == 0 and done.stdout.strip() == ""
