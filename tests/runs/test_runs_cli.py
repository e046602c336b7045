"""Tests of `rstar-lab runs list | show | compact`."""

import json

import pytest
from helpers.run_rows import rows
from typer.testing import CliRunner

from rstar_lab.cli.runs import app
from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunWriter


@pytest.fixture
def runs_dir(tmp_path):
    for name in ("a", "b"):
        with RunWriter.open(tmp_path, name, kind="train", recipe={"model": "tiny"}, seed=3) as writer:
            for step in range(2):
                writer.write_step("rl", step, **rows(step), metrics={"loss": 0.25})
            writer.finish("finished")
    return tmp_path


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_shows_status_steps_and_reward(runs_dir):
    older = runs_dir / "b" / "run.json"
    older.write_text(json.dumps(json.loads(older.read_text()) | {"created": "2001-01-01T00:00:00+00:00"}))
    lines = [json.loads(line) for line in invoke("list", "--runs-dir", runs_dir, "--json").splitlines()]
    assert [line["run_id"] for line in lines] == ["b", "a"], "oldest first"
    assert lines[0] | {"run_id": "", "created": "", "path": ""} == {
        "run_id": "", "kind": "train", "status": "finished", "created": "", "attempts": 1, "stage": "rl", "steps": 2,
        "last_step": 1, "trajectories": 16, "reward": 0.5, "checkpoints": [], "path": "",
    }  # fmt: skip
    text = invoke("list", "--runs-dir", runs_dir)
    assert "finished" in text and "0.500" in text


def test_an_unreadable_run_does_not_hide_the_others(runs_dir):
    (runs_dir / "a" / "run.json").write_text("{")
    lines = [json.loads(line) for line in invoke("list", "--runs-dir", runs_dir, "--json").splitlines()]
    assert {line["run_id"]: line["status"] for line in lines} == {"a": "unreadable", "b": "finished"}
    assert "run.json:notJSON" in "".join(
        invoke("list", "--runs-dir", runs_dir).split()
    )  # the table may break the line anywhere


@pytest.mark.parametrize("content", ["{", "[]", '{"host": "h"}', "\x80"])
def test_list_and_show_name_a_damaged_mirror_json(runs_dir, content):
    RunWriter.open(runs_dir, "c", kind="train", recipe={}, seed=3).close()  # status running, and no process writes it
    (runs_dir / "c" / "mirror.json").write_bytes(content.encode("latin-1"))
    rows = [json.loads(line) for line in invoke("list", "--runs-dir", runs_dir, "--json").splitlines()]
    assert {row["run_id"]: row["status"] for row in rows} == {"a": "finished", "b": "finished", "c": "unreadable"}
    with pytest.raises(UserError, match=r"c/mirror\.json: .*jobs pull"):
        invoke("show", "c", "--runs-dir", runs_dir)


def test_show_prints_recipe_and_metrics(runs_dir):
    shown = json.loads(invoke("show", "a", "--runs-dir", runs_dir, "--json"))
    assert shown["recipe"] == {"model": "tiny"} and shown["seed"] == 3
    assert shown["metrics"] == {"stage": "rl", "step": 1, "loss": 0.25}
    assert "model: tiny" in invoke("show", "a", "--runs-dir", runs_dir)
    with pytest.raises(UserError, match=r"no run c in .*`rstar-lab runs list` shows the runs"):
        invoke("show", "c", "--runs-dir", runs_dir)


def test_compact_reports_files_and_keeps_rows(runs_dir):
    assert json.loads(invoke("compact", "a", "--runs-dir", runs_dir, "--json")) == {
        "run_id": "a", "files_before": 6, "files_after": 3,
    }  # fmt: skip
    assert json.loads(invoke("show", "a", "--runs-dir", runs_dir, "--json"))["trajectories"] == 16


def test_show_names_a_damaged_table_and_shows_the_rest(runs_dir):
    path = next((runs_dir / "a" / "trajectories").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-10])
    shown = json.loads(invoke("show", "a", "--runs-dir", runs_dir, "--json"))
    assert shown["seed"] == 3 and len(shown["damaged"]) == 1 and str(path) in shown["damaged"][0]
    assert f"damaged: {path}" in invoke("show", "a", "--runs-dir", runs_dir)
