"""Preflight: what it rejects and what it skips."""

import json
import shutil

import pytest
import yaml
from helpers.tiny_models import make_model
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import resource_folder
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight import recipe as recipe_checks
from rstar_lab.rl.preflight.context import KNOWN, CheckContext, Warn
from rstar_lab.rl.preflight.run import CHECKS, Status, preflight
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.renderers.formats import render_prompt

pytestmark = pytest.mark.slow
REPLY = {"role": "assistant", "content": "<reason></reason><answer>y</answer>"}
PAPER = {
    "name": "paper",
    "model": "Qwen/Qwen3-14B-Base",
    "stages": [
        {"name": "stage1", "problems": {"file": "data/42k.parquet"}, "steps": 300},
        {"name": "stage2", "problems": {"file": "data/42k.parquet"}, "steps": 85, "limits": {"max_response_tokens": 12288}},
        {"name": "stage3", "problems": {"file": "data/17k.parquet"}, "steps": 125,
         "limits": {"max_response_tokens": 12288, "max_turns": 15}},
    ],
    "sandbox": {"url": "http://sandbox.invalid:8000"},
}  # fmt: skip


SETS = {"sets": {"held": {"file": "data/17k.parquet"}}}


@pytest.fixture
def recipe(tmp_path):
    def write(**changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(PAPER | changes))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def disk(monkeypatch):
    """A disk with 4 TB free, so that no result depends on the disk of this machine."""
    usage = shutil.disk_usage("/")._replace(free=4 * 10**12)
    monkeypatch.setattr("rstar_lab.rl.preflight.machine.shutil.disk_usage", lambda folder: usage)


def findings_of(*arguments, **keywords):
    return {finding.check: finding for finding in preflight(*arguments, **keywords)}


@pytest.fixture
def storage(tmp_path):
    """Shared storage with a folder for the paper's model and files of problems, and a profile that names it."""
    shared = tmp_path / "shared"
    model = shared / "models" / "Qwen3-14B-Base"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    shape = KNOWN["Qwen3-14B"]
    config = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "max_position_embeddings": shape.positions,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (shared / "data").mkdir()
    problems = [Problem(problem_id=f"p{i}", question="?", answer=str(i)) for i in range(50)]
    for name in ("42k.parquet", "17k.parquet"):
        write_problems(shared / "data" / name, problems)

    def profile(**changes):
        content = yaml.safe_load((resource_folder("cluster") / "profiles/mi300x_8x8.yaml").read_text())
        content["container"] = None
        content["storage"] = {name: str(shared / name) for name in ("runs", "models", "data")}
        path = tmp_path / "mi300x_here.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return str(path)

    return profile


@pytest.fixture
def composed():
    """Asked for by tests that compose verl's configuration."""


@pytest.fixture(autouse=True)
def few_checks(request, monkeypatch):
    """Composing verl's configuration takes seconds: only the tests that are about it do."""
    if "composed" not in request.fixturenames:
        monkeypatch.delitem(CHECKS, "verl configuration")


def test_the_papers_recipe_passes_on_its_machine(recipe, storage):
    findings = findings_of(recipe(), storage())
    assert not [f for f in findings.values() if f.status is Status.FAIL]
    skipped = {f.check for f in findings.values() if f.status is Status.SKIP}
    assert skipped == {"tokens", "sandbox", "devices"}, "no tokenizer, no service, no GPU"
    assert "512 x 16 = 1 x 8192 on 64 ranks" in findings["batches"].message
    assert "510 steps in one week = 168 h" in findings["time"].message


def test_the_disk_estimate_has_the_rollouts_of_the_filter(recipe, tmp_path):
    stage = {"name": "one", "problems": {"synthetic": {"count": 1000}}, "steps": 1, "filter": {"samples": 8}}
    (tmp_path / "problems.jsonl").write_text('{"question": "?", "answer": "1"}\n' * 1000)
    stores = []
    for section in (
        {"synthetic": {"count": 1000}},
        {"file": str(tmp_path / "problems.jsonl")},
        {"file": "data/missing.jsonl"},
    ):
        path = recipe(model="tiny", stages=[stage | {"problems": section}])
        stores.append(estimate.disk_bytes(KNOWN["Qwen3-14B"], load_recipe(path))[1])
    limit = load_recipe(path).settings(load_recipe(path).stages[0]).limits.max_response_tokens
    # 8 rollouts of each problem, 45% of the longest response, 6.5 bytes per token.
    assert stores[0] - stores[2] == pytest.approx(8000 * 0.45 * limit * 6.5)
    assert stores[1] == stores[0]


def test_verl_configuration_is_composed_and_unknown_keys_are_rejected(recipe, composed):
    good = findings_of(recipe(), "mi300x_8x8", {"verl.trainer.logger": ["console", "wandb", "tensorboard"]})
    assert good["verl configuration"].status is Status.PASS, good["verl configuration"].message
    bad = findings_of(recipe(), "mi300x_8x8", {"verl.trainer.loger": ["console"]})
    assert bad["verl configuration"].status is Status.FAIL
    assert "loger" in bad["verl configuration"].message


def test_sft_is_composed_and_unsupported_keys_fail_until_the_model_exists(recipe, composed, tmp_path):
    sft = {"conversations": [{"file": "/shared/c.jsonl"}]}
    good = findings_of(recipe(sft=sft), "mi300x_8x8")
    assert "for its SFT and 3 stages" in good["verl configuration"].message
    assert good["unread keys"].status is Status.PASS
    assert good["data"].status is Status.FAIL and "/shared/c.jsonl" in good["data"].message
    muon = recipe(sft=sft | {"optimizer": "muon", "packing": False}, runs=str(tmp_path))
    bad = findings_of(muon, "mi300x_8x8")["unread keys"]
    assert bad.status is Status.FAIL and "sft.optimizer: muon" in bad.message
    (tmp_path / "paper-sft" / "sft" / "model").mkdir(parents=True)
    made = findings_of(muon, "mi300x_8x8")["unread keys"]
    assert made.status is Status.WARN and "sft.packing" in made.message


@pytest.mark.parametrize(
    ("changes", "overrides", "profile", "check", "words"),
    [
        ({"rll": {}}, {}, "mi300x_8x8", "recipe", "rll"),
        ({}, {}, "mi300x_8x9", "profile", "did you mean 'mi300x_8x8'"),
        ({}, {"rl.problems_per_step": 511}, "mi300x_8x8", "batches", "does not divide among 64 ranks"),
        ({}, {"rl.mini_batches": 3}, "mi300x_8x8", "unread keys", "into 3 equal parts"),
        (
            {"evaluate": SETS | {"max_response_tokens": 700_000}},
            {},
            "mi300x_8x8",
            "memory",
            "sequences of 702048 tokens",
        ),
        (
            {"model": "Qwen/Qwen3-14B"},
            {"stages.1.limits.max_response_tokens": 400_000},
            "one_gpu",
            "memory",
            "longest 402048: does not",
        ),
        ({}, {"rl.token_arrays": "all", "stages.0.steps": 120_000}, "mi300x_8x8", "disk", "sampled"),
    ],
)
def test_impossible_settings_fail_with_key_and_remedy(recipe, changes, overrides, profile, check, words):
    finding = findings_of(recipe(**changes), profile, overrides)[check]
    assert finding.status is Status.FAIL
    assert words in finding.message


@pytest.mark.parametrize(
    ("name", "profile"),
    [("qwen3_14b_mi300x", "mi300x_8x8"), ("qwen3_14b_h100x8", "h100x8"), ("qwen3_1_7b_one_gpu", "one_gpu")],
)
def test_recipes_that_ship_fail_only_for_missing_files_which_are_named(name, profile):
    findings = findings_of(name, profile)
    storage, container = load_profile(profile).storage, load_profile(profile).container
    files = {"model", "data"} | ({"container"} if container and container.endswith(".sif") else set())
    assert {f.check for f in findings.values() if f.status is Status.FAIL} == files
    assert f"{storage.data}/sft/toolace.jsonl" in findings["data"].message
    assert f"{storage.data}/eval/math500.parquet" in findings["data"].message
    assert storage.models in findings["model"].message
    assert findings["unread keys"].status is Status.PASS


def test_trainer_option_checks_the_trainer_that_will_run(tmp_path, monkeypatch):
    # After `make demo`, runs/ has the model after SFT, and verl does not need sft.optimizer.
    monkeypatch.chdir(tmp_path)
    assert findings_of("tiny", "laptop")["positions"].status is Status.PASS
    under_verl = findings_of("tiny", "laptop", trainer="verl")
    assert under_verl["positions"].status is Status.FAIL
    assert "2048 for the prompt + 224 exceed the 1024 positions" in under_verl["positions"].message
    assert "sft.optimizer: muon" in under_verl["unread keys"].message
    assert findings_of("tiny", "laptop", trainer="other")["profile"].status is Status.FAIL


def test_a_model_of_unknown_shape_is_a_failure(recipe, tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"n_layer": 12, "n_embd": 768}))
    (folder / "model.safetensors").touch()
    findings = findings_of(recipe(model=str(folder)), "one_gpu")
    assert findings["model"].status is Status.FAIL and "KeyError" in findings["model"].message
    assert findings["memory"].status is Status.FAIL and "config.json" in findings["memory"].message
    missing = findings_of(recipe(model="nobody/NewModel-9B"), "mi300x_8x8")
    assert missing["model"].status is Status.FAIL and "/shared/models/NewModel-9B" in missing["model"].message


def test_keys_that_verl_does_not_support_fail(recipe):
    finding = findings_of(recipe(), "mi300x_8x8", {"rl.fp32_head": True})["unread keys"]
    assert finding.status is Status.FAIL
    assert "stages.stage1: fp32_head" in finding.message
    assert findings_of(recipe(), "one_gpu", {"rl.fp32_head": True})["unread keys"].status is Status.PASS


def test_keys_that_verl_ignores_are_a_warning(recipe):
    finding = findings_of(recipe(), "mi300x_8x8", {"engine.gpu_memory_utilization": 0.5, "processes": 2})["unread keys"]
    assert finding.status is Status.WARN
    assert "engine.gpu_memory_utilization (verl reads the profile's engine.memory_utilization)" in finding.message
    assert "processes (verl reads the profile's GPUs)" in finding.message


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("engine", {"tensor_parallel": 3}, "engine.tensor_parallel: 3"),
        ("engine", {"tensor_parallel": 16}, "a node has 8 GPUs"),
        ("parallelism", {"fsdp_size": 7}, "parallelism.fsdp_size: 7"),
        ("parallelism", {"sequence_parallel": 16}, "parallelism.sequence_parallel: 16"),
    ],
)
def test_a_model_that_does_not_divide_among_the_gpus_fails(recipe, storage, section, changes, words):
    finding = findings_of(recipe(), storage(**{section: changes}))["parallelism"]
    assert finding.status is Status.FAIL and words in finding.message
    assert findings_of(recipe(), storage())["parallelism"].status is Status.PASS


def test_programs_and_containers_that_the_job_starts_must_exist(recipe, storage, monkeypatch, tmp_path):
    calls = {"sandbox": {"url": "local"}}
    container = {"container": str(tmp_path / "rstar.sif")}
    finding = findings_of(recipe(**calls), storage(**container))["container"]
    assert finding.status is Status.FAIL and "rstar.sif: no such file" in finding.message
    (tmp_path / "rstar.sif").touch()
    monkeypatch.setattr("rstar_lab.rl.preflight.machine.shutil.which", lambda name: None)
    assert "must contain redis-server" in findings_of(recipe(**calls), storage(**container))["programs"].message
    for backend, image, words in (
        ("slurm", "rstar-lab:rocm", "pyxis starts rstar-lab:rocm"),
        ("ray", "rstar-lab:rocm", "podman on every node starts rstar-lab:rocm"),
        ("kuberay", "rstar-lab:rocm", "the pods run rstar-lab:rocm"),
        ("kuberay", "/x.sif", "container: /x.sif: backend kuberay requires an image of a registry"),
    ):
        assert words in findings_of(recipe(), storage(backend=backend, container=image))["container"].message
    on_nodes = findings_of(recipe(**calls), storage())["programs"]
    assert on_nodes.status is Status.SKIP and "redis-server, for sandbox.redis" in on_nodes.message
    here = findings_of(recipe(**calls), storage(backend="local"))["programs"]
    assert here.status is Status.FAIL and "not installed: redis-server" in here.message
    assert findings_of(recipe(), storage(backend="local"))["programs"].status is Status.PASS, "it has its own service"
    monkeypatch.setenv("RSTAR_LAB_REDIS_URL", "redis://10.0.0.1")
    assert findings_of(recipe(**calls), storage(backend="local"))["programs"].status is Status.PASS
    logger = findings_of(recipe(), storage(backend="local"), {"verl.trainer.logger": ["console", "swanlab"]})[
        "programs"
    ]
    assert logger.status is Status.FAIL and "package swanlab" in logger.message


def test_gpu_variables_that_verl_rejects_fail(recipe, storage, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    finding = findings_of(recipe(), "mi300x_8x8")["GPU variables"]
    assert finding.status is Status.FAIL and "unset ROCR" in finding.message
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert findings_of(recipe(), "mi300x_8x8")["GPU variables"].status is Status.PASS, "the batch script unsets them"
    finding = findings_of(recipe(), storage(backend="ray"))["GPU variables"]
    assert finding.status is Status.FAIL and "unset both" in finding.message


@pytest.mark.parametrize("exported", ["", "AutoModelForCausalLMWithValueHead = object"])
def test_trl_without_the_class_that_verl_imports_fails(recipe, monkeypatch, tmp_path, exported):
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text(exported)
    monkeypatch.syspath_prepend(tmp_path)
    finding = findings_of(recipe(), "mi300x_8x8")["versions"]
    assert finding.status is (Status.PASS if exported else Status.FAIL)
    assert exported or "pip uninstall trl" in finding.message


def test_data_is_read_and_true_answers_must_verify(recipe, tmp_path):
    path = tmp_path / "problems.jsonl"
    stages = [{"name": "one", "problems": {"file": str(path)}, "steps": 1}]
    write_problems(path, [Problem(problem_id=f"p{i}", question="?", answer=str(i)) for i in range(50)])
    good = findings_of(recipe(stages=stages), "mi300x_8x8")["data"]
    assert good.status is Status.PASS and "50 problems, 32/32 answers verify" in good.message
    text = Problem(problem_id="t", question="??", answer="It is 3 in 2 of the cases, as shown above.")
    write_problems(path, [*(Problem(problem_id=f"p{i}", question="?", answer=str(i)) for i in range(50)), text])
    unread = findings_of(recipe(stages=stages), "mi300x_8x8")["data"]
    assert unread.status is Status.WARN and "stages.one.problems, row 51: answer: 'It is 3 in" in unread.message
    write_problems(path, [Problem(problem_id="p", question="?", info={"tests": [{"input": "", "output": "1"}]})])
    programs = findings_of(recipe(stages=stages, rl={"reward": "tests"}), "mi300x_8x8")["data"]
    assert programs.status is Status.PASS, f"programs have tests instead of answers: {programs.message}"
    path.write_text('{"problem_id": "a", "question": "?"}\n')
    bad = findings_of(recipe(stages=stages), "mi300x_8x8")["data"]
    assert bad.status is Status.FAIL and "answer" in bad.message


def test_on_a_laptop_the_sandbox_and_the_tokenizer_are_used(recipe, tmp_path):
    from rstar_lab.rl.models.model import build_tiny, save_model
    from rstar_lab.rl.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([render_prompt("What is 1 + 1?")], 600)
    model = build_tiny(tokenizer, seed=0, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64)
    save_model(tmp_path / "model", model, tokenizer)
    stages = [{"name": "one", "problems": {"synthetic": {"count": 10}}, "steps": 1}]
    text = recipe(model=str(tmp_path / "model"), stages=stages, sandbox={"workers": 1})
    findings = findings_of(text, "laptop")
    assert findings["sandbox"].status is Status.PASS and "ms per call" in findings["sandbox"].message
    assert findings["tokens"].status is Status.PASS, findings["tokens"].message

    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "model" / name
        path.write_text(path.read_text().replace("<|im_end|>", "<|xx_end|>"))
    broken = findings_of(text, "laptop")["tokens"]
    assert broken.status is Status.FAIL and "<|im_end|>" in broken.message


def test_strict_turns_a_skip_into_a_failure(recipe, storage):
    command = ["preflight", recipe(), "--profile", storage(), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["status"] for row in rows if "status" in row} <= {"pass", "warn", "skip", "fail"}
    assert rows[-1]["skip"] > 0 and rows[-1]["fail"] == 0 and rows[-1]["formula"].startswith("step = ")
    assert CliRunner().invoke(app, [*command, "--strict"]).exit_code == 1


def sizes(tmp_path, problems=8, conversations=5, **keys):
    """Return the check `sizes` of a recipe with files of this many problems and conversations; count is 5, a step has 8 problems."""
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(problems)]
    chats = [
        {"conversation_id": str(n), "source": "s", "messages": [{"role": "user", "content": "7 " * 100 * n}, REPLY]}
        for n in range(conversations)
    ]
    for name, lines in (("p", rows), ("c", chats)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    stage = {"name": "rl", "steps": 1, "problems": {"file": str(tmp_path / "p.jsonl")}}
    entry = {"file": str(tmp_path / "c.jsonl"), "count": 5, "exact": keys.pop("exact", False)}
    changes = {
        "sft": {"conversations": [entry], "max_tokens": keys.pop("max_tokens", 8192)},
        "stages": [stage],
        "rl.problems_per_step": 8,
        "evaluate.sets": {},
        **keys,
    }
    return recipe_checks.sizes(CheckContext(load_recipe("tiny_fast", changes), load_profile("laptop"), {}))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({}, None, "5 of 5 conversations; stages.rl.problems: 8 problems, 8 per step"),
        ({"problems": 3}, Warn, "stages.rl.problems: 3 problems for 8 per step"),
        ({"conversations": 4}, Warn, "4 of 5 conversations"),
        ({"conversations": 4, "exact": True}, UserError, "4 of 5 conversations, and its count is exact"),
    ],
)
def test_sizes_of_files_are_compared_with_what_the_recipe_asks_for(tmp_path, changes, error, text):
    if error is None:
        assert text in sizes(tmp_path, **changes)
        return
    with pytest.raises(error, match=text):
        sizes(tmp_path, **changes)


def test_problems_with_overlong_prompts_do_not_count(tmp_path, monkeypatch):
    make_model(tmp_path / "model")
    monkeypatch.setattr(recipe_checks, "MAX_PROMPT_TOKENS", 10)
    with pytest.raises(UserError, match="all 8 prompts are longer than 10 tokens"):
        sizes(tmp_path, model=str(tmp_path / "model"))


def test_conversations_that_are_too_long_do_not_count(tmp_path):
    make_model(tmp_path / "model")
    model = str(tmp_path / "model")
    assert "5 of 5 conversations" in sizes(tmp_path, model=model)
    with pytest.raises(Warn, match=r"3 of 5 conversations \(2 longer than sft.max_tokens left out\)"):
        sizes(tmp_path, model=model, max_tokens=600)
    with pytest.raises(UserError, match=r"0 of 5 conversations \(5 longer"):
        sizes(tmp_path, model=model, max_tokens=4)
