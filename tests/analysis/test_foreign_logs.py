"""Logs from somebody else are data: pipes, hostile values and archives end with a named error or are left out, and quickly."""

import base64
import contextlib
import gzip
import json
import os
import struct
import zipfile

import pandas as pd
import pytest
from typer.testing import CliRunner

from rstar_lab.analysis import open_runs
from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.exchange import importers
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.renderers.conversations import read_conversations

HUGE = "1" + "0" * 400  # an integer that no float can hold
DEEP = "[" * 200_000 + "]" * 200_000
NAMES = ("1.jsonl", "messages.jsonl", "completions_1.parquet", "a.json", "x.eval", "run.wandb", "trainer_state.json")
IMPORTERS = (importers.import_verl, importers.import_trl, importers.import_messages, importers.import_inspect)


@pytest.fixture
def pipes(tmp_path):
    folder = tmp_path / "log"
    (folder / "step_1").mkdir(parents=True)
    for name in (*NAMES, "events.out.tfevents.1", "step_1/rollouts.jsonl"):
        os.mkfifo(folder / name)
    return folder


def test_pipes_in_a_folder_of_logs_block_no_reader(pipes, tmp_path):
    with pytest.raises(UserError, match="no log was recognised"):
        doctor(pipes)
    (pipes / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n')
    assert doctor(pipes).logs[0].steps.reward.tolist() == [0.5, 0.25]
    for number, read in enumerate(IMPORTERS):
        for source in (pipes, *map(pipes.joinpath, NAMES)):
            with pytest.raises((UserError, OSError)):
                read(source, tmp_path / f"runs-{number}", run_id="x")


LINES = {
    "step": [HUGE, '"1"', "-1", "NaN", "1e400", "null", "[]", "true", "1.5"],
    "reward": [HUGE, "NaN", "1e400", '"x"', "[1]", "{}", DEEP],
    "loss": [HUGE, "-Infinity", DEEP, '"\\u001b[2J"'],
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in LINES.items() for value in values])
def test_hostile_numbers_in_a_log_do_not_end_the_doctor(tmp_path, key, value):
    row = {"step": "3", "reward": "0.5", "loss": "0.1"} | {key: value}
    lines = ['{"step": 1, "reward": 0.5, "loss": 1}', '{"step": 2, "reward": 0.25, "loss": 1}']
    lines.append("{" + ", ".join(f'"{name}": {text}' for name, text in row.items()) + "}")
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = doctor(tmp_path / "metrics.jsonl").logs[0].steps
    assert metrics.reward.tolist()[:2] == [0.5, 0.25]
    state = ", ".join(lines).replace(DEEP, "[]")
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{state}, 5, null]}}')
    assert doctor(tmp_path / "trainer_state.json").logs[0].steps.reward.tolist()[:2] == [0.5, 0.25]


ROLLOUT = {"input": "1+1?", "output": "2", "score": 1.0, "step": 1, "gts": "2"}
MESSAGES = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}], "reward": 1.0}
BROKEN = [5, "x", [5], {"a": [5]}, None, True, [[]], "../../x", "\x00", "x" * 300_000]


def changed(document, value):
    """Yield copies of a document with one value, at any depth, replaced."""
    for key in document if isinstance(document, dict) else range(len(document)):
        yield type(document)({**document, key: value} if isinstance(document, dict) else [*document[:key], value])
        if isinstance(document[key], dict | list):
            for inner in changed(document[key], value):
                yield {**document, key: inner} if isinstance(document, dict) else [*document[:key], inner]


@pytest.mark.parametrize("number", range(len(BROKEN)))
@pytest.mark.parametrize("name", ["verl", "messages"])
def test_hostile_values_in_rollouts_are_imported_or_named(tmp_path, name, number):
    document, read = {
        "verl": (ROLLOUT, importers.import_verl),
        "messages": (MESSAGES, importers.import_messages),
    }[name]
    for count, hostile in enumerate(changed(document, BROKEN[number])):
        file = tmp_path / f"{count}.jsonl"
        file.write_text(json.dumps(hostile) + "\n")
        try:
            folder = read(file, tmp_path / "runs", run_id=f"r{count}")
        except UserError as error:
            assert len(str(error)) < 2000
        else:
            assert open_runs(folder).count() == 1
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"} <= {"runs"}


@pytest.mark.parametrize("text", [HUGE, DEEP, "NaN"])
def test_hostile_rewards_are_null_or_named(tmp_path, text):
    (tmp_path / "1.jsonl").write_text(json.dumps(ROLLOUT | {"score": "S", "acc": "S"}).replace('"S"', text) + "\n")
    if text == DEEP:
        with pytest.raises(UserError, match="nested too deeply"):
            importers.import_verl(tmp_path, tmp_path / "runs")
    else:
        runs = open_runs(importers.import_verl(tmp_path, tmp_path / "runs"))
        assert runs.trajectories().reward.isna().all()
        assert runs.rewards().get("acc", pd.Series(dtype=float)).isna().all()


def test_an_archive_that_unpacks_to_gigabytes_is_not_read(tmp_path):
    pytest.importorskip("inspect_ai")
    bomb = tmp_path / "bomb.eval"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("header.json", "w") as member:
        for _ in range(300):
            member.write(b" " * 2**20)
    with pytest.raises(UserError, match=r"unpacks to 0\.3 GB"):
        importers.import_inspect(bomb, tmp_path / "runs")


def test_broken_archives_do_not_end_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr("rstar_lab.untrusted.files.MAX_UNPACKED_BYTES", 2**20)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n')
    packed = gzip.compress(b'{"step": 1, "reward": 0.5}\n' * 1000)
    for name, data in {
        "torn.jsonl.gz": packed[:40],
        "no.jsonl.gz": b"no archive",
        "flipped.json.gz": packed[:30] + b"\xff" * 40 + packed[70:],
        "bomb.json.gz": gzip.compress(b"[" + b" " * 2**26),
        "line.jsonl.gz": gzip.compress(b'{"step": 1, "reward": "' + b"x" * 2**26),
    }.items():
        (tmp_path / name).write_bytes(data)
    found = doctor(tmp_path)
    assert found.logs[0].steps.reward.tolist() == [0.5, 0.25]
    notes = "\n".join(note for log in found.logs for note in log.notes)
    assert notes.count("unpacks to far more") == 2 and "no.jsonl.gz" in notes


@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_deeply_nested_rows_of_a_data_file_are_named(tmp_path, name):
    (tmp_path / name).write_text(
        DEEP if name == "p.json" else json.dumps({"question": "q", "answer": "1", "info": DEEP})
    )
    with (
        pytest.raises(UserError, match=r"p\.json is nested too deeply")
        if name == "p.json"
        else contextlib.nullcontext()
    ):
        load_problems(tmp_path / name)


@pytest.mark.parametrize(
    "row",
    [
        {"traj_id": 1, "messages": 5}, {"traj_id": 1, "messages": [5]}, {"messages": [], "tools": DEEP}, {"messages": 5, "tools": "{"},
        {"traj_id": 1, "messages": [{"role": "assistant", "tool_calls": [5], "content": None}]},
    ],
)  # fmt: skip
def test_conversations_of_another_form_are_named(tmp_path, row):
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"c\.jsonl row 1"):
        list(read_conversations(tmp_path / "c.jsonl"))


def test_a_damaged_event_file_is_one_note(tmp_path):
    file = tmp_path / "events.out.tfevents.1"
    for length, payload in ((2**62, b""), (60_003, b"\x10" + b"\xff" * 60_000 + b"\x2a\x00")):
        file.write_bytes(struct.pack("<QI", length, 0) + payload + b"\0" * 4)
        with pytest.raises(UserError, match=r"no log was recognised .*events\.out\.tfevents\.1"):
            doctor(file)


def test_commands_print_texts_of_files_as_they_are(tmp_path):
    hostile = "[/x]\x1b]0;title\x07\x1b[2J[red]"
    problems = tmp_path / "p.jsonl"
    problems.write_text(json.dumps({"question": hostile, "answer": 5, hostile: hostile}) + "\n")
    conversation = [{"role": "user", "content": hostile}, {"role": hostile, "content": hostile}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": conversation, "conversation_id": hostile}) + "\n")
    (tmp_path / f"{hostile.replace('/', '')}.jsonl").write_text("5\n")
    commands = [
        ["data", "lint", problems],
        ["data", "lint", tmp_path / "c.jsonl"],
        ["data", "prepare", problems, "--out", tmp_path / "o.jsonl", "--drop-bad-rows"],
        ["doctor", tmp_path / f"{hostile.replace('/', '')}.jsonl"],
        ["export", "import", tmp_path / f"{hostile.replace('/', '')}.jsonl", "--runs-dir", tmp_path],
    ]
    for command in commands:
        done = CliRunner().invoke(app, [str(word) for word in command])
        printed = done.output + (done.stderr if done.stderr_bytes else "")
        assert "\x1b" not in printed and "\x07" not in printed, command
        assert done.exception is None or isinstance(done.exception, SystemExit | UserError), (command, done.exception)


def test_compressed_test_cases_are_never_executed():
    from rstar_lab.rl.data.code_problems import _unpack

    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    import pickle
    import zlib

    with pytest.raises(ValueError, match="not one text"):
        _unpack(base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode())
