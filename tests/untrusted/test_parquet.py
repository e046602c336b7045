"""Bombs in Parquet are refused by the footer or before texts are expanded; honest files are read as they are."""

import os
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar_lab.untrusted import files
from rstar_lab.untrusted.files import DataError
from rstar_lab.untrusted.parquet import parquet_batches, read_footer, read_parquet

READERS = [read_parquet, lambda path: list(parquet_batches(path))]


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 2**20)


def honest(rows=100):
    chat = [[{"role": "user", "content": f"question {n}"}] for n in range(rows)]
    return pa.table(
        {
            "step": range(rows),
            "text": pa.array([f"text {n}" for n in range(rows)]).dictionary_encode(),
            "chat": chat,
            "map": pa.array([[("k", "v")]] * rows, pa.map_(pa.string(), pa.string())),
            "none": pa.array([None] * rows, pa.string()),
            "numbers": [[1.5, None]] * rows,
        }
    ).replace_schema_metadata({"name": "value"})


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_a_table_is_read_as_pyarrow_reads_it(tmp_path, rows):
    path = tmp_path / "a.parquet"
    pq.write_table(honest(rows), path, row_group_size=30)
    expected = pq.read_table(path)
    assert read_parquet(path).to_pylist() == expected.to_pylist()
    assert read_parquet(path).schema.metadata[b"name"] == b"value"
    assert read_parquet(path, ["text", "step"]).column_names == ["text", "step"]
    assert [row for batch in parquet_batches(path) for row in batch.to_pylist()] == expected.to_pylist()
    assert read_footer(path).num_rows == rows
    if rows == 100:
        assert read_parquet(path, groups=[1, 3])["step"].to_pylist() == [*range(30, 60), *range(90, 100)]


@pytest.mark.parametrize(
    "read", [lambda path: read_parquet(path).to_pylist(), lambda path: next(parquet_batches(path)).to_pylist()]
)
def test_decimals_are_numbers_of_json(tmp_path, read):
    reward, kind = Decimal("1.500"), pa.decimal128(18, 3)
    columns = {
        "reward": pa.array([reward], kind),
        "steps": pa.array([[{"reward": reward}]], pa.list_(pa.struct({"reward": kind}))),
    }
    columns |= {f"id{digits}": pa.array([Decimal(12)], pa.decimal128(digits, 0)) for digits in (9, 38)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"reward": 1.5, "steps": [{"reward": 1.5}], "id9": 12, "id38": "12"}]


def bomb(kind, path):
    one = pa.array(["x" * 100])
    match kind:
        case "rows":  # equal numbers
            pq.write_table(pa.table({"n": pa.array([1] * 3_000_000)}), path)
        case "text":  # one long text
            pq.write_table(pa.table({"text": ["x" * 2**24]}), path, compression="zstd")
        case "dictionary":  # a text that many rows share
            pq.write_table(pa.table({"text": one.take(pa.array([0] * 50_000))}), path, compression="zstd")
        case "nested":
            rows = [[{"content": "x" * 100}]] * 50_000
            pq.write_table(pa.table({"chat": rows}), path, compression="zstd")
        case "map":
            values = pa.array([[("k", "x" * 100)]] * 50_000, pa.map_(pa.string(), pa.string()))
            pq.write_table(pa.table({"map": values}), path, compression="zstd")
        case "delta":  # each text contains the one before
            texts = pa.table({"text": ["x" * n for n in range(8_000)]})
            pq.write_table(texts, path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


@pytest.mark.parametrize("kind", ["rows", "text", "dictionary", "nested", "map", "delta"])
@pytest.mark.parametrize("read", READERS)
def test_a_bomb_is_refused(tmp_path, kind, read):
    path = tmp_path / "bomb.parquet"
    bomb(kind, path)
    with pytest.raises(DataError, match=r"bomb\.parquet.*(far more than its|rows in)"):
        read(path)


@pytest.mark.parametrize("read", [*READERS, read_footer])
def test_a_file_that_is_no_parquet_file_is_named(tmp_path, read):
    path = tmp_path / "a.parquet"
    pq.write_table(honest(), path)
    data = path.read_bytes()
    for content in (b"", b"PAR1", data[:-9], data[: len(data) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet"):
            read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        read(path)
