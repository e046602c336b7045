"""Tests of the verl adapters without verl's training: mini-batches, learning rate, configuration keys, SFT batches, resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from helpers.architectures import tiny_architecture
from helpers.cases import read_cases
from helpers.trajectories import trajectory
from hydra.core.override_parser.overrides_parser import OverridesParser
from verl.utils.seqlen_balancing import calculate_workload
from verl.utils.torch_functional import get_cosine_schedule_with_warmup

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import load_profile, profile_names
from rstar_lab.rl.algorithm.selection import Selection, cut_mini_batches
from rstar_lab.rl.overrides import load_recipe, parse_recipe
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import SftConfig
from rstar_lab.rl.renderers.conversations import Example
from rstar_lab.rl.training.sft import iterate_batches, lr_scale
from rstar_lab.rl.verl.config import as_arguments, compose, overrides, sft_overrides, split_overrides
from rstar_lab.rl.verl.hooks import StageSchedule
from rstar_lab.rl.verl.objective import order_rows, rows_of_mini_batches
from rstar_lab.rl.verl.settings import Settings, has_steps_left, model_before, stages_of
from rstar_lab.rl.verl.sft_trainer import Batches
from rstar_lab.rl.verl.train import drop_overlong, environment, require_sandbox_service, run_part, secrets_file
from rstar_lab.rl.verl.trainer import _peak_memory
from rstar_lab.rl.verl.unsupported import check, check_architecture, unsupported_sft_options
from rstar_lab.runs.writer import RunWriter

pytestmark = pytest.mark.slow

CASES = read_cases(__file__)
RL = {"problems_per_step": 4, "group_size": 2, "checkpoint_every": 1}


def recipe_of(stages=({},), **rl):
    stages = [
        {"name": f"s{number}", "problems": {"synthetic": {"count": 4}}, "steps": 5} | stage
        for number, stage in enumerate(stages)
    ]
    return parse_recipe({"name": "v", "model": "/models/m", "rl": RL | rl, "stages": stages})


def keys_of(tmp_path, profile="laptop", extra=None, stages=({},), **rl):
    (settings, *_) = stages_of(recipe_of(stages, **rl), tmp_path)
    return overrides(settings, load_profile(profile), tmp_path / "model", extra)


# Mini-batches


def assign(count, parts):
    """Return the mini-batch of each of `count` rollouts."""
    selection = Selection.of([trajectory(i, 2, 4) for i in range(count)], [1.0] * count)
    numbers = [
        (i, number) for number, batch in enumerate(cut_mini_batches(selection, parts) if count else []) for i in batch
    ]
    return [number for _, number in sorted(numbers)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("real", [0, 1, 7, 24])
def test_mini_batches_over_all_ranks_equal_the_local_trainers(ranks, parts, real):
    number_of: list[int | None] = [*assign(real, parts), *[None] * (24 - real)]
    order = order_rows(number_of, ranks, parts)
    assert sorted(order) == list(range(24))
    bounds = np.linspace(0, real, max(min(parts, real), 1) + 1).astype(int)  # as in Learner.update
    batches = rows_of_mini_batches(24, ranks, parts)
    for part, positions in enumerate(batches):
        rows = sorted(order[i] for i in positions if number_of[order[i]] is not None)
        assert rows == (list(range(*bounds[part : part + 2])) if part + 1 < len(bounds) else [])
    # verl gives each rank a slice of the batch and cuts the slice into parts.
    slices = torch.arange(24).chunk(ranks)
    for part, positions in enumerate(batches):
        assert sorted(positions) == sorted(int(i) for own in slices for i in own.chunk(parts)[part])
        shares = [sum(number_of[order[int(i)]] is not None for i in own.chunk(parts)[part]) for own in slices]
        assert max(shares) - min(shares) <= 1, "the ranks share the real rows evenly"


@pytest.mark.parametrize(
    ("groups", "ranks", "parts"),
    [(128, 4, 1), (512, 64, 1), (512, 64, 4), (120, 4, 2), (16, 16, 2), (24, 16, 3), (39, 8, 6)],
)
@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_ranks_get_equal_work_if_groups_have_different_lengths(groups, ranks, parts, kept):
    rng = np.random.default_rng(0)
    typical = rng.normal(np.log(3000), 0.5, groups)
    lengths = np.minimum(np.exp(typical[:, None] + rng.normal(0, 0.4, (groups, 16))), 8192).astype(int).reshape(-1)
    rows, real = len(lengths), int(len(lengths) * kept)
    lengths[real:] = 1  # padding
    number_of: list[int | None] = [*assign(real, parts), *[None] * (rows - real)]
    workloads = calculate_workload(torch.tensor(lengths)).tolist()
    order = order_rows(number_of, ranks, parts, workloads)
    assert sorted(order) == list(range(rows))
    for part, positions in enumerate(rows_of_mini_batches(rows, ranks, parts)):
        own = [order[i] for i in positions]
        assert {row for row in own if number_of[row] is not None} == {r for r, n in enumerate(number_of) if n == part}
        work = np.array([workloads[row] for row in own]).reshape(ranks, -1).sum(1)
        assert work.max() / work.mean() < 1.05


# Learning rate


def optimizer_of(lr, decay=0.1):
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr, weight_decay=decay)


def rates(optimizer, schedule, count):
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_resumed_stage_continues_its_schedule_and_a_new_one_restarts():
    before = optimizer_of(1.0)
    schedule = StageSchedule(before, num_warmup_steps=4)
    rates(before, schedule, 2)
    resumed = optimizer_of(1.0)
    again = StageSchedule(resumed, num_warmup_steps=4)
    resumed.load_state_dict(before.state_dict())  # the order in which verl loads the states
    again.load_state_dict(schedule.state_dict())
    assert rates(resumed, again, 3) == [0.75, 1, 1]
    new = optimizer_of(0.1, decay=0.5)
    fresh = StageSchedule(new, num_warmup_steps=2)
    new.load_state_dict(before.state_dict())
    assert rates(new, fresh, 3) == pytest.approx([0.05, 0.1, 0.1])
    assert new.param_groups[0]["weight_decay"] == 0.5


# Keys


@pytest.mark.parametrize(("rl", "words"), CASES["unsupported"])
def test_unsupported_options_are_errors_that_name_the_key(rl, words):
    with pytest.raises(UserError, match=words):
        check(recipe_of(**rl))
    check(recipe_of())


def test_lora_keys_are_verls(tmp_path):
    found = keys_of(tmp_path, lora={"rank": 8, "targets": ["q_proj"]}, method={"kl_coefficient": 0.1})
    names = ("lora_rank", "lora_alpha", "target_modules")
    assert [found[f"actor_rollout_ref.model.{name}"] for name in names] == [8, 16, ["q_proj"]]
    assert not any("lora" in key for key in keys_of(tmp_path))
    recipe = recipe_of(stages=({}, {}), lora={"rank": 8}, method={"kl_coefficient": 0.1})
    with pytest.raises(UserError, match=r"stages\.s1: method.kl_coefficient with rl\.lora"):
        check(recipe)


def test_recipe_options_are_translated_to_verl_keys(tmp_path):
    found = keys_of(
        tmp_path,
        correction={"type": "tis", "bounds": [0, 3.0]},
        method={"kl_coefficient": 0.2, "loss": "clip_cov"},
        schedule={"dynamic_sampling": 2},
        gradient_checkpointing=True,
        warmup_steps=7,
    )
    assert not any(key.startswith("algorithm.rollout_correction") for key in found), "the trainer applies it"
    assert found["actor_rollout_ref.actor.use_kl_loss"] and found["actor_rollout_ref.actor.kl_loss_coef"] == 0.2
    assert found["data.gen_batch_size"] == 1, "verl fetches new groups one by one"
    assert found["actor_rollout_ref.model.enable_gradient_checkpointing"] is True
    assert found["actor_rollout_ref.actor.optim.lr_warmup_steps"] == 7
    found = keys_of(tmp_path, old_log_probs="engine")
    assert found["algorithm.rollout_correction.bypass_mode"] is True
    bf16, fp32 = (keys_of(tmp_path, "h100x8", precision=precision) for precision in ("auto", "fp32"))
    for name in (f"+actor_rollout_ref.{model}.fsdp_config.mixed_precision" for model in ("actor", "ref")):
        assert name not in bf16 and fp32[name]["param_dtype"] == "fp32"


def test_mode_async_selects_verls_asynchronous_trainer_and_fixes_its_keys(tmp_path):
    assert keys_of(tmp_path)["trainer.v1.trainer_mode"] == "rstar"
    found = keys_of(tmp_path, schedule={"type": "async", "max_staleness": 3}, correction={"type": "geo_mask"})
    assert found["trainer.v1.trainer_mode"] == "rstar_colocate_async"
    assert found["trainer.v1.sampler.custom_sampler.name"] == "RocReplayBufferAsync"
    assert found["data.gen_batch_size"] == 1, "groups start one by one"
    for key, words in CASES["fixed keys"].items():
        with pytest.raises(UserError, match=words):
            keys_of(tmp_path, extra={key: 1})
    others = {"actor_rollout_ref.rollout.nnodes": 1, "trainer.validation_data_dir": "x", "trainer.n_gpus_per_node": 2}
    assert others.items() <= keys_of(tmp_path, extra=others).items()


def test_console_logger_is_kept_and_group_filters_are_rejected(tmp_path):
    assert keys_of(tmp_path)["trainer.logger"] == ["console"]
    _, verls = split_overrides({"verl.trainer.logger": ["wandb"], "rl.lr": 1})
    assert keys_of(tmp_path, extra=verls)["trainer.logger"] == ["console", "wandb"]
    with pytest.raises(UserError, match=r"verl\.algorithm\.filter_groups\.enable.*rl\.schedule\.dynamic_sampling"):
        keys_of(tmp_path, extra={"algorithm.filter_groups.enable": True})


@pytest.mark.parametrize("text", ["it's {odd}: [a, b] $more", 'a "b" \\n', "C:\\", "\\'", "\\\\'x", "", "two\nlines\n"])
def test_strings_are_quoted_for_hydra(text):
    value = {"text": text, "list": [text, 1, 2.5, True, None]}
    (parsed,) = OverridesParser.create().parse_overrides(as_arguments({"+key": value}))
    assert parsed.value() == value


# SFT


@pytest.mark.slow
def test_sft_learning_rates_equal_the_local_trainers_on_all_profiles(tmp_path):
    sft = {"conversations": [{"file": "c.jsonl"}], "lr": 0.5, "warmup": 0.2, "batch_size": 64, "max_tokens": 9000}
    sft |= {"lora": {"rank": 8, "targets": ["q_proj"]}}
    recipe = parse_recipe({"model": "/models/m", "sft": sft})
    for profile in profile_names():
        keys = sft_overrides(recipe.sft, load_profile(profile), tmp_path / "base", tmp_path, 20)
        config = compose(keys, "sft_trainer_engine")
        assert config.data.max_token_len_per_gpu * config.engine.ulysses_sequence_parallel_size >= 9000
        assert config.data.train_batch_size == 64 and config.optim.lr == 0.5
        assert (config.model.lora_rank, config.model.lora_alpha, config.model.target_modules) == (8, 16, ["q_proj"])
    optimizer = optimizer_of(0.5)
    schedule = get_cosine_schedule_with_warmup(
        optimizer, config.optim.lr_warmup_steps, 20, zero_indexed_step=config.optim.zero_indexed_step
    )
    expected = [0.5 * lr_scale(n, 20, recipe.sft) for n in range(1, 21)]
    *found, last = rates(optimizer, schedule, 20)
    assert found == pytest.approx(expected[:-1])
    assert last == 0.0 < expected[-1] < 0.01 * expected[0], "verl's last step changes nothing"


@pytest.mark.slow
def test_sft_batches_equal_the_local_trainers_also_after_a_resume():
    examples = [Example([n] * (n % 5 + 2), [False] + [True] * (n % 5 + 1)) for n in range(10)]
    config = SftConfig(epochs=2, batch_size=4)
    all_batches = Batches(examples, config, 4)
    seen = []
    for (_, expected), batch in zip(iterate_batches(examples, config, range(1, 7)), all_batches, strict=True):
        ids, masks = (list(batch[name].unbind()) for name in ("input_ids", "loss_mask"))
        assert len(ids) == 4
        assert [row.tolist() for row in ids[: len(expected)]] == [example.ids for example in expected]
        assert [row.tolist() for row in masks[: len(expected)]] == [example.mask for example in expected]
        assert not any(mask.any() for mask in masks[len(expected) :])
        seen.append([row.tolist() for row in ids])
        if len(seen) == 3:  # the end of an epoch
            all_batches.history = [{"step": 1}, {"step": 2}, {"step": 3}]
            again = Batches(examples, config, 4)
            again.load_state_dict(all_batches.state_dict())
    assert (
        len(all_batches) == 6 and [[row.tolist() for row in batch["input_ids"].unbind()] for batch in again] == seen[3:]
    )


@pytest.mark.parametrize(("name", "accepted"), [("Qwen3", True), ("Gemma3", True), ("Qwen3_5", False), ("Lfm2", False)])
def test_models_with_a_state_are_refused_by_name(tmp_path, name, accepted):
    tiny_architecture(name).save_pretrained(tmp_path)
    if accepted:
        check_architecture(tmp_path)
    else:
        with pytest.raises(UserError, match=f"{name.lower()}.* has layers with a state"):
            check_architecture(tmp_path)


def test_unsupported_sft_options_are_errors_that_name_the_key():
    sft = {"conversations": [{"file": "c.jsonl"}], "optimizer": "muon", "schedule": "linear_tail"}
    muon, schedule = unsupported_sft_options(parse_recipe({"model": "m", "sft": sft}))
    assert muon.startswith("sft.optimizer: muon") and schedule.startswith("sft.schedule: linear_tail")
    assert unsupported_sft_options(parse_recipe({"model": "m", "sft": {"conversations": sft["conversations"]}})) == []


# Secrets


def test_the_secrets_file_is_private_and_deleted_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(KeyboardInterrupt), secrets_file(load_profile("h100x8"), tmp_path) as variables:
        (path,) = map(Path, variables.values())
        assert json.loads(path.read_text())["WANDB_API_KEY"] == "abc123secret" and "HF_TOKEN" not in path.read_text()
        assert path.stat().st_mode & 0o077 == 0
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("WANDB_API_KEY")
    path.write_text("left by a run that was killed")
    with secrets_file(load_profile("h100x8").model_copy(update={"secrets": []}), tmp_path) as variables:
        assert variables == {} and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_process_that_imports_verl_has_the_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("RSTAR_LAB_SANDBOX_TOKEN", "token-of-this-job")
    profile = load_profile("laptop").model_copy(update={"secrets": []})  # the sandbox's token is passed in any case
    with secrets_file(profile, tmp_path) as variables:
        monkeypatch.delenv("RSTAR_LAB_SANDBOX_TOKEN")
        code = "import verl, os; print(os.environ['RSTAR_LAB_SANDBOX_TOKEN'])"
        everything = os.environ | environment(profile, tmp_path) | variables
        done = subprocess.run([sys.executable, "-c", code], env=everything, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["token-of-this-job"], done.stderr


# Resume


def make_run(tmp_path, steps, checkpoint, stages=("s0",), **lines):
    """Write a run like verl's: metrics in the store and a checkpoint of a step."""
    run_dir = tmp_path / "v-rl"
    with RunWriter.open(tmp_path, "v-rl", kind="train", recipe={}, seed=0) as writer:
        for step in range(1, steps + 1):
            stage = stages[min(len(stages) - 1, (step - 1) // 2)]
            writer.write_step(stage, step, trajectories=[], calls=[], transcripts=[], metrics=lines)
    folder = run_dir / "verl" / f"global_step_{checkpoint}"
    folder.mkdir(parents=True)
    state = {"step": checkpoint, "stage": 0, "stage_step": 0, "position": 0, "retired": [], "finished": False}
    (folder / "trainer.json").write_text(json.dumps(state))
    (run_dir / "verl" / "latest_checkpointed_iteration.txt").write_text(str(checkpoint))
    return run_dir


HAND_OFF = {"hand_off": {"solved_groups": 0.9, "window": 2}}


def test_a_stage_that_ended_early_is_finished_and_the_next_follows(tmp_path):
    recipe = recipe_of([HAND_OFF, {}])
    first, second = stages_of(recipe, tmp_path)
    assert (first.first_step, second.first_step) == (1, 6) and has_steps_left(first)
    run_dir = make_run(tmp_path, 2, 2, solved_groups=1.0)
    first, second = stages_of(recipe, tmp_path)
    assert not has_steps_left(first) and has_steps_left(second) and second.first_step == 3
    start = tmp_path / "start"
    assert model_before(first, start) == start
    assert model_before(second, start) == run_dir / "verl" / "global_step_2" / "actor" / "huggingface"
    (run_dir / "stages" / "s0").mkdir(parents=True)
    assert model_before(second, start) == run_dir / "stages" / "s0"


def test_steps_after_the_last_checkpoint_do_not_count(tmp_path):
    make_run(tmp_path, 2, 1, solved_groups=1.0)
    first, second = stages_of(recipe_of([HAND_OFF, {}]), tmp_path)
    assert has_steps_left(first) and second.first_step == 6


def test_a_new_stage_keeps_or_resets_the_optimizer_but_not_the_rate(tmp_path):
    make_run(tmp_path, 5, 5)
    name = "actor_rollout_ref.actor.checkpoint.load_contents"
    for reset, contents in ((False, ["model", "optimizer"]), (True, ["model"])):
        _, second = stages_of(recipe_of([{}, {"reset_optimizer": reset}]), tmp_path)
        assert overrides(second, load_profile("laptop"), tmp_path)[name] == contents
    first, _ = stages_of(recipe_of([{"steps": 9}, {}]), tmp_path)
    assert name not in overrides(first, load_profile("laptop"), tmp_path)


def test_a_cluster_run_without_its_sandbox_service_is_an_error():
    profile, recipe = load_profile("mi300x_8x8"), recipe_of()
    with pytest.raises(UserError, match=r"sandbox\.url: local, but profile mi300x_8x8 has sandbox.redis"):
        require_sandbox_service(recipe, profile)
    require_sandbox_service(recipe, load_profile("laptop"))
    served = recipe.model_copy(update={"sandbox": recipe.sandbox.model_copy(update={"url": "http://box:8088"})})
    require_sandbox_service(served, profile)


def test_problems_with_overlong_prompts_are_left_out_of_a_stage(memorized_model, tmp_path, capsys):
    questions = {"a": "short", "b": "long " * 4000}
    write_problems(
        tmp_path / "p.jsonl", [Problem(problem_id=name, question=q, answer="1") for name, q in questions.items()]
    )
    recipe = load_recipe("release_dapo", {"stages.0.problems.file": str(tmp_path / "p.jsonl"), "evaluate.sets": {}})
    settings = Settings(recipe, recipe.stages[0], "r", tmp_path, 1)
    drop_overlong(settings, memorized_model[0])
    assert [problem.problem_id for problem in settings.pool] == ["a"]
    assert "stages.dapo.problems: 1 of 2 are left out" in capsys.readouterr().out
    again = Settings(recipe, recipe.stages[0], "r", tmp_path, 1)
    drop_overlong(again, memorized_model[0])
    assert [problem.problem_id for problem in again.problems] == ["a"], "the same problems in every process"


def test_a_measured_peak_has_one_name_under_both_trainers():
    assert _peak_memory({}) is _peak_memory({"actor/perf/max_memory_allocated_gb": 0.0}) is None
    assert _peak_memory({"actor/perf/max_memory_allocated_gb": 40.0}) == pytest.approx(42.95, abs=0.01)


def test_the_commands_of_a_job_choose_the_platform_before_verl_does():
    """verl selects its platform when it is imported, from variables that these modules set."""
    script = "import sys, rstar_lab.rl.verl.sft, rstar_lab.rl.verl.train; sys.exit('verl' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("code", "attempts"), [(2, 1), (3, 3)])
def test_an_error_of_the_user_is_not_tried_again(tmp_path, code, attempts):
    program = f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); raise SystemExit({code})"
    with pytest.raises(typer.Exit) as end:
        run_part("SFT", [sys.executable, "-c", program], 3)
    assert end.value.exit_code == code and (tmp_path / "tries").read_text() == "x" * attempts
