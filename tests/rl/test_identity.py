"""The identity of an evaluation changes with everything that can change its numbers."""

import json
import sys
from pathlib import Path

import pytest
from helpers.cases import read_cases

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl import evaluate_command as evaluate
from rstar_lab.rl import identity as module
from rstar_lab.rl.identity import differing_parts, evaluation_identity, identity_digest, model_hash
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import Problem

PROBLEMS = [Problem(problem_id="a", question="1 + 1?", answer="2")]
BASE = evaluation_identity(load_recipe("evaluate"), PROBLEMS, "weights", 16)


@pytest.mark.parametrize(("key", "value", "part"), read_cases(__file__, "identity_settings.yaml"))
def test_each_setting_changes_the_identity(key, value, part, tmp_path, monkeypatch):
    (tmp_path / "my_identity_reward.py").write_text("def score(text, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    changed = evaluation_identity(load_recipe("evaluate", {key: value}), PROBLEMS, "weights", 16)
    assert part in [name for name in changed if changed[name] != BASE[name]]
    assert identity_digest(changed) != identity_digest(BASE)
    assert part in differing_parts(BASE, changed)


def test_problems_weights_samples_and_verifier_change_the_identity(monkeypatch):
    recipe = load_recipe("evaluate")
    other = [Problem(problem_id="a", question="1 + 1?", answer="3")]
    assert evaluation_identity(recipe, other, "weights", 16) != BASE
    assert evaluation_identity(recipe, PROBLEMS, "other weights", 16) != BASE
    assert evaluation_identity(recipe, PROBLEMS, "weights", 4) != BASE
    monkeypatch.setattr(module, "verifier_version", lambda: "another version")
    assert evaluation_identity(recipe, PROBLEMS, "weights", 16) != BASE


def test_the_version_of_verl_identifies_an_environment_with_its_grader(monkeypatch):
    recipe = load_recipe("evaluate", {"rl.environments": [{"name": "sums", "reward": "released"}]})
    before = evaluation_identity(recipe, PROBLEMS, "weights", 16)
    monkeypatch.setattr(module, "_version", lambda package: f"{package} 0.0.1")
    assert evaluation_identity(recipe, PROBLEMS, "weights", 16)["environments"] != before["environments"]


def test_code_and_versions_of_the_graders_change_the_identity(monkeypatch, tmp_path):
    versions = []
    for text in ("one", "two"):
        (tmp_path / "__init__.py").write_text(text)
        monkeypatch.setattr(module.verify, "__file__", str(tmp_path / "__init__.py"))
        module.verifier_version.cache_clear()
        versions.append(module.verifier_version())
    monkeypatch.undo()
    module.verifier_version.cache_clear()
    assert versions[0] != versions[1]
    recipe = load_recipe("evaluate", {"rl.reward": "released"})
    first = evaluation_identity(recipe, PROBLEMS, "weights", 16)["reward"]
    monkeypatch.setattr(module.metadata, "version", lambda package: "0.0.1")
    assert evaluation_identity(recipe, PROBLEMS, "weights", 16)["reward"] != first


def test_settings_that_cannot_change_the_numbers_keep_the_identity():
    for key, value in (("engine.max_num_seqs", 3), ("sandbox.workers", 2), ("rl.lr", 1e-3), ("label", "x")):
        recipe = load_recipe("evaluate", {key: value})
        assert identity_digest(evaluation_identity(recipe, PROBLEMS, "weights", 16)) == identity_digest(BASE)


def test_new_weights_in_the_same_folder_change_the_model_hash(tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    first = model_hash(folder, cache)
    assert model_hash(folder, cache) == first
    (folder / "model.safetensors").write_bytes(b"three")
    assert model_hash(folder, cache) != first
    assert len(json.loads((cache / "file-hashes.json").read_text())) == 3
    for text in ("[1]", "5", "[" * 100_000):  # the cache of a shared runs folder can belong to somebody else
        (cache / "file-hashes.json").write_text(text)
        assert model_hash(folder, cache) != first


@pytest.mark.parametrize(
    ("keys", "source", "part"),
    [
        ({"rl.reward": "edited:own"}, "def own(text, answer): return 1.0", "reward"),
        (
            {"rl.prompt.format": "model", "rl.prompt.chat_template": "edited:own"},
            "def own(messages, tools, start): ...",
            "prompt",
        ),
    ],
)
def test_an_edited_function_changes_the_identity(keys, source, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe("evaluate", keys)
    identities = []
    for comment in ("", "  # edited"):
        Path("edited.py").write_text(source + comment)
        identities.append(evaluation_identity(recipe, PROBLEMS, "weights", 16)[part])
    sys.modules.pop("edited", None)
    assert identities[0] != identities[1]


async def test_new_weights_in_the_folder_of_a_server_give_a_new_run(tmp_path, monkeypatch):
    (tmp_path / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
    (tmp_path / "model").mkdir()

    async def one_server(urls, tokenizer):
        return tmp_path / "model", "the model"

    async def stop_before_sampling(session, folder, problems, piece, **options):
        raise UserError(piece)

    monkeypatch.setattr(evaluate, "_tokenizer_of", one_server)
    monkeypatch.setattr(evaluate, "evaluate_model", stop_before_sampling)
    runs = []
    for weights in (b"one", b"three"):
        (tmp_path / "model" / "model.safetensors").write_bytes(weights)
        recipe = load_recipe("evaluate", {"runs": str(tmp_path / "runs")})
        with pytest.raises(UserError) as stopped:
            await evaluate.evaluate_command(
                ["http://localhost:1"], str(tmp_path / "problems.jsonl"), recipe, Reporter(as_json=True)
            )
        runs.append(str(stopped.value))
    assert runs[0] != runs[1]
