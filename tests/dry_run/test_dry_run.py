"""The dry run: its counts equal formulas where these are exact, and the code that runs is the trainers' own."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gpu
from rstar_lab.cli.preflight import app
from rstar_lab.common.errors import UserError
from rstar_lab.dry_run import run as dry_run_module
from rstar_lab.dry_run.local import fake_tensors, run_update
from rstar_lab.dry_run.meter import Collective, Meter
from rstar_lab.hardware.profiles import load_profile, profile_names
from rstar_lab.rl.overrides import RECIPES, load_recipe
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import KNOWN, architecture_of

GB = 1e9
# Peak of the first stage. To add a row: `rstar-lab preflight RECIPE --profile P --dry-run --json`.
PEAKS = json.loads(Path(__file__).with_name("dry_run_peaks.json").read_text())
RATES = (1e15, 1e12)
# The first as one_gpu for the local trainer, the others as h100x8.
SAME_MEMORY = ("one_gpu_24gb", "h100x8_local", "a100x8")


def dry_run(recipe, profile):
    return (SimpleNamespace(**row) for row in dry_run_module.dry_run_rows(recipe, profile))


def small(recipe: str, **changes):
    """Return a recipe of the tiny model, of which a dry run takes seconds."""
    return load_recipe(recipe, {"model": "tiny", "sft": None, **changes})


def test_memory_flops_and_kernels_of_a_matrix_product_are_exact():
    meter = Meter(RATES, vocabulary=7)
    with fake_tensors(meter):
        weight = torch.nn.Parameter(torch.empty(64, 128))
        meter.track(torch.nn.ParameterList([weight]))
        x = torch.empty(32, 64)
        meter.reset()
        meter.phase = "forward"
        y = x @ weight
        del y
        (x @ weight).sum().backward()
    assert meter.flops == 3 * 2 * 32 * 64 * 128
    weights, inputs, output = 64 * 128 * 4, 32 * 64 * 4, 32 * 128 * 4
    assert meter.peaks["forward"].total == weights + inputs + output + 512, "the first output was freed"
    assert meter.peaks["forward"].by_kind["parameters"] == weights
    assert meter.phase_kernels["forward"] == 3 and meter.peaks["backward"].by_kind["gradients"] == weights


@pytest.mark.parametrize(
    ("name", "times"), [("all_gather_into_tensor", 1), ("reduce_scatter_tensor", 1), ("all_reduce", 2)]
)
def test_a_ring_moves_a_buffer_once_and_that_of_an_all_reduce_twice(name, times):
    assert Collective("backward", name, ranks=4, inside=True).moved(8.0) == times * 6


def test_nothing_stays_patched_after_a_dry_run():
    before = (torch.UntypedStorage.resize_, torch.Tensor.backward)
    with pytest.raises(RuntimeError, match="stop"), fake_tensors(Meter(RATES, 7)):
        raise RuntimeError("stop")
    assert (torch.UntypedStorage.resize_, torch.Tensor.backward) == before
    assert torch.tensor(3).item() == 3 and not torch.tensor(0)


def test_an_update_of_the_local_trainer_holds_16_bytes_per_parameter():
    recipe = small("qwen3_1_7b_one_gpu", **{"rl.micro_batch_tokens": 8192, "engine.gpu_memory_utilization": 0.99})
    first, second = dry_run(recipe, load_profile("one_gpu"))
    assert (first.name, second.name, first.ranks) == ("one", "two", 1)
    kinds = first.phases["forward"]["by_kind_gb"]
    parameters = KNOWN["tiny"].parameters
    for kind, bytes_each in (("parameters", 4), ("gradients", 4), ("moments", 8)):
        assert kinds[kind] * GB == pytest.approx(bytes_each * parameters, rel=0.02)
    assert 0 < first.mfu_bound < 1 and first.update_s > 0 and not first.collectives
    assert max(first.engine_gb, first.with_margin_gb) < 80 and not first.fits, "engine and update hold memory together"


@pytest.mark.slow
def test_verls_engine_shards_over_all_ranks_and_reduces_between_nodes():
    recipe = small("qwen3_14b_mi300x")
    result = next(dry_run(recipe, load_profile("mi300x_8x8")))
    assert (result.trainer, result.ranks) == ("verl", 64)
    parameters = KNOWN["tiny"].parameters
    assert result.phases["forward"]["by_kind_gb"]["parameters"] * GB == pytest.approx(4 * parameters / 8, rel=0.1)
    hbm, share = 192, load_profile("mi300x_8x8").engine.memory_utilization
    kept = 12 * parameters / 8 / GB  # nothing is offloaded
    assert result.engine_gb == pytest.approx(share * hbm + kept, abs=0.01) and result.fits
    by_name = {(one["phase"], one["name"]): one for one in result.collectives}
    assert by_name["forward", "allgather"]["inside"] and by_name["backward", "reduce_scatter"]["ranks"] == 8
    assert not by_name["backward", "allreduce"]["inside"], "replicas are on different nodes"


@pytest.mark.slow
def test_the_command_prints_a_line_of_json_per_stage_and_refuses_a_laptop():
    arguments = ["qwen3_1_7b_one_gpu", "--dry-run", "--set", "model=tiny", "--json", "--profile"]
    result = CliRunner().invoke(app, [*arguments, "one_gpu"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["dry_run"] for row in rows] == ["one", "sft"] and result.exit_code == 0
    assert rows[0]["peak_gb"] < rows[0]["with_margin_gb"]
    result = CliRunner().invoke(app, [*arguments, "laptop"])
    assert isinstance(result.exception, UserError) or result.exit_code != 0


def test_heads_that_do_not_divide_among_the_gpus_are_an_error():
    profile = load_profile("h100x8")
    parallel = profile.parallelism.model_copy(update={"sequence_parallel": 4})
    with pytest.raises(
        UserError, match=r"sequence_parallel: 4 in profile h100x8 does not divide the 6 attention heads"
    ):
        next(dry_run(small("qwen3_14b_h100x8"), profile.model_copy(update={"parallelism": parallel})))


@pytest.mark.slow
def test_adapters_under_verl_are_the_only_gradients():
    recipe = small("qwen3_4b_lora_24gb")
    result = next(dry_run(recipe, load_profile("h100x8")))
    kinds = result.phases["optimizer"]["by_kind_gb"]
    shape, lora = KNOWN["tiny"], recipe.rl.lora
    adapters = estimate.lora_parameters(shape, lora)
    assert kinds["parameters"] * GB == pytest.approx(4 * (shape.parameters + adapters) / 8, rel=0.1)
    assert kinds["gradients"] * GB == pytest.approx(4 * adapters / 8, rel=0.15)


def test_precision_auto_is_that_of_the_gpu():
    keys = {"engine.dtype": "bfloat16", "rl.micro_batch_tokens": 8192, "stages.one.limits.max_response_tokens": 256}
    recipe = small("qwen3_1_7b_one_gpu", **keys, **{"rl.precision": "auto"})
    profile = load_profile("one_gpu")
    auto, bf16 = (
        next(dry_run(small("qwen3_1_7b_one_gpu", **keys, **{"rl.precision": each}), profile))
        for each in ("auto", "bf16")
    )
    assert recipe.settings(recipe.stages[0]).precision == "auto"
    assert auto.peak_gb == bf16.peak_gb and auto.update_s == bf16.update_s


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: f"{row['recipe']}-{row['profile']}")
def test_the_formula_of_preflight_agrees_with_the_dry_run(row):
    recipe, profile = load_recipe(row["recipe"]), load_profile(row["profile"])
    shape = architecture_of(recipe.model)
    if shape is None:
        pytest.skip(f"{recipe.model} is not on this machine")
    stage = next(stage for stage in recipe.stages if stage.name == row["stage"])
    formula = estimate.memory(shape, recipe, recipe.settings(stage), profile).training_peak
    assert formula == pytest.approx(row["peak_gb"], rel=0.1)


def test_every_recipe_has_a_dry_run_on_every_profile_with_gpus():
    """The training memory of the local trainer depends on the recipe alone, so `one_gpu` stands for all its profiles."""
    recipes = [path.stem for path in RECIPES.glob("*.yaml") if load_recipe(path.stem).stages]
    profiles = [name for name in profile_names() if load_profile(name).hardware.gpus and name not in SAME_MEMORY]
    assert len(profiles) == 3
    missing = {(recipe, profile) for recipe in recipes for profile in profiles} - {
        (row["recipe"], row["profile"]) for row in PEAKS
    }
    assert missing == {("smollm2_laptop", "h100x8")}, "its 9 heads do not divide among 2 GPUs"
    recipe = load_recipe("qwen3_1_7b_one_gpu")
    peaks = {
        estimate.memory(KNOWN["Qwen3-1.7B"], recipe, recipe.rl, load_profile(name)).training_peak
        for name in ("one_gpu", "one_gpu_24gb")
    }
    assert len(peaks) == 1


@pytest.mark.soak
@pytest.mark.parametrize("row", PEAKS, ids=lambda row: f"{row['recipe']}-{row['profile']}")
def test_the_table_of_peaks_is_that_of_the_dry_run(row):
    recipe = load_recipe(row["recipe"])
    if architecture_of(recipe.model) is None:
        pytest.skip(f"{recipe.model} is not on this machine")
    result = next(dry_run(recipe, load_profile(row["profile"])))
    assert result.name == row["stage"]
    assert result.peak_gb == pytest.approx(row["peak_gb"], rel=0.01)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "model"), [("0.5B", "Qwen2.5-0.5B"), ("1.7B", "Qwen3-1.7B"), ("4B", "Qwen3-4B")])
def test_the_stated_bounds_of_mfu_are_those_of_the_dry_run(size, model):
    profile, shape = load_profile("one_gpu"), KNOWN[model]
    rows, tokens = (1, gpu.TOKENS), gpu.ROLLOUTS * gpu.TOKENS
    recipe = small("qwen3_1_7b_one_gpu", model=model)
    meter = dry_run_module._meter(profile, shape)
    run_update(recipe, gpu.update_keys(gpu.TOKENS, "bf16"), shape, *rows, meter)
    result = dry_run_module._result("update", recipe, profile, shape, meter, rows, tokens, 1)
    assert 100 * result["mfu_bound"] == pytest.approx(gpu.MFU_BOUNDS[size], abs=1)
