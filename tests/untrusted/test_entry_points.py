"""What a person opens with one command: bombs and deep, blocking or endless files end with one error that names the file."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.analysis_runs import make_run

from rstar_lab.analysis import open_runs
from rstar_lab.analysis.inspector.inspector import Inspector
from rstar_lab.common.errors import UserError
from rstar_lab.doctor import doctor
from rstar_lab.exchange.importers import import_trl
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.models.sources import origin_of, read_config
from rstar_lab.rl.serving.serve import ServeOptions, check_options
from rstar_lab.untrusted import files

DEEP = "[" * 200_000
MUCH = 2**24


def write_bomb(path, **columns):
    """Write a small file of equal rows."""
    table = pa.table({name: pa.array([value] * 100_000) for name, value in columns.items()})
    pq.write_table(table, path, compression="zstd")


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: import_trl(folder, folder / "runs"),
        doctor,
        lambda folder: load_problems(folder / "completions_1.parquet"),
    ],
    ids=["import", "doctor", "problems"],
)
def test_rows_that_are_far_larger_than_their_file_are_refused(tmp_path, monkeypatch, read):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", MUCH)
    path = tmp_path / "completions_1.parquet"
    text = "x" * 200
    write_bomb(path, step=1, prompt=text, completion=text, question=text, answer="2", reward=1.0, advantage=0.0)
    assert path.stat().st_size < MUCH // 64
    with pytest.raises(UserError, match=r"completions_1\.parquet.*(far more than its|rows in)"):
        read(tmp_path)


@pytest.mark.parametrize("read", ["transcript", "page", "doctor"])
def test_a_long_text_in_a_run_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, read):
    """A file of 12 KB filled 750 MB when its rollout was opened."""
    run = make_run(tmp_path, "a", steps=1)
    (path,) = (run / "transcripts").rglob("*.parquet")
    table = pq.read_table(path)
    place = table.schema.get_field_index("question")
    texts = ["x" * (2 * MUCH), *["x"] * (len(table) - 1)]
    long = pa.array(texts, table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), long), path, compression="zstd")
    runs = open_runs(run)
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", MUCH)
    if read == "page":
        assert len(Inspector(runs).static_html()) < MUCH
        return
    with pytest.raises(UserError, match=path.name):
        runs.transcript(table["traj_id"][0].as_py()) if read == "transcript" else doctor(run)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_problems_are_read_from_regular_files_only(tmp_path, name, kind):
    os.mkfifo(tmp_path / name) if kind == "pipe" else (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name}: no such file"):
        load_problems(tmp_path / name)


def check_server(folder):
    """Check the options of `rstar-lab serve` for a model folder."""
    check_options(ServeOptions(folder, updatable=True, api_key="x" * 20))


@pytest.mark.parametrize("damage", ["deep", "pipe", "list"])
def test_a_model_folder_of_somebody_else_is_one_error(tmp_path, damage):
    (tmp_path / "model.safetensors").touch()
    readers = ("source.json", origin_of), ("config.json", read_config), ("config.json", load_tokenizer)
    for name, read in (*readers, ("config.json", check_server)):
        path = tmp_path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path) if damage == "pipe" else path.write_text(DEEP if damage == "deep" else json.dumps([]))
        with pytest.raises(UserError, match=str(tmp_path)):
            read(tmp_path)
