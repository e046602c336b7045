"""Tests of `rstar-lab push` and `rstar-lab pull` against a stand-in for the Hub, with the real huggingface_hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.hub_server import TOKEN, HubServer
from helpers.inspector_runs import write_run
from helpers.tiny_models import make_model

from rstar_lab.analysis import open_runs
from rstar_lab.common.errors import UserError
from rstar_lab.exchange.hub import prepare
from rstar_lab.rl.models.model import load_model
from rstar_lab.runs import RunWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "runs"


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server
        server.shutdown()


@pytest.fixture
def command(hub, tmp_path):
    def run(*arguments: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": f"{tmp_path}/hf", "HF_HUB_DISABLE_XET": "1"}
        line = [sys.executable, "-m", "rstar_lab.cli", *map(str, arguments)]
        return subprocess.run(line, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)

    return run


def front_matter(card: bytes) -> dict:
    return yaml.safe_load(card.decode().split("---")[1])


@pytest.mark.slow
def test_a_run_becomes_a_data_set_and_a_run_again(hub, command, tmp_path):
    pushed = command("push", GOLDEN / "tiny_fast-rl", "me/rollouts")
    assert pushed.returncode == 0, pushed.stderr
    assert f"{hub.url}/datasets/me/rollouts" in pushed.stdout and "me/rollouts" in hub.private
    files = hub.repos["dataset", "me/rollouts"]
    tables = {config["config_name"]: config["data_files"] for config in front_matter(files["README.md"])["configs"]}
    assert tables["trajectories"] == "trajectories/**/*.parquet"
    assert set(tables) == {"trajectories", "calls", "transcripts"}
    assert "host" not in json.loads(files["run.json"])["hardware"]
    pulled = command("pull", "me/rollouts", "--to", tmp_path / "runs")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.strip() == f"run {tmp_path / 'runs' / 'tiny_fast-rl'}"
    ours, theirs = open_runs(GOLDEN / "tiny_fast-rl"), open_runs(tmp_path / "runs")
    assert theirs.trajectories().equals(ours.trajectories())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny_fast-rl"]
    again = command("pull", "me/rollouts", "--to", tmp_path / "runs")
    assert again.returncode != 0 and "exists already: choose another --to" in again.stderr


@pytest.mark.slow
def test_the_folder_of_a_run_is_a_data_set(tmp_path):
    import datasets

    run, folder = write_run(tmp_path, "roc", steps=2), tmp_path / "data"
    for name, file in prepare(run).files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file if isinstance(file, bytes) else file.read_bytes())
    read = {
        name: datasets.load_dataset(str(folder), name, cache_dir=str(tmp_path / "cache"))["train"]
        for name in datasets.get_dataset_config_names(str(folder))
    }
    stored = open_runs(run).trajectories()
    assert {name: table.num_rows for name, table in read.items()} == {"trajectories": 64, "transcripts": 64}
    assert sum(read["trajectories"]["reward"]) == stored.reward.sum()
    assert set(stored) - set(read["trajectories"].column_names) == {"metrics", "correct", "rewarded", "verified"}
    default = datasets.load_dataset_builder(str(folder), cache_dir=str(tmp_path / "cache"))
    assert default.config.name == "trajectories"
    assert open_runs(folder).trajectories().equals(stored)


@pytest.mark.slow
def test_a_model_is_sent_with_its_evaluation_but_without_optimizer_states(hub, command, tmp_path):
    runs = tmp_path / "runs"
    with RunWriter.open(
        runs, "a-rl", kind="train", recipe={"model": "/secret/place/Qwen3-4B", "rl": {"lr": 0.5}}, seed=7
    ) as run:
        run.finish("finished")
    folder = runs / "a-rl" / "checkpoints" / "step=000012"
    make_model(folder)
    for name in ("optimizer.pt", "modeling_own.py", "pytorch_model.bin"):
        (folder / name).write_bytes(b"x")
    with RunWriter.open(runs, "a-exam", kind="evaluate", recipe={}, seed=0, extra={"model": str(folder)}) as run:
        run.finish("finished", result={"pass1": [0.5, 0.4, 0.6], "problems": 10, "samples": 4})
    pushed = command("push", folder, "me/model", "--public")
    assert pushed.returncode == 0, pushed.stderr
    files = hub.repos["model", "me/model"]
    assert "model.safetensors" in files and "tokenizer.json" in files and "me/model" not in hub.private
    assert not {"optimizer.pt", "modeling_own.py", "pytorch_model.bin"} & set(files)
    card = files["README.md"].decode()
    assert "run `a-rl`, step 12, seed 7" in card and "from `Qwen3-4B`" in card and "lr: 0.5" in card
    assert "| a-exam | 50.0% [40.0%, 60.0%] | 10 | 4 |" in card and "/secret" not in card
    files["evil.py"] = files["weights.bin"] = b"x"
    pulled = command("pull", "me/model", "--to", "models")
    assert pulled.returncode == 0, pulled.stderr
    fetched = tmp_path / "models" / "model"
    assert not {"evil.py", "weights.bin"} & {path.name for path in fetched.iterdir()}
    import torch

    ours, theirs = (load_model(path, torch.float32).state_dict() for path in (folder, fetched))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_dry_run_prints_the_card_and_sends_nothing(hub, command):
    shown = command("push", GOLDEN / "tiny_fast-rl", "me/rollouts", "--dry-run")
    assert shown.returncode == 0 and "# tiny_fast-rl" in shown.stdout and "trajectories/stage=rl/" in shown.stdout
    assert not hub.repos


@pytest.mark.slow
def test_errors_name_the_cause_and_leave_nothing(hub, command, tmp_path):
    refused = command("push", GOLDEN / "tiny_fast-rl", "me/rollouts", token="hf_wrong")
    assert refused.returncode != 0 and "push to me/rollouts failed: " in refused.stderr and "401" in refused.stderr
    assert "hf_wrong" not in refused.stderr + refused.stdout
    missing = command("pull", "me/nothing", "--to", "here")
    assert missing.returncode != 0 and "pull of me/nothing failed: " in missing.stderr
    assert not list((tmp_path / "here").iterdir())
    (tmp_path / "empty").mkdir()
    neither = command("push", "empty", "me/x")
    assert neither.returncode != 0 and "is neither a run (run.json) nor a model (config.json)" in neither.stderr


def test_a_model_without_a_run_has_a_card_too(tmp_path):
    make_model(tmp_path / "alone")
    card = prepare(tmp_path / "alone").files["README.md"]
    assert isinstance(card, bytes) and front_matter(card)["library_name"] == "transformers"
    assert "without a record of its training" in card.decode()


def test_links_and_files_of_other_names_are_not_sent(tmp_path):
    model, secret = tmp_path / "model", tmp_path / "token"
    make_model(model)
    secret.write_text("hf_secret")
    for name in [
        "vocab.pkl",
        "tokenizer.pkl",
        "tokenizer_evil.py",
        "tokenizer_evil.json",
        "x.safetensors.py",
        "model.bin",
    ]:
        (model / name).write_text("x")
    for name in ("merges.txt", "added_tokens.json", "generation_config.json"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(secret)
    files = prepare(model).files
    allowed = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
               "special_tokens_map.json"}  # fmt: skip
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files) <= allowed
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "tiny_fast-rl", run)
    before = set(prepare(run).files)
    (run / "tokens.json").unlink()
    (run / "tokens.json").symlink_to(secret)
    (run / "transcripts" / "notes.parquet").symlink_to(secret)
    (run / "transcripts" / "stage=rl" / "step=000099.parquet").symlink_to(secret)
    (run / "trajectories" / "notes.parquet").write_text("x")
    (run / "elsewhere").mkdir()
    (run / "calls").rename(run / "elsewhere" / "calls")
    (run / "calls").symlink_to(run / "elsewhere" / "calls")
    assert set(prepare(run).files) == {
        name for name in before if name != "tokens.json" and not name.startswith("calls/")
    }
    shutil.copy(
        next((run / "trajectories").rglob("step*.parquet")), run / "transcripts" / "stage=rl" / "step=000098.parquet"
    )
    with pytest.raises(UserError, match=r"step=000098\.parquet"):
        prepare(run)
    (run / "run.json").rename(tmp_path / "info")
    (run / "run.json").symlink_to(tmp_path / "info")
    with pytest.raises(UserError, match=r"run\.json is a link"):
        prepare(run)
