"""Readers of foreign files: whatever the bytes are, the value has its type or one exception names the file."""

import gzip
import json
import os
import zipfile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from rstar_lab.untrusted import files
from rstar_lab.untrusted.files import (
    DataError,
    answer_json,
    check_zip,
    error_message,
    json_lines,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_text,
)


class Row(TypedDict):
    step: int
    name: str


DEEP = "[" * 200_000


@pytest.fixture
def special(tmp_path):
    """Paths that are no regular files, or have far more bytes than the disk holds."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "proc").symlink_to("/proc/self/fd/0")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 2**42)
    return [tmp_path / name for name in ("pipe", "device", "loop", "folder", "holes", "missing")]


@pytest.mark.parametrize("read", [read_json, read_text, read_bytes, lambda path: list(json_lines(path)), check_zip])
def test_only_regular_files_of_bounded_size_are_read(special, read):
    for path in special:
        if read is check_zip and path.name == "holes":
            continue
        with pytest.raises(DataError, match=path.name):
            read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_a_value_of_the_type_or_one_exception(data):
    for kind in (dict, list[int], Row, int):
        try:
            value = parse_json(data, "place", kind)
        except DataError as error:
            assert str(error).startswith("place")
        else:
            assert isinstance(value, dict if kind is Row else getattr(kind, "__origin__", kind))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "place is nested too deeply"),
        ("[" * 101 + "]" * 101, "place is nested too deeply"),
        ("{", "place: not JSON"),
        (b"\xff", "place: not UTF-8"),
        ('{"step": "x", "name": "a"}', "place: step: Input should be a valid integer"),
        ('{"step": 1}', "place: name: Field required"),
        ("[]", "place: Input should be a valid dictionary"),
        ("1" * 5000, "place: "),
    ],
)
def test_an_error_names_the_place_and_the_key(text, message):
    with pytest.raises(DataError, match=message):
        parse_json(text, "place", Row)


def test_values_keep_their_text_without_lone_surrogates():
    assert parse_json('{"\\ud800a": ["\\udfff", "\\ud83d\\ude00"]}', "x") == {"\ufffda": ["\ufffd", "\U0001f600"]}
    assert parse_json("[" * 100 + "]" * 100, "x")


def test_lines_have_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"step": 1, "name": "a"}\n\n{"step": 2, "name": "b"}')
    assert [(n, row["step"]) for n, row in json_lines(tmp_path / "a.jsonl")] == [(1, 1), (3, 2)]
    for line, message in ((b"\xff", "not UTF-8"), (DEEP.encode(), "nested too deeply")):
        (tmp_path / "b.jsonl").write_bytes(b'{"step": 1, "name": "a"}\n' + line)
        with pytest.raises(DataError, match=rf"b\.jsonl, line 2.*{message}"):
            list(json_lines(tmp_path / "b.jsonl"))


def test_archives_are_bounded_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 2**20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"[1]\n" * 1000))
    assert len(list(json_lines(tmp_path / "a.jsonl.gz"))) == 1000
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b"[1]\n" * 2**20))
    with pytest.raises(DataError, match=r"bomb\.jsonl\.gz.*far more than its size"):
        list(json_lines(tmp_path / "bomb.jsonl.gz"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(5000))[:-100])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        list(json_lines(tmp_path / "cut.jsonl.gz"))
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 2**20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + b" " * 2**21 + b"]"))
    with pytest.raises(DataError, match=r"bomb\.json\.gz.*larger than 1,048,576 bytes"):
        read_json(tmp_path / "bomb.json.gz")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"0" * 2**23)
    with pytest.raises(DataError, match=r"bomb\.zip.*unpacks to"):
        check_zip(tmp_path / "bomb.zip")


@pytest.mark.parametrize("text", ["a: [", DEEP, "- &a [*a]", "!!python/object:os.system x", "a: &a b\n*c : 1"])
def test_yaml_that_cannot_be_loaded_is_one_exception(text):
    with pytest.raises(DataError, match=r"^place"):
        parse_yaml(text, "place")


def answer(content, status=500):
    return SimpleNamespace(content=content, url="http://server/path", status_code=status)


def test_answers_of_servers_are_typed():
    assert answer_json(answer(b'{"a": 1}', 200), dict[str, int]) == {"a": 1}
    for content in (DEEP.encode(), b"[]", b"<html>", b'{"a": "x"}'):
        with pytest.raises(DataError, match=r"http://server/path \(status 200\)"):
            answer_json(answer(content, 200), dict[str, int])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"detail": "gone"}', "gone"),
        (b'{"error": "text"}', "text"),
        (b"plain", "plain"),
        (DEEP.encode(), DEEP[:500]),
        (b"[1]", "[1]"),
    ],
)
def test_the_message_of_an_error_answer_is_always_text(content, message):
    assert error_message(answer(content)) == message
