"""Tests of building, saving and loading models, and of the errors for broken model folders."""

import json
import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.rl.models.model import ModelError, build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.models.model_folder import has_tied_embeddings, model_folder
from rstar_lab.rl.models.sources import check_files
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.preflight.context import architecture_of
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.runs.writer import RunWriter

TOKENIZER = train_tokenizer([render_prompt(f"What is {n} times {n}?") for n in range(50)], 320)
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model", build_tiny(TOKENIZER, seed=0, **SHAPE), TOKENIZER)
    return tmp_path / "model"


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_a_saved_model_computes_the_same_after_loading(folder):
    model, loaded = build_tiny(TOKENIZER, seed=0, **SHAPE), load_model(folder)
    ids = torch.tensor([TOKENIZER.encode(render_prompt("What is 3 times 3?"))])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert load_tokenizer(folder).get_vocab() == TOKENIZER.get_vocab()
    assert loaded.config.eos_token_id == TOKENIZER.eos_token_id


@pytest.fixture
def shards(tmp_path):
    """A model folder with weights in several files and an index."""
    build_tiny(TOKENIZER, seed=0, **SHAPE).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    TOKENIZER.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    return tmp_path / "shards"


def test_weights_in_several_files_load_like_one_file(folder, shards):
    assert torch.equal(weights(load_model(shards)), weights(load_model(folder)))


@pytest.mark.parametrize("damage", ["shard", "torn shard", "index", "torn index", "name outside"])
def test_an_error_names_the_broken_shard_or_index(shards, damage):
    shard, index = sorted(shards.glob("model-*"))[1], shards / "model.safetensors.index.json"
    if damage == "shard":
        shard.unlink()
    elif damage == "torn shard":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "index":
        index.unlink()
    elif damage == "torn index":
        index.write_text(index.read_text()[:50])
    else:
        index.write_text(index.read_text().replace(shard.name, "../elsewhere.safetensors"))
    with pytest.raises(UserError) as error:
        load_model(shards)
    message = str(error.value)
    assert str(shards) in message and "\n" not in message
    names = {"shard": shard.name, "torn shard": "cannot be loaded", "name outside": "../elsewhere.safetensors"}
    assert names.get(damage, index.name) in message


def test_dtype_is_that_of_the_folder_unless_given(folder):
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, torch.bfloat16).dtype == torch.bfloat16


def changed_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


DAMAGES = {
    "does not exist": shutil.rmtree,
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "not JSON": lambda folder: (folder / "config.json").write_text("{oops"),
    "model_type": lambda folder: (folder / "config.json").write_text("{}"),
    "safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "cannot be loaded": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "mismatch|size": lambda folder: changed_config(folder, hidden_size=48),
    "missing keys": lambda folder: changed_config(folder, num_hidden_layers=3, layer_types=None),
}


@pytest.mark.parametrize(("message", "damage"), DAMAGES.items())
def test_an_error_names_the_broken_folder_and_the_problem(folder, message, damage):
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load_model(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_pickled_weights_are_rejected(folder):
    torch.save(load_model(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin"):
        load_model(folder)


def test_code_in_a_folder_is_not_run_without_trust_remote_code(folder, tmp_path):
    changed_config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    witness = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(witness)!r}, 'w')\n")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(folder)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "more.safetensors"])
def test_a_pipe_in_a_model_folder_blocks_nobody(folder, tmp_path, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    (tmp_path / "p.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    evaluate = ["evaluate", str(folder), "--problems", str(tmp_path / "p.jsonl"), "--runs-dir", str(tmp_path / "runs")]
    for read in (lambda: load_model(folder), lambda: load_tokenizer(folder), lambda: check_files(folder)):
        with pytest.raises(ModelError, match=f"{name} is not a regular file"):
            read()
    error = CliRunner().invoke(app, evaluate).exception
    assert isinstance(error, ModelError) and name in str(error)


def test_a_configuration_of_another_form_is_one_error(folder):
    for text in ("[" * 100_000, "[]", "5"):
        (folder / "config.json").write_text(text)
        for read in (has_tied_embeddings, lambda model: architecture_of(str(model))):
            with pytest.raises(UserError, match=r"config\.json"):
                read(folder)


def test_a_broken_or_missing_tokenizer_is_an_error(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(folder)


def test_a_run_names_its_last_model_by_id_and_by_folder(tmp_path):
    RunWriter.open(tmp_path, "made-sft", kind="train", recipe={}, seed=0).finish("finished")
    model = tmp_path / "made-sft" / "sft" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("made-sft", str(tmp_path / "made-sft"), str(model)):
        assert model_folder(name, tmp_path) == model
    with pytest.raises(UserError, match="neither a folder"):
        model_folder("nowhere", tmp_path)
