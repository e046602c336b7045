"""Tests of `rstar-lab explain`: each planted cause of a difference is named, with the part that it explains."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rstar_lab.analysis import import_messages
from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor.explain import Explanation, explain
from rstar_lab.rl.rescore import rescore

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"


def copy(folder: Path, name: str, *, source: str = "tiny_fast-eval-rl", **changes: object) -> Path:
    """Copy a golden evaluation. changes: keys of the recipe (with __ for a dot), or identity, which replaces that of the run."""
    target = folder / name
    shutil.copytree(GOLDEN / source, target)
    info = json.loads((target / "run.json").read_text())
    info["run_id"] = name
    info["extra"] |= {"identity": changes.pop("identity", {"model": "abc", "prompt": "p"})}
    for key, value in changes.items():
        *parts, last = key.split("__")
        section = info["recipe"]
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = value
    (target / "run.json").write_text(json.dumps(info))
    return target


def change_column(run: Path, table: str, column: str, change) -> None:
    for file in (run / table).rglob("*.parquet"):
        stored = pq.ParquetFile(file).read()
        place = stored.schema.get_field_index(column)
        field = stored.schema.field(place)
        values = pa.array([change(i, value) for i, value in enumerate(stored[column].to_pylist())], field.type)
        pq.write_table(stored.set_column(place, field, values), file)


def part(found: Explanation, name: str):
    return next(part for part in found.parts if part.name == name)


def test_a_run_and_itself_differ_in_nothing(tmp_path):
    found = explain(copy(tmp_path, "a"), copy(tmp_path, "b"))
    assert found.total.value == 0 and found.pass1[0] == found.pass1[1]
    assert {own.name for own in found.parts if own.differs} == set() and set(found.as_dict()["not_seen"]) == {
        "sampling"
    }
    assert "64 of" not in part(found, "prompt").text and "128 of 128 pairs" in part(found, "numerics").text


def test_another_answer_format_explains_all_of_its_effect(tmp_path):
    run = copy(tmp_path, "run")
    change_column(run, "transcripts", "messages", lambda i, text: text.replace("boxed", "") if i % 4 == 0 else text)
    a, b = rescore(run, answer="tagged").run, rescore(run, answer="last_number").run
    found = explain(a, b)
    parser = part(found, "parser")
    assert found.total.value > 0.05 and parser.differs and parser.trajectories
    assert parser.effect.value == pytest.approx(found.total.value, abs=0.02)
    assert abs(part(found, "sampling").effect.value) < 0.02


def test_rewards_of_another_grader_are_found_by_grading_again(tmp_path):
    a, b = copy(tmp_path, "a"), copy(tmp_path, "b")
    change_column(b, "trajectories", "reward", lambda i, reward: 1.0)
    found = explain(a, b)
    grader = part(found, "grader")
    assert grader.differs and grader.effect.value == pytest.approx(found.total.value) and found.total.value > 0.4
    assert part(found, "parser").differs is False and grader.trajectories


def test_prompt_settings_model_and_numerics_are_named(tmp_path):
    a = copy(tmp_path, "a", evaluate__temperature=1.0)
    b = copy(tmp_path, "b", evaluate__temperature=0.5)
    change_column(b, "transcripts", "prompt_ids", lambda i, ids: ids[1:])
    found = explain(a, b)
    assert part(found, "prompt").differs and "64 of 64 problems" in part(found, "prompt").text
    assert part(found, "settings").text.startswith("evaluate.temperature 1.0 against 0.5")
    assert part(found, "numerics").differs is None
    c = copy(tmp_path, "c", identity={"model": "other", "prompt": "p"})
    found = explain(a, c)
    assert part(found, "model").differs and "numerics" in found.as_dict()["not_seen"]
    d = copy(tmp_path, "d", evaluate__temperature=1.0)
    change_column(d, "transcripts", "engine_log_probs", lambda i, values: [value - 0.05 for value in values])
    change_column(d, "transcripts", "response_ids", lambda i, ids: [*ids[:5], 7, *ids[6:]] if i == 0 else ids)
    numerics = part(explain(a, d), "numerics")
    assert numerics.differs and "0.05 on average" in numerics.text and "127 of 128 pairs" in numerics.text
    assert "token 5 (median)" in numerics.text and len(numerics.trajectories) == 1


def test_the_rest_beyond_the_noise_is_attributed(tmp_path):
    found = explain(copy(tmp_path, "a", source="tiny_fast-eval-sft"), copy(tmp_path, "b", identity={}))
    rest = part(found, "sampling")
    assert rest.effect.value == pytest.approx(found.total.value) and "comes from: model, prompt, numerics" in rest.text
    assert np.isfinite(rest.effect.low) and rest.effect.low > 0


def test_the_command_prints_text_and_json_and_names_what_is_missing(tmp_path):
    a, b = copy(tmp_path, "a", source="tiny_fast-eval-sft"), copy(tmp_path, "b", rl__reward="my:reward")
    shown = CliRunner().invoke(app, ["explain", "a", "b", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0 and "difference +32.8 [" in shown.stdout and "grader (differs)" in shown.stdout
    result = json.loads(CliRunner().invoke(app, ["explain", str(a), str(b), "--json"]).stdout)
    assert result["difference"][0] == pytest.approx(0.328, abs=1e-3) and result["problems"] == 64
    parts = {own["part"] for own in result["parts"]}
    assert parts >= {"problems", "prompt", "parser", "grader", "sampling", "numerics"}
    change_column(b, "trajectories", "problem_id", lambda i, name: f"other-{i}")
    with pytest.raises(UserError, match="no problem in common"):
        explain(a, b)


def imported(folder: Path, name: str, rows) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return import_messages(folder / f"{name}.jsonl", folder / "runs", run_id=name)


def row(problem: int, right: bool, **others):
    answer = f"<answer>\\boxed{{{problem if right else 99}}}</answer>"
    messages = [{"role": "user", "content": f"q{problem}"}, {"role": "assistant", "content": answer}]
    return {"problem_id": str(problem), "messages": messages, "reward": float(right), "truth": str(problem)} | others


def test_what_a_run_lacks_is_not_seen_and_is_no_difference(tmp_path):
    """Runs of other tools have no settings and no template, and can lack true answers and rewards."""
    pairs = [(problem, sample) for problem in range(12) for sample in range(3)]
    whole = imported(tmp_path, "whole", [row(p, (p + s) % 2 > 0) for p, s in pairs])
    found = explain(whole, whole)
    assert part(found, "settings").differs is None and part(found, "prompt").differs is None
    no_truths = imported(tmp_path, "no_truths", [row(p, (p * s) % 3 > 0, truth=None) for p, s in pairs])
    found = explain(whole, no_truths)
    assert {own.name for own in found.parts if own.differs} <= {"sampling"}
    assert "does not hold the true answers of 12" in part(found, "problems").text
    assert "36 rollouts without a true answer" in part(found, "grader").text
    partly = imported(tmp_path, "partly", [row(p, True, **({"reward": None} if s else {})) for p, s in pairs])
    assert explain(whole, partly).pass1[1] == 1.0, "a rollout without a reward is not wrong"
    with pytest.raises(UserError, match="no rollout has a reward"):
        explain(whole, imported(tmp_path, "none", [row(p, True, reward=None) for p, s in pairs]))
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("column", ["engine_log_probs", "loss_mask", "prompt_ids"])
def test_numerics_need_all_arrays(tmp_path, column):
    run = copy(tmp_path, "run")
    change_column(run, "transcripts", column, lambda i, value: None)
    assert part(explain(run, copy(tmp_path, "other")), "numerics").differs is None
