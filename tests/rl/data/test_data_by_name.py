"""Data sets by name, read by the real `datasets` from a local server that answers like the Hugging Face Hub."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fake_hub import fake_hub

from rstar_lab.rl.data.sources import SOURCES, is_problem_set, parse_source

CODE = """
from rstar_lab.rl.evaluate_command import load
from rstar_lab.rl.recipe import Problems
from rstar_lab.rl.resolved import read_problems

for problem in read_problems(Problems(file="org/set:test", fields={"question": "text"})):
    print(problem.model_dump_json())
print(load("org/set:test:question=text", "", 1)[1][0].question)
try:
    read_problems(Problems(file="org/none:test"), key="evaluate.sets.none: ")
except Exception as error:
    print(error)
"""


COLUMNS = """
from rstar_lab.rl.data.sources import different_rows

for row in different_rows("org/set", "cot", ["problem", "answer"], lambda row: row["answer"] != "no"):
    print(row["problem"])
"""


def run_code(environment: dict[str, str], code: str = CODE) -> tuple[list[str], str]:
    """Run code in a process. Return its lines and what it wrote to stderr."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert not ended.returncode, ended.stderr
    return ended.stdout.strip().splitlines(), ended.stderr


@pytest.mark.parametrize(
    ("text", "hub", "config", "split", "fields"),
    [
        ("openai/gsm8k:test", "openai/gsm8k", "main", "test", {}),
        ("openai/gsm8k:train", "openai/gsm8k", "main", "train", {}),
        ("openai/gsm8k/socratic:train", "openai/gsm8k", "socratic", "train", {"question": "q"}),
        ("aime24", "HuggingFaceH4/aime_2024", None, "train", dict(SOURCES["aime24"].fields)),
        ("org/set", "org/set", None, "train", {"question": "q"}),
        ("org/set:a:question=b,answer=c", "org/set", None, "a", {"question": "b", "answer": "c"}),
    ],
)
def test_names_of_data_sets(text, hub, config, split, fields):
    source = parse_source(text, {"question": "q"}).source
    assert (source.hub, source.config, source.split, dict(source.fields)) == (hub, config, split, fields)
    assert is_problem_set(text.partition(":question")[0])


def test_paths_are_no_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not any(map(is_problem_set, ("data/set", "org/set.jsonl", "/org/set", "org/a/b/c")))
    assert parse_source("org/set.jsonl").path is not None


@pytest.mark.slow
def test_recipes_and_evaluate_read_a_set_from_the_hub(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [{"text": "1 + 1?", "answer": "One more.\n#### 2"}, {"text": "2 + 3?", "answer": "5"}]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fake_hub(folder) as (url, _):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        (first, second, question, error), _ = run_code(environment)
    assert [json.loads(line)["answer"] for line in (first, second)] == ["2", "5"] and question == "1 + 1?"
    assert error.startswith("evaluate.sets.none: org/none: could not be read from the hub")
    # Without the server, the cache answers. A set that it does not hold is an error at once.
    (*cached, error), messages = run_code(environment)
    assert cached == [first, second, question] and f"no connection to {url}" in error and "Retry" not in messages


@pytest.mark.slow
def test_columns_are_read_once_and_an_interrupted_reading_continues(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        rows = {"problem": ["a", "a", f"b{number}", "c"], "answer": ["1", "1", "2", "no"], "solution": ["long"] * 4}
        pq.write_table(pa.table(rows), folder / f"cot-0000{number}-of-00003.parquet")
    (folder / "tir-00000-of-00001.parquet").write_bytes(b"of another split")
    whole = (folder / "cot-00001-of-00003.parquet").read_bytes()
    (folder / "cot-00001-of-00003.parquet").write_bytes(whole[:100])
    with fake_hub(folder) as (url, handler):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        with pytest.raises(AssertionError):
            run_code(environment, COLUMNS)
        (folder / "cot-00001-of-00003.parquet").write_bytes(whole)
        handler.fetched.clear()
        for _ in range(2):
            found, progress = run_code(environment, COLUMNS)
            assert found == ["a", "b0", "b1", "b2"] and "3/3" in progress
    assert set(handler.fetched) == {"cot-00001-of-00003.parquet", "cot-00002-of-00003.parquet"}
