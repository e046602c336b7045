"""Imports keep what a log contains, and searches find it: text of all scripts, parts of messages, numbers, groups."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.cases import read_cases

from rstar_lab.analysis import import_messages, import_trl, import_verl, inspect, open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.exchange.rollout_rows import converted, openai_messages
from rstar_lab.runs import RunWriter

CODE = "print('答案')  # größer, ÉTÉ, Москва 😀 \"x\""


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def calls(tmp_path):
    call = {"id": "1", "function": {"name": "python", "arguments": json.dumps({"code": CODE, "stdin": None})}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return import_messages(write_lines(tmp_path / "a.jsonl", [{"messages": messages, "reward": 1}]), tmp_path / "runs")


TEXTS = ["答案", "größer", "grö", "été", "ÉTÉ", "москва", "Москва", "😀", "print('", '"x"']


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_any_script_and_case_is_found_in_calls(calls, text):
    runs = open_runs(calls)
    assert CODE.replace('"', '\\"') in runs.transcript(runs.trajectories().traj_id[0]).content[1]
    assert len(runs.search(text)) == 1, text
    exact = text == text.lower() or text in CODE
    hits = inspect(runs).source.search(text, "TRUE")["hits"]
    assert len(hits) == exact and all("\\u" not in snippet for snippet in hits.values())


def test_own_runs_are_searched_in_any_case(tmp_path):
    with RunWriter.open(tmp_path, "own", kind="train", recipe={}, seed=0) as writer:
        text = '[{"role": "assistant", "content": "GRÖSSE Москва \u212a"}]'  # with a Kelvin sign
        row = {"traj_id": "own/1", "group_id": "1/p", "problem_id": "p", "sample": 0, "reward": 1.0}
        writer.write_step(
            "rl", 1, trajectories=[row], calls=[], transcripts=[{"traj_id": "own/1", "messages": text}], metrics={}
        )
    runs, texts = open_runs(tmp_path / "own"), ("grösse", "GRÖSSE", "москва", "größe", "k", "Gr")
    assert [len(open_runs(tmp_path / "own").search(text)) for text in texts] == [1, 1, 1, 0, 0, 1]  # in DuckDB
    assert [len(runs.search(text)) for text in texts] == [1, 1, 1, 0, 0, 1]  # from the second text on in memory
    assert len(inspect(runs).source.search("grösse", "TRUE")["hits"]) == 1


@pytest.mark.parametrize("parts, text", read_cases(__file__, "messages.yaml")["parts"])
def test_no_part_of_a_message_is_dropped(parts, text):
    (message,) = openai_messages([{"role": "assistant", "content": None, **parts}], "line 1")
    assert text in message["content"] and "None" not in message["content"] and message["role"] == "assistant"


def test_a_chat_that_is_json_text_is_a_chat():
    chat = [{"role": "assistant", "content": "a"}]
    (row,) = converted({"prompt": "q", "completion": json.dumps(chat)}, "1", 0)
    assert row["messages"][1:] == chat


def test_a_null_beside_a_value_and_a_packed_file_of_a_folder_are_read(tmp_path):
    row = {"messages": [{"role": "user", "content": "q"}], "step": None, "global_step": "4"}
    row |= {"reward": None, "score": 1, "answer": ["4"]}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    frame = open_runs(import_messages(tmp_path, tmp_path / "runs", run_id="m")).trajectories()
    assert frame[["step", "reward", "answer"]].values.tolist() == [[4, 1.0, "4"]]


def test_nulls_that_parquet_adds_to_arguments_are_dropped(tmp_path):
    def call(**arguments):
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]

    rows = [{"step": 1, "prompt": "q", "completion": call(**{name: 1}), "reward": 1.0} for name in "ab"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_1.parquet")
    runs = open_runs(import_trl(tmp_path, tmp_path / "runs", run_id="t"))
    texts = sorted(runs.transcript(traj_id).content[1] for traj_id in runs.trajectories().traj_id)
    assert ['{"a": 1}' in texts[0], '{"b": 1}' in texts[1], "null" in "".join(texts)] == [True, True, False]


def test_groups_of_verl_are_those_of_its_uid_and_numbers_may_be_text(tmp_path):
    rows = [
        {"input": "same", "output": "a", "score": "1", "step": 1, "uid": uid, "acc": acc, "data_source": "gsm8k"}
        for uid, acc in (("u1", "1"), ("u1", "0"), ("u2", "1.0"), ("u2", True))
    ]
    runs = open_runs(import_verl(write_lines(tmp_path / "1.jsonl", rows), tmp_path / "runs"))
    frame = runs.trajectories()
    assert list(frame.groupby("group_id").size()) == [2, 2] and frame.problem_id.nunique() == 1
    assert sorted(frame["sample"]) == [0, 0, 1, 1] and set(frame.reward) == {1.0}
    assert list(runs.rewards().columns) == ["traj_id", "acc", "run_id"] and runs.rewards().acc.sum() == 3


def test_a_name_that_no_folder_can_have_is_refused(tmp_path):
    lines = [{"messages": [{"role": "user", "content": "q"}]}]
    with pytest.raises(UserError, match="not a valid"):
        import_messages(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "runs", run_id="a" * 300)


def test_a_parquet_file_that_unpacks_to_gigabytes_is_one_error(tmp_path):
    row = {"step": 1, "prompt": "What?" * 20, "completion": "x" * 100, "reward": 1.0}
    batch = pa.table({name: pa.array([value] * 1_000_000) for name, value in row.items()})
    with pq.ParquetWriter(tmp_path / "completions_1.parquet", batch.schema, compression="zstd") as writer:
        for _ in range(12):
            writer.write_table(batch)
    with pytest.raises(UserError, match=r"completions_1\.parquet"):
        import_trl(tmp_path, tmp_path / "runs", run_id="t")


def test_show_takes_a_filter_as_a_mapping(calls):
    inspector = inspect(calls)
    inspector.show({"correct": False})
    assert inspector.rows().empty and inspector.scope["filter"] == {"correct": False}
    with pytest.raises(UserError, match="unknown filter"):
        inspector.show({"corect": True})
