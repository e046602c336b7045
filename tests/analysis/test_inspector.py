"""Tests of the inspector without a browser: pages, filters, search, segments and notes."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.inspector_runs import write_run

from rstar_lab.analysis.filters import where_sql
from rstar_lab.analysis.inspector import listing
from rstar_lab.analysis.inspector.inspector import Inspector, inspect
from rstar_lab.analysis.inspector.notes import read_notes, write_note
from rstar_lab.analysis.inspector.source import Source
from rstar_lab.analysis.inspector.transcript import segments, token_values
from rstar_lab.analysis.runs import open_runs
from rstar_lab.common.errors import UserError


def request(inspector: Inspector, op: str, **arguments: object) -> object:
    """Send a request as the browser does; return the response."""
    answers: list[tuple[dict, list]] = []
    inspector.send = lambda message, buffers=None: answers.append((message, buffers))  # type: ignore[method-assign]
    inspector._on_message(inspector, {"id": "1", "op": op, **arguments}, [])
    return answers[0]


# Rows


@pytest.mark.slow
@pytest.mark.parametrize(("in_memory", "sorted_rows"), [(False, 5_000), (False, 20), (True, 5_000)])
def test_pages_contain_every_row_once_in_any_order(source: Source, in_memory: bool, sorted_rows: int, monkeypatch):
    monkeypatch.setattr(listing, "_MAX_SORTED", sorted_rows)  # if more rows share a value, they are read step by step
    source, memory = Source(source.store), Source(source.store)
    memory.load()
    if in_memory:
        source.load()
    assert source.in_memory == in_memory
    columns = ("entropy", "outcomes", "answer", "reward", "kept", "step")
    for sort in ([], *([column, down] for column in columns for down in (True, False))):
        total = source.count("TRUE")
        rows = [row for offset in range(0, total, 50) for row in source.page("TRUE", sort, offset, 50)]
        assert len(rows) == total == len({row["traj_id"] for row in rows}), sort
        assert rows == memory.page("TRUE", sort, 0, total), sort
        if sort == ["entropy", True]:
            known = [row["entropy"] for row in rows if row["entropy"] is not None]
            assert known == sorted(known, reverse=True)
            assert all(row["entropy"] is None for row in rows[len(known) :])
        for index in (0, 137, total - 1):
            assert source.index_of(rows[index]["traj_id"], "TRUE", sort) == index, sort


def test_rows_in_memory_are_those_of_the_files_until_the_run_grows(source: Source):
    memory = Source(source.store)
    memory.load()
    assert memory.in_memory
    for where, sort in (("TRUE", []), ("entropy > 0.3", ["answer", True]), ("kept", ["entropy", True])):
        assert memory.page(where, sort, 0, 30) == source.page(where, sort, 0, 30)
        assert memory.count(where) == source.count(where)
    row = source.page("TRUE", [], 5, 1)[0]
    assert memory.siblings(row) == source.siblings(row) and memory.row(row["traj_id"]) == source.row(row["traj_id"])
    memory.refresh()
    memory.load()  # the run may still be growing
    assert not memory.in_memory


def test_a_cell_and_the_page_can_query_at_the_same_time(source: Source):
    shared = Source(source.store)
    shared.load()
    columns = ["traj_id", "run_id, step", "traj_id, reward, answer"]

    def query(number: int) -> int:
        return len(shared._fetch(f"SELECT {columns[number % 3]} FROM trajectories LIMIT {number}")[1])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(query, range(1, 300))) == list(range(1, 300))


def test_an_invalid_filter_raises_an_error_that_names_it(source: Source):
    with pytest.raises(UserError, match="unknown filter 'stpe'"):
        where_sql({"stpe": 1})
    with pytest.raises(UserError, match="one SQL expression"):
        where_sql({"sql": "TRUE; DROP TABLE x"})
    with pytest.raises(UserError, match="reword"):
        source.count(where_sql({"sql": "reword > 0"}))
    with pytest.raises(UserError, match="have no trajectory"):
        source.row("nowhere")


def test_siblings_are_the_rollouts_of_the_group(source: Source):
    row = source.page("TRUE", [], 5, 1)[0]
    siblings = source.siblings(row)
    assert [row["sample"] for row in siblings] == list(range(8))
    assert {(row["run_id"], row["step"], row["problem_id"]) for row in siblings} == {
        (row["run_id"], row["step"], row["problem_id"])
    }


def test_search_finds_text_in_messages_of_the_filtered_list(source: Source):
    found = source.search("call failed", where_sql({"run_id": "roc", "steps": [2, 3]}))
    expected = source.store.sql(
        "SELECT traj_id FROM trajectories WHERE run_id = 'roc' AND step IN (2, 3) AND errors > 0"
    )
    assert set(found["hits"]) == set(expected.traj_id) != set()
    assert (found["whole"], found["first"], found["last"]) == (True, 2, 3)
    assert all("call failed" in snippet for snippet in found["hits"].values())
    everywhere = source.search("call failed", "TRUE")
    assert len(everywhere["hits"]) == int(source.count("errors > 0")) and everywhere["whole"]
    assert source.search('print("sum:"', "step = 1")["hits"], "text with quotes is found"
    assert source.search("no such words", "TRUE")["hits"] == {}
    assert source.search("sum", "TRUE", seconds=0)["whole"] is False


def test_questions_are_read_once_per_problem(source: Source):
    rows = source.page("TRUE", [], 0, 100)
    questions = source.questions(list({row["problem_id"]: row for row in rows}.values()))
    assert set(questions) == {"sum_00", "sum_01", "sum_02", "sum_03"}
    assert all(question.startswith("What is the sum of the first") for question in questions.values())


def test_transcripts_that_cannot_be_read_are_no_missing_questions(tmp_path: Path):
    inspector = inspect(write_run(tmp_path, "one", steps=1))
    rows = inspector.source.page("TRUE", [], 0, 8)
    file = next((tmp_path / "one" / "transcripts").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    answer, _ = request(inspector, "questions", rows=rows)
    assert answer["error"].startswith("the questions of the list cannot be read: ") and file.name in answer["error"]
    assert rows[0]["problem_id"] in inspector.static_html()


# Transcripts


def test_segments_map_text_to_tokens(folder: Path):
    runs = open_runs(folder)
    for traj_id in runs.sql("SELECT traj_id FROM trajectories WHERE step = 6").traj_id:
        record = runs.record(traj_id)
        texts, ends = record["token_texts"], None
        parts = segments(record)
        assert [part.kind for part in parts[:2]] == ["system", "user"]
        assert parts[-1].kind == "answer" and "\\boxed" in parts[-1].text
        for part in parts[2:]:
            assert part.starts and part.starts[0] == 0 and list(part.starts) == sorted(part.starts)
            ends = [*part.starts[1:], len(part.text)]
            for token, (begin, end) in enumerate(zip(part.starts, ends, strict=True), part.first):
                shown = part.text[begin:end]
                assert shown in texts[token] or (
                    part.kind == "code" and shown in json.loads('"' + _complete_escapes(texts, token) + '"')
                ), (part.kind, shown, texts[token])
        assert "".join(part.text for part in segments(record, raw=True)[2:]) == "".join(texts)


def _complete_escapes(texts: list[str], token: int) -> str:
    """Return the token with its neighbours as valid JSON, since a token may end inside an escape."""
    return (
        re.sub(r"^n?|\\?$", "", "".join(texts[token - 1 : token + 2]))
        .replace('\\"', '"')
        .replace('"', '\\"')
        .replace("\n", "\\n")
    )


def test_code_tokens_map_to_unescaped_code():
    code = 'x = "a\\n"\n\tprint("π", x)  # \U0001d54f done\n'
    for ascii in (True, False):
        call = json.dumps({"name": "t", "arguments": {"input": "1 2", "code": code}}, ensure_ascii=ascii)
        text = f"think</reason><tool_call>{call}</tool_call><|im_end|>"
        for seed in range(20):
            cuts = sorted({0, *random.Random(seed).sample(range(1, len(text)), 25)})
            texts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
            parts = {
                part.kind: part
                for part in segments({"messages": [], "token_texts": texts, "loss_mask": [True] * len(texts)})
            }
            assert parts["code"].text == code and parts["input"].text == "1 2" and parts["reason"].text == "think"
            starts = parts["code"].starts
            assert starts[0] == 0 and list(starts) == sorted(starts) and starts[-1] <= len(code)
            payload = parts["code"].payload()
            units = payload["text"].encode("utf-16-le")
            assert all(2 * start <= len(units) for start in payload["starts"])


def test_a_token_outside_the_vocabulary_is_shown_by_its_id():
    """A fork can sample from a model whose vocabulary is larger than that of the run."""
    record = {"token_texts": ["a", None, "b</reason>", None], "response_ids": [5, 1234, 6, -1], "loss_mask": [True] * 4}
    parts = segments(record)
    assert [(part.kind, part.text) for part in parts] == [("reason", "a<id 1234>b"), ("text", "<id -1>")]
    assert parts[0].starts == (0, 1, 10) and parts[1].first == 3
    assert segments(record, raw=True)[0].text == "a<id 1234>b</reason><id -1>"
    assert segments({**record, "response_ids": None}, raw=True)[0].text == "a<id ?>b</reason><id ?>"


def test_malformed_turns_keep_all_text():
    cases = {
        "no tags at all": ["text"],
        "<tool_call>{bad json}</tool_call>": ["call"],
        'a<tool_call>{"name": "t", "arguments": {"code": "print(\'</tool_call>\')"}}</tool_call>b': [
            "text",
            "code",
            "text",
        ],
        "<tool_call>unterminated": ["call"],
        "<reason>x</reason><answer>\\boxed{1}</answer><answer>2": ["reason", "answer", "answer"],
    }
    for text, kinds in cases.items():
        record = {"messages": [{"role": "assistant", "content": text}]}
        assert [part.kind for part in segments(record)] == kinds, text
    outcomes = segments(
        {
            "messages": [
                {"role": "assistant", "content": "<tool_call>{</tool_call>"},
                {"role": "tool", "content": "?", "outcome": "malformed_call"},
            ]
        }
    )
    assert [part.outcome for part in outcomes] == ["malformed_call", "malformed_call"]


def test_a_tool_response_that_the_model_did_not_read_is_shown():
    """An environment can end the rollout with the last call, or the response does not fit."""
    call = '<tool_call>{"name": "act", "arguments": {}}</tool_call><|im_end|>'
    between = "\n<|im_start|>user\n<tool_response>\nhigher\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
    turns = [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "higher", "outcome": "ok", "tool": "act"},
    ]
    last = [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "Right.", "outcome": "exception", "tool": "act"},
    ]
    record = {"messages": turns + last, "token_texts": [call, between, call], "loss_mask": [True, False, True]}
    expected = [("call", 1, "ok"), ("tool", 1, "ok"), ("call", 2, "exception"), ("tool", 2, "exception")]
    assert [(part.kind, part.turn, part.outcome) for part in segments(record)] == expected
    assert segments(record)[-1].text == "Right." and not segments(record)[-1].starts
    assert "Right." not in "".join(part.text for part in segments(record, raw=True))
    # The response of a turn that the model read is not shown twice.
    read = record | {"messages": turns, "token_texts": [call, between], "loss_mask": [True, False]}
    assert [part.kind for part in segments(read)] == ["call", "tool"]


def test_missing_token_values_are_nan(folder: Path):
    runs = open_runs(folder)
    dropped = runs.record(runs.sql("SELECT traj_id FROM trajectories WHERE NOT kept LIMIT 1").traj_id[0])
    entropy, engine, trainer, mask, ids = token_values(dropped)
    assert np.isnan(entropy).all() and np.isnan(trainer).all() and not np.isnan(engine).any()
    assert mask.sum() == sum(dropped["loss_mask"]) and (ids == dropped["response_ids"]).all()


# Notes


def test_notes_are_stored_in_the_run_folder(folder: Path):
    inspector = inspect(folder)
    traj_id = "roc/2/p1/3"
    answer, _ = request(inspector, "note", traj_id=traj_id, note=" look: reward hack? ", tags=["hack", "", " odd "])
    assert answer["result"]["tags"] == ["hack", "odd"]
    again = inspect(folder)
    assert again.source.count(where_sql({"noted": True}, noted=again._all_notes)) == 1
    page, _ = request(again, "page", offset=0, limit=5, filters={"noted": True}, scope={}, sort=[])
    assert page["result"]["rows"][0]["note"]["note"] == "look: reward hack?"
    assert read_notes(folder / "roc")[traj_id]["tags"] == ["hack", "odd"]
    write_note(folder / "roc", "other", "kept", [])
    write_note(folder / "roc", traj_id, "", [])
    assert list(read_notes(folder / "roc")) == ["other"]
    write_note(folder / "roc", "other", "", [])


def test_an_invalid_notes_file_hides_no_run_and_is_not_overwritten(tmp_path: Path):
    write_run(tmp_path, "roc", steps=1, problems=1)
    file = tmp_path / "roc" / "notes.jsonl"
    file.write_text('{"traj_id": "a", "note": "x"}\n{oops\n')
    for path in (file.parent, tmp_path):
        with pytest.warns(UserWarning, match=r"skipped: .*notes.jsonl, line 2"):
            answer, _ = request(inspect(path), "page", offset=0, limit=5, filters={}, scope={}, sort=[])
        assert answer["result"]["rows"]
    with pytest.raises(UserError, match=r"notes.jsonl, line 2"):
        write_note(file.parent, "b", "y", [])
    assert file.read_text().endswith("{oops\n"), "an invalid file must not be overwritten"


# Saved views


def test_views_are_stored_beside_the_runs(tmp_path: Path):
    write_run(tmp_path / "runs", "roc", steps=1, problems=1)
    inspector = inspect(tmp_path / "runs")
    assert inspector.views == {}
    inspector.filters, inspector.sort, inspector.columns = {"correct": True}, ["errors", True], ["step", "errors"]
    inspector.save_view("odd ones")
    inspector.show("step 1", step=1)
    view = {"filters": {}, "scope": {}, "sort": [], "columns": []}
    answer, _ = request(inspector, "save_view", name=" all ", view=view)
    assert list(answer["result"]) == ["odd ones", "all"]

    again = inspect(tmp_path / "runs")
    again.show_view("odd ones")
    assert (again.filters, again.sort, again.columns) == ({"correct": True}, ["errors", True], ["step", "errors"])
    assert again.rows().reward.eq(1).all() and again.scope == {}
    assert json.loads((tmp_path / "runs" / "views.json").read_text())["all"] == view
    assert inspect(tmp_path / "runs" / "roc").views == {}, "views of a single run are stored in its folder"
    request(again, "delete_view", name="all")
    assert list(inspector.views) == ["odd ones"]
    with pytest.raises(UserError, match="no view 'other'; there are: odd ones"):
        again.show_view("other")
    answer, _ = request(again, "save_view", name=" ", view=view)
    assert answer["error"] == "a view needs a name"
    (tmp_path / "runs" / "views.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"views.json: .*not a file of saved views"):
        _ = again.views


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("problem like 'x%'", 'there is no column "problem"; did you mean problem_id?'),
        ("Tokens > 50", 'there is no column "Tokens"; did you mean response_tokens?'),
        ("tool_calls > 1", "did you mean calls?"),
        ("eror > 1", '"errors"'),
        ("stop_reason = 3", "stop_reason is a text: compare it with a text in quotes"),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_an_error_of_a_condition_names_the_column(inspector: Inspector, sql, message, in_memory):
    if in_memory:
        inspector.source.load()
    with pytest.raises(UserError) as raised:
        inspector.source.page(inspector._condition({"sql": sql}, {}), (), 0, 5)
    assert message in str(raised.value) and "\n" not in str(raised.value)
