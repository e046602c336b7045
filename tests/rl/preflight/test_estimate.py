"""Formulas of preflight: size of a model, memory and step time."""

import json

import pytest

from benchmarks.published import PUBLISHED, table
from rstar_lab.common.resources import resource_folder
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.rl.models.model import build_tiny, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import load_recipe, parse_recipe
from rstar_lab.rl.preflight import estimate, machine
from rstar_lab.rl.preflight.context import KNOWN, CheckContext, NotNeeded, Warn, architecture_of
from rstar_lab.rl.recipe import EngineSection, Recipe, RlSection
from rstar_lab.rl.renderers.formats import render_prompt

pytestmark = pytest.mark.slow


def test_the_papers_model_has_its_known_size_and_cache():
    model = KNOWN["Qwen3-14B"]
    assert model.parameters == model.active_parameters == pytest.approx(14.77e9, rel=0.002)
    assert model.kv_bytes() == 2 * 40 * 8 * 128 * 2


def test_a_mixture_of_experts_has_its_known_total_and_active_size():
    model = KNOWN["Qwen3-30B-A3B"]
    assert model.parameters == pytest.approx(30.5e9, rel=0.01)
    assert model.active_parameters == pytest.approx(3.35e9, rel=0.02)


def test_a_models_size_is_read_from_its_folder(tmp_path):
    tokenizer = train_tokenizer([render_prompt("?")], 600)
    model = build_tiny(tokenizer, seed=0, layers=2)
    save_model(tmp_path, model, tokenizer)
    shape = architecture_of(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.positions == model.config.max_position_embeddings


def test_step_time_grows_with_length_and_oversampling():
    model, profile = KNOWN["Qwen3-14B"], load_profile("mi300x_8x8")
    base = estimate.step_time(model, RlSection(), profile)
    longer = estimate.step_time(model, RlSection(limits={"max_response_tokens": 16384}), profile)
    assert longer.generation > 2 * base.generation, "twice the tokens, with more cache to read each"
    plain = estimate.step_time(model, RlSection(method={"roc": {"rule": "none"}}), profile)
    assert plain.update == base.update, "G of each group are trained on, with RoC and without"
    assert base.generation / 2 <= plain.generation < base.generation, (
        "RoC rolls out twice as many; reading weights is shared"
    )
    assert estimate.step_time(model, RlSection(old_log_probs="engine"), profile).old_log_probs == 0


def with_parallelism(profile, **changes):
    return profile.model_copy(update={"parallelism": profile.parallelism.model_copy(update=changes)})


def test_communication_is_smaller_when_shards_stay_inside_a_node():
    model, profile = KNOWN["Qwen3-14B"], load_profile("mi300x_8x8")
    hybrid = estimate.step_time(model, RlSection(), profile)
    full = estimate.step_time(model, RlSection(), with_parallelism(profile, fsdp_size=-1))
    assert full.communication > 3 * hybrid.communication > 0
    assert full.update - hybrid.update > 0 and full.generation == hybrid.generation
    # By hand: 64 ranks, 8192 x (500 + 3686) tokens in micro-batches of 16,384 are 33; each moves 8 bytes per parameter.
    measured = profile.measured
    collectives = 33 * 8 * model.parameters * 63 / 64 / (measured.network_gb_per_s * 1e9)
    compute = (
        full.update
        - estimate.exposed_communication(model, RlSection(), with_parallelism(profile, fsdp_size=-1), (1e9, 1e9))[1]
    )
    exposed = estimate.exposed_communication(model, RlSection(), with_parallelism(profile, fsdp_size=-1), (0, compute))[
        1
    ]
    assert exposed == pytest.approx(collectives - min(measured.overlap * collectives, compute), rel=0.01)
    one_gpu = load_profile("one_gpu")
    assert estimate.step_time(KNOWN["Qwen3-1.7B"], RlSection(), one_gpu).communication == 0


def test_the_lora_recipe_fits_24_gb_and_full_training_does_not():
    profile = load_profile("one_gpu_24gb")
    loaded = load_recipe("qwen3_4b_lora_24gb", {}, profile)
    rl, shape = loaded.settings(loaded.stages[0]), KNOWN["Qwen3-4B"]
    adapters = estimate.memory(shape, loaded, rl, profile)
    assert adapters.fits and adapters.peak == pytest.approx(21.5, abs=0.1)
    assert adapters.training_state * 1e9 == 2 * shape.parameters + 16 * estimate.lora_parameters(shape, rl.lora)
    everything = estimate.memory(shape, loaded, rl.model_copy(update={"lora": None}), profile)
    assert not everything.fits and everything.peak == pytest.approx(86.0, abs=0.1)
    longer = load_recipe("qwen3_4b_lora_24gb", {"evaluate.max_response_tokens": 8192}, profile)
    memory = estimate.memory(shape, longer, rl, profile)
    assert memory.peak == adapters.peak and not memory.fits, "vLLM does not start: an evaluation exceeds its KV cache"


def test_local_trainer_adds_engine_and_training_memory():
    model, profile = KNOWN["Qwen3-1.7B"], load_profile("one_gpu")
    rl = RlSection(limits={"max_response_tokens": 4096}, gradient_checkpointing=True, micro_batch_tokens=16_384)
    recipe = Recipe(model="-", engine=EngineSection(gpu_memory_utilization=0.4))
    need = estimate.memory(model, recipe, rl, profile)
    assert need.together and need.peak == pytest.approx(need.training_peak + 0.4 * 80)
    assert need.fits
    greedy = estimate.memory(model, Recipe(model="-", engine=EngineSection(gpu_memory_utilization=0.85)), rl, profile)
    assert not greedy.fits, "each of the two fits, both together do not"
    assert max(greedy.training_peak, greedy.rollout_peak) < greedy.hbm


def test_predictions_are_within_a_factor_of_three_of_published_steps():
    for case in PUBLISHED:
        step = case.predict()
        assert 1 / 3 < step.total / case.step < 3, case.name
        assert 1 / 3 < (step.generation + step.tail) / case.rollout < 3, case.name


def test_the_table_of_the_docs_is_the_one_that_the_code_computes():
    page = (resource_folder("cluster").parent / "docs" / "verl.md").read_text()
    assert table() in page


def test_old_log_probs_cost_a_pass_unless_the_update_has_them():
    model, recipe = KNOWN["Qwen3-1.7B"], load_recipe("qwen3_1_7b_one_gpu")
    rl, profile = recipe.settings(recipe.stages[0]), load_profile("one_gpu")
    two, verl = rl.model_copy(update={"mini_batches": 2}), profile.model_copy(update={"trainer": "verl"})
    assert estimate.step_time(model, rl, profile, recipe).old_log_probs == 0
    assert estimate.step_time(model, two, profile, recipe).old_log_probs > 0
    assert estimate.step_time(model, rl, verl, recipe).old_log_probs > 0


def test_a_checkpoint_counts_what_is_written():
    """verl writes fp32 weights, two moments and an fp32 export, each once; the local trainer no second copy."""
    model, rl = KNOWN["Qwen3-14B"], RlSection()
    assert estimate.checkpoint_bytes(model, rl, "verl") == 16 * model.parameters
    assert estimate.checkpoint_bytes(model, rl, "local") == 12 * model.parameters
    lora = RlSection(lora={"rank": 32})
    assert estimate.checkpoint_bytes(model, lora, "local") < 3 * model.parameters
    recipe = load_recipe("qwen3_14b_mi300x")
    checkpoints, _ = estimate.disk_bytes(model, recipe)
    assert checkpoints == (recipe.rl.keep_checkpoints + 1) * 16 * model.parameters


def test_a_laptop_says_what_fits_and_how_long(tmp_path):
    """A pretrained model on a profile without GPUs has an estimate of memory and time; before, both said nothing."""
    config = {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49_152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = {
        "model": str(tmp_path), "sft": {"problems": {"synthetic": {"count": 128}}}, "engine": {"count": 1},
        "rl": {"problems_per_step": 4, "group_size": 8, "limits": {"max_response_tokens": 256}},
        "stages": [{"name": "a", "steps": 10, "problems": {"synthetic": {"count": 9}}}],
    }  # fmt: skip

    def checks(**changes):
        context = CheckContext(parse_recipe(data | {"name": "r"} | changes), load_profile("laptop"), {})
        return estimate.cpu_memory(context), machine.duration(context)

    message, (duration, numbers) = checks()
    assert "of 8 GB" in message and 3 < float(message.split()[1]) < 8
    (stage,) = numbers["stages"]
    assert "SFT " in duration and stage["steps"] == 10 and 0 < 10 * stage["step_s"] < numbers["hours"] * 3600
    filtered = data["stages"][0] | {"filter": {"samples": 4}}
    evaluate = {"sets": {"held": {"synthetic": {"count": 20}}}, "samples": 2, "during": {"every": 5}}
    parts = checks(stages=[filtered], evaluate=evaluate)[1][1]["parts_h"]
    assert (
        parts["filter of stage a"] > 0 and parts["evaluation (3 times)"] > 0 < parts["evaluation during RL (2 times)"]
    )
    with pytest.raises(Warn, match=r"does not fit; set engine\.count=1, processes=1"):
        checks(processes=2)
    assert "does not fit" not in checks(sft=None, rl=data["rl"] | {"lora": {"rank": 8}})[0]
    with pytest.raises(NotNeeded):
        checks(model="tiny")


def test_the_time_of_a_job_includes_sft_filters_and_evaluations(tmp_path):
    model, profile = KNOWN["Qwen3-14B"], load_profile("mi300x_8x8")
    file = tmp_path / "42k.jsonl"
    file.write_text("".join(f'{{"question": "q{i}", "answer": "1"}}\n' for i in range(600)))
    changes = {f"stages.{number}.problems.file": str(file) for number in range(3)}
    recipe = load_recipe("qwen3_14b_mi300x", {**changes, "evaluate.during.every": 100})
    found, missing = estimate.other_time(recipe, estimate.gpu_costs(model, recipe, profile))
    conversations = sum(entry.count for entry in recipe.sft.conversations)
    seconds = 4 * model.forward_flops(600, 600) * 3 * conversations / (64 * profile.hardware.bf16_tflops * 1e12)
    assert conversations == 222_000
    assert found["SFT"] == pytest.approx(seconds / profile.measured.training_mfu)
    # The filter generates as many rollouts as a step of this size, with the same limit.
    rl = recipe.settings(recipe.stages[2]).model_copy(update={"problems_per_step": 600, "group_size": 8})
    plain = rl.model_copy(
        update={"method": rl.method.model_copy(update={"roc": rl.method.roc.model_copy(update={"rule": "none"})})}
    )
    step = estimate.step_time(model, plain, profile, recipe)
    assert found["filter of stage three"] == pytest.approx(step.generation + step.tail, rel=0.01)
    assert found["evaluation (5 times)"] > 0 < found["evaluation during RL (5 times)"] and not missing
    bare = load_recipe("qwen3_14b_mi300x")
    found, missing = estimate.other_time(bare, estimate.gpu_costs(model, bare, profile))
    assert "filter of stage three" not in found and "filter of stage three (" in missing[0]


def test_the_local_trainer_holds_the_reference_of_a_kl_term():
    model, profile, recipe = KNOWN["Qwen3-1.7B"], load_profile("one_gpu"), Recipe(model="-")
    peaks = [
        estimate.memory(model, recipe, RlSection(method={"kl_coefficient": kl}), profile).training_peak
        for kl in (0.0, 0.1)
    ]
    assert (peaks[1] - peaks[0]) * 1e9 == pytest.approx(4 * model.parameters)
