"""Preflight: what it refuses, what it cannot see, and whether its arithmetic is right."""

import json
import subprocess
import sys

import pytest
import yaml

from rstar_lab.profiles import load_profile
from rstar_lab.rl.preflight.run import CHECKS, Status, estimate, preflight
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import RlSection

pytestmark = pytest.mark.slow
PAPER = {
    "name": "paper",
    "model": "Qwen/Qwen3-14B-Base",
    "stages": [
        {"name": "stage1", "problems": {"file": "/shared/42k.parquet"}, "steps": 300},
        {"name": "stage2", "problems": {"file": "/shared/42k.parquet"}, "steps": 85, "max_response_tokens": 12288},
        {"name": "stage3", "problems": {"file": "/shared/17k.parquet"}, "steps": 125, "max_response_tokens": 12288, "max_turns": 15},
    ],
    "sandbox": {"url": "http://sandbox.invalid:8000"},
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    def write(**changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(PAPER | changes))
        return str(path)

    return write


def found(*arguments, **keywords):
    return {finding.check: finding for finding in preflight(*arguments, **keywords)}


@pytest.fixture
def composed():
    """Asked for by tests that compose verl's configuration."""


@pytest.fixture(autouse=True)
def few_checks(request, monkeypatch):
    """Composing verl's configuration takes seconds: only the tests that are about it do."""
    if "composed" not in request.fixturenames:
        monkeypatch.delitem(CHECKS, "verl configuration")


def test_the_papers_recipe_passes_on_its_machine_and_skips_what_is_not_here(recipe):
    findings = found(recipe(), "mi300x_8x8")
    assert not [f for f in findings.values() if f.status is Status.FAIL]
    skipped = {f.check for f in findings.values() if f.status is Status.SKIP}
    assert {"tokens", "data", "sandbox"} <= skipped
    assert "512 x 16 = 1 x 8192 over 64 ranks" in findings["batches"].message
    assert "510 steps in one week = 168 h" in findings["time"].message


def test_verls_own_files_compose_the_configuration_and_refuse_keys_they_do_not_have(recipe, composed):
    good = found(recipe(), "mi300x_8x8", {"verl.trainer.logger": ["console", "wandb", "tensorboard"]})
    assert good["verl configuration"].status is Status.PASS, good["verl configuration"].message
    bad = found(recipe(), "mi300x_8x8", {"verl.trainer.loger": ["console"]})
    assert bad["verl configuration"].status is Status.FAIL
    assert "loger" in bad["verl configuration"].message


def test_an_sft_is_composed_too_and_one_that_verl_has_not_is_refused_unless_it_is_made_already(
    recipe, composed, tmp_path
):
    sft = {"conversations": [{"file": "/shared/c.jsonl"}]}
    good = found(recipe(sft=sft), "mi300x_8x8")
    assert "for its SFT and each of 3 stages" in good["verl configuration"].message
    assert good["unread keys"].status is Status.PASS and "/shared/c.jsonl" in good["data"].message
    muon = recipe(sft=sft | {"optimizer": "muon", "packing": False}, runs=str(tmp_path))
    bad = found(muon, "mi300x_8x8")["unread keys"]
    assert bad.status is Status.FAIL and "sft.optimizer: muon" in bad.message
    (tmp_path / "paper-sft" / "sft" / "model").mkdir(parents=True)
    made = found(muon, "mi300x_8x8")["unread keys"]
    assert made.status is Status.WARN and "sft.packing" in made.message


@pytest.mark.parametrize(
    ("changes", "overrides", "profile", "check", "words"),
    [
        ({"rll": {}}, {}, "mi300x_8x8", "recipe", "rll"),
        ({}, {}, "mi300x_8x9", "profile", "did you mean 'mi300x_8x8'"),
        ({}, {"rl.problems_per_step": 511}, "mi300x_8x8", "batches", "cannot be cut over 64 ranks"),
        ({}, {"rl.mini_batches": 3}, "mi300x_8x8", "batches", "is not whole"),
        ({"model": "Qwen/Qwen3-14B"}, {"rl.max_response_tokens": 400_000}, "one_gpu", "memory", "does not fit"),
        ({}, {"rl.token_arrays": "all", "stages.0.steps": 120_000}, "mi300x_8x8", "disk", "sampled"),
    ],
)
def test_what_cannot_work_fails_with_the_key_or_the_way_out(recipe, changes, overrides, profile, check, words):
    finding = found(recipe(**changes), profile, overrides)[check]
    assert finding.status is Status.FAIL
    assert words in finding.message


def test_the_recipe_that_ships_passes_on_its_machine():
    findings = found("qwen3_14b_mi300x", "mi300x_8x8")
    assert not [f for f in findings.values() if f.status is Status.FAIL]
    assert findings["unread keys"].status is Status.PASS


def test_what_verl_cannot_honour_is_refused_by_its_key(recipe):
    finding = found(recipe(), "mi300x_8x8", {"rl.fp32_head": True})["unread keys"]
    assert finding.status is Status.FAIL
    assert "stages.stage1: fp32_head" in finding.message
    assert found(recipe(), "one_gpu", {"rl.fp32_head": True})["unread keys"].status is Status.PASS


def test_keys_that_verl_does_not_read_are_named(recipe):
    finding = found(recipe(), "mi300x_8x8", {"engine.memory_share": 0.5, "processes": 2})["unread keys"]
    assert finding.status is Status.WARN
    assert "engine.memory_share (verl reads the profile's engine.memory_utilization)" in finding.message
    assert "processes (verl reads the profile's GPUs)" in finding.message


def test_gpu_variables_that_verl_refuses_are_a_failure(recipe, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    finding = found(recipe(), "mi300x_8x8")["GPU variables"]
    assert finding.status is Status.FAIL and "unset ROCR" in finding.message


def test_data_are_read_and_true_answers_must_verify(recipe, tmp_path):
    path = tmp_path / "problems.jsonl"
    stages = [{"name": "one", "problems": {"file": str(path)}, "steps": 1}]
    write_problems(path, [Problem(problem_id=f"p{i}", question="?", answer=str(i)) for i in range(50)])
    good = found(recipe(stages=stages), "mi300x_8x8")["data"]
    assert good.status is Status.PASS and "50 problems, 32/32 answers verify" in good.message
    path.write_text('{"problem_id": "a", "question": "?"}\n')
    bad = found(recipe(stages=stages), "mi300x_8x8")["data"]
    assert bad.status is Status.FAIL and "answer" in bad.message


def test_on_a_laptop_sandbox_and_tokens_are_really_looked_at(recipe, tmp_path):
    from rstar_lab.rl.chat_format.template import render_prompt
    from rstar_lab.rl.models.model import build_tiny, save_model
    from rstar_lab.rl.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([render_prompt("What is 1 + 1?")], 600)
    model = build_tiny(tokenizer, seed=0, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64)
    save_model(tmp_path / "model", model, tokenizer)
    stages = [{"name": "one", "problems": {"synthetic": {"count": 10}}, "steps": 1}]
    text = recipe(model=str(tmp_path / "model"), stages=stages, sandbox={"workers": 1})
    findings = found(text, "laptop")
    assert findings["sandbox"].status is Status.PASS and "ms a call" in findings["sandbox"].message
    assert findings["tokens"].status is Status.PASS, findings["tokens"].message

    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "model" / name
        path.write_text(path.read_text().replace("<|im_end|>", "<|xx_end|>"))
    broken = found(text, "laptop")["tokens"]
    assert broken.status is Status.FAIL and "<|im_end|>" in broken.message


def test_the_command_prints_a_table_and_strict_fails_what_was_skipped(recipe):
    def run(*more):
        command = [
            sys.executable,
            "-m",
            "rstar_lab.cli",
            "preflight",
            recipe(),
            "--profile",
            "mi300x_8x8",
            "--json",
            *more,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["status"] for row in rows if "status" in row} <= {"pass", "warn", "skip", "fail"}
    assert rows[-1]["skip"] > 0 and rows[-1]["fail"] == 0 and rows[-1]["formula"].startswith("step = ")
    assert run("--strict").returncode == 1


# Arithmetic


def test_the_papers_model_has_its_known_size_and_cache():
    model = estimate.KNOWN["Qwen3-14B"]
    assert model.parameters == pytest.approx(14.77e9, rel=0.002)
    assert model.kv_bytes() == 2 * 40 * 8 * 128 * 2


def test_a_models_size_is_read_from_its_folder(tmp_path):
    from rstar_lab.rl.chat_format.template import render_prompt
    from rstar_lab.rl.models.model import build_tiny, save_model
    from rstar_lab.rl.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([render_prompt("?")], 600)
    model = build_tiny(tokenizer, seed=0, layers=2)
    save_model(tmp_path, model, tokenizer)
    assert estimate.architecture_of(str(tmp_path)).parameters == sum(p.numel() for p in model.parameters())


def test_time_grows_as_it_must():
    model, profile = estimate.KNOWN["Qwen3-14B"], load_profile("mi300x_8x8")
    base = estimate.step_time(model, RlSection(), profile)
    longer = estimate.step_time(model, RlSection(max_response_tokens=16384), profile)
    assert longer.generation > 2 * base.generation, "twice the tokens, with more cache to read each"
    plain = estimate.step_time(model, RlSection(roc="none"), profile)
    assert plain.update == base.update, "G of each group are trained on, with RoC and without"
    assert base.generation / 2 <= plain.generation < base.generation, (
        "RoC rolls out twice as many; reading weights is shared"
    )
    assert estimate.step_time(model, RlSection(old_log_probs="engine"), profile).old_log_probs == 0
