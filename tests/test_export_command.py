"""`rstar-lab export` and `rstar-lab import`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from rstar_lab.cli.command_line import app

RUN = str(Path(__file__).parent / "golden" / "runs" / "tiny_fast-rl")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_run_is_exported_in_every_format(tmp_path):
    for name in ("sft", "sft-tokens", "preference"):
        done = run(
            "export",
            RUN,
            "--format",
            name,
            "--where",
            '{"steps": [1, 2]}',
            "--out",
            tmp_path / f"{name}.jsonl",
            "--json",
        )
        result = json.loads(done.stdout)
        assert done.exit_code == 0 and result["written"] == len((tmp_path / f"{name}.jsonl").read_text().splitlines())
        assert (tmp_path / f"{name}.md").exists()
    arguments = ("--run-id", "again", "--runs-dir", tmp_path / "runs", "--json")
    done = run("import", tmp_path / "sft.jsonl", "--format", "messages", *arguments)
    assert json.loads(done.stdout)["rollouts"] == len((tmp_path / "sft.jsonl").read_text().splitlines())


def test_rows_without_reward_are_named(tmp_path):
    done = run("export", RUN, "--format", "sft", "--where", "step = 1", "--out", tmp_path / "a.jsonl")
    assert "rows without a reward above zero" in done.stdout
    done = run("export", RUN, "--format", "sft", "--out", tmp_path / "b.jsonl")
    assert "rows without a reward above zero" not in done.stdout and done.exit_code == 0


def test_questions_of_an_evaluation_are_left_out(tmp_path):
    run("export", RUN, "--format", "sft", "--where", "step = 1", "--out", tmp_path / "a.jsonl")
    row = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    question = row["messages"][1]["content"].split("\n")[0]
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": question, "answer": "1"}) + "\n")
    arguments = ("--against", tmp_path / "exam.jsonl", "--out", tmp_path / "b.jsonl", "--json")
    done = run("export", RUN, "--format", "sft", "--where", "step = 1", *arguments)
    assert json.loads(done.stdout)["left_out"]["question of the evaluation set exam"] >= 16
