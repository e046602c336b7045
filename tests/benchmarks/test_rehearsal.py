"""The rehearsal: its shrink rule, its list of keys, its report; complete rehearsals in `make test-all`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from benchmarks.rehearsal.coverage import all_keys, coverage
from benchmarks.rehearsal.data import read_weights, write_data
from benchmarks.rehearsal.job import RehearsalJob
from benchmarks.rehearsal.key_reads import recorded_reads, recording
from benchmarks.rehearsal.run import WORKERS, Rehearsal, RehearsalReport
from benchmarks.rehearsal.shrink import reads_folder, shrink_profile, shrink_recipe
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import alive
from rstar_lab.hardware.profiles import load_profile, profile_names
from rstar_lab.jobs import local
from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.overrides import RECIPES, load_recipe
from rstar_lab.rl.preflight.run import Status, preflight
from rstar_lab.rl.training.stages import stage_model

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
ALGORITHM_KEYS = (
    "method", "correction", "schedule", "prompt", "limits.max_turns", "temperature", "lr", "warmup_steps", "mini_batches",
    "old_log_probs", "reward", "tools",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_small_recipe_keeps_stages_and_algorithm(name, tmp_path):
    recipe = load_recipe(name)
    small = shrink_recipe(recipe, tmp_path)
    assert [stage.name for stage in small.stages] == [stage.name for stage in recipe.stages]
    for before, after in zip(recipe.stages, small.stages, strict=True):
        for key in ALGORITHM_KEYS:
            assert attrgetter(key)(small.settings(after)) == attrgetter(key)(recipe.settings(before)), key
        assert (before.filter is None, before.hand_off is None) == (after.filter is None, after.hand_off is None)
        assert before.reset_optimizer == after.reset_optimizer
        settings = small.settings(after)
        assert settings.problems_per_step % settings.mini_batches == 0
        assert settings.problems_per_step * settings.group_size % 2 == 0, "two ranks"
    limits = [small.settings(stage).limits.max_response_tokens for stage in small.stages]
    assert not limits or min(limits) == 96
    assert set(small.evaluate.sets) == set(recipe.evaluate.sets)


@pytest.mark.parametrize("name", profile_names())
def test_small_profile_keeps_trainer_and_sandbox_with_two_ranks_under_verl(name, tmp_path):
    profile = load_profile(name)
    small = shrink_profile(profile, tmp_path)
    assert small.trainer == profile.trainer and small.sandbox.redis == profile.sandbox.redis
    assert small.hardware.nodes == (2 if profile.trainer == "verl" else 1) and small.hardware.gpus == 0
    assert set(profile.env) <= set(small.env)
    if profile.trainer == "verl":
        assert small.parallelism.sequence_parallel == min(2, profile.parallelism.sequence_parallel)
        assert small.parallelism.fsdp_size == (1 if profile.parallelism.fsdp_size > 0 else -1)


def every_field(recipe, profile):
    """Return the fields of all keys, as if a job had read each."""
    return {name for fields in all_keys(recipe, profile).values() for names in fields for name in names}


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_either_covered_or_listed_with_a_reason(name, profile):
    recipe, machine = load_recipe(name), load_profile(profile)
    covered, missing = coverage(recipe, machine, every_field(recipe, machine))
    named = [line.partition(": ")[0] for line in missing]
    assert sorted([*covered, *named]) == sorted(all_keys(recipe, machine))
    assert not [line for line in missing if "read it" in line]
    assert {"rl.method.clip_low", "runs"} <= set(covered)
    assert coverage(recipe, machine, set())[0] == [], "nothing was executed"


def test_a_key_that_no_process_reads_is_listed():
    recipe, profile = load_recipe("qwen3_14b_mi300x"), load_profile("mi300x_8x8")
    reads = every_field(recipe, profile) - {"Grpo.clip_low", "Method.clip_low", "EvaluateSection.sets"}
    covered, missing = coverage(recipe, profile, reads)
    listed = {
        line.partition(": ")[0] for line in missing if line.endswith("no process of the job read it (trainer verl)")
    }
    assert "rl.method.clip_low" in listed and "rl.method.clip_high" in covered
    assert "evaluate.sets.aime24.file" in listed, "its file was read for training only"
    assert "stages.one.problems.file" in covered


def test_keys_that_the_dry_run_executes_are_covered():
    recipe, profile = load_recipe("qwen3_14b_mi300x"), load_profile("mi300x_8x8")
    every = every_field(recipe, profile)
    before, _ = coverage(recipe, profile, every)
    covered, missing = coverage(recipe, profile, every, every)
    assert set(covered) - set(before) == {
        "profile.hardware.gpus_per_node", "profile.hardware.hbm_gb", "profile.hardware.hbm_tb_per_s",
        "profile.hardware.bf16_tflops", "profile.measured.link_gb_per_s", "profile.measured.network_gb_per_s", "rl.precision",
        "sft.precision", "engine.gpu_memory_utilization", "engine.dtype", "profile.engine.dtype", "profile.engine.memory_utilization",
    }  # fmt: skip
    assert any(line.startswith("profile.engine.tensor_parallel: ") for line in missing)
    covered, _ = coverage(recipe, profile, every, every - {"RlSection.precision"})
    assert "rl.precision" not in covered, "the dry run did not read it"


@pytest.mark.slow
def test_the_dry_run_of_a_rehearsal_records_what_it_reads(tmp_path):
    keys = {"model": "tiny", "sft": None, "rl.precision": "auto"}
    rehearsal = Rehearsal("qwen3_1_7b_one_gpu", "one_gpu", keys, tmp_path, lambda phase: None)
    rehearsal.resolve()
    assert rehearsal._without_dry_run() is None and "one: " in rehearsal.dry_run()
    reads = recorded_reads(reads_folder(tmp_path, dry=True))
    executed = {"RlSection.precision", "Hardware.hbm_gb", "EngineSection.gpu_memory_utilization", "EngineSection.dtype"}
    assert executed <= reads
    assert "Hardware.price_per_gpu_hour" not in reads


def test_a_teacher_is_left_out(tmp_path):
    recipe = load_recipe(
        "tiny", {"rl.method.add": [{"type": "opd", "weight": 0.5}], "engine.teacher_url": "http://127.0.0.1:9"}
    )
    small = shrink_recipe(recipe, tmp_path)
    assert small.engine.teacher_url is None and not any(small.settings(s).method.add for s in small.stages)
    profile = load_profile("laptop")
    _, missing = coverage(recipe, profile, every_field(recipe, profile))
    assert {"engine.teacher_url", "rl.method.add"} <= {line.partition(": ")[0] for line in missing}


def test_reads_of_a_process_are_recorded_without_validation_and_preflight(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "from rstar_lab.hardware.profiles import load_profile\n"
        "from rstar_lab.rl.overrides import load_recipe\n"
        "from rstar_lab.rl.preflight.run import preflight\n"
        "recipe = load_recipe('tiny_fast')\n"
        "list(preflight('tiny_fast', 'one_gpu'))\n"
        "recipe.model_dump(), recipe == recipe\n"
        "settings = recipe.settings(recipe.stages[0])\n"
        "settings.method.clip_low, settings.hooks, load_profile('laptop').hardware.nodes\n"
    )
    environment = os.environ | recording(tmp_path / "reads")
    subprocess.run([sys.executable, str(script)], check=True, env=environment, capture_output=True)
    reads = recorded_reads(tmp_path / "reads")
    assert {"Recipe.stages", "Recipe.rl", "Grpo.clip_low", "Profile.hardware", "Hardware.nodes"} <= reads
    assert "Roc.rule" in reads, "read through the property hooks"
    assert (
        not {"RlSection.lr", "RlSection.importance_cap", "Stage.steps", "Hardware.cpus_per_node", "Recipe.seed"} & reads
    )


def test_data_files_of_the_small_recipe_can_be_read(tmp_path):
    small = shrink_recipe(load_recipe("qwen3_14b_mi300x"), tmp_path)
    write_data(small)
    problems = [load_problems(stage.problems.file) for stage in small.stages]
    assert all(len(section) == 16 for section in problems)
    held_out = [p.question for section in small.evaluate.sets.values() for p in load_problems(section.file)]
    assert not {p.question for section in problems for p in section} & set(held_out), "else training would be refused"


def test_keys_of_verl_reach_the_job_and_not_the_recipe(tmp_path):
    keys = {"rl.lr": 2e-6, "verl.trainer.logger": ["console"]}
    rehearsal = Rehearsal("release_dapo", "h100x8", keys, tmp_path, lambda phase: None)
    rehearsal.resolve()
    assert rehearsal.recipe.rl.lr == 2e-6 and rehearsal.job.overrides == {"verl.trainer.logger": ["console"]}
    with pytest.raises(UserError, match=r"verl\.trainer\.logger: profile laptop does not use verl; leave the key out"):
        Rehearsal("tiny", "laptop", keys, tmp_path, lambda phase: None).resolve()
    (finding,) = preflight("tiny", "laptop", keys)
    assert finding.status is Status.FAIL and "profile laptop does not use verl" in finding.message


def test_after_a_failed_phase_nothing_runs_and_the_report_fails():
    report, seen = RehearsalReport(), []

    def fail():
        raise UserError("no such partition")

    report.run("one", lambda: "fine", seen.append)
    report.run("two", fail, seen.append)
    report.run("three", lambda: pytest.fail("it must not run"), seen.append)
    assert [(phase.name, phase.status) for phase in report.phases] == [
        ("one", "passed"), ("two", "failed"), ("three", "not covered"),
    ]  # fmt: skip
    assert report.failed and "no such partition" in report.phases[1].detail
    assert set(report.as_json()) == {"phases", "covered", "not_covered"}
    assert set(report.as_json()["phases"][0]) == {"name", "status", "seconds", "detail"}


@pytest.mark.slow
def test_the_job_ends_with_a_failed_phase(tmp_path, monkeypatch):
    def sft(rehearsal):
        folder = JobFolder.of(rehearsal.job.runs_dir, "job-1")
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        job = JobSpec(
            "job-1", "tiny", "laptop", "local", sleep, str(tmp_path), str(tmp_path), {}, "2026-01-01T00:00:00"
        )
        folder.save(job)
        folder.save(replace(job, handle=local.Local().start(folder, job)))
        rehearsal.job.id = "job-1"
        raise UserError("the phase fails")

    for name in ("preflight", "data"):
        monkeypatch.setattr(Rehearsal, name, lambda rehearsal: "")
    monkeypatch.setattr(Rehearsal, "sft", sft)
    report = Rehearsal("tiny", "laptop", {}, tmp_path, lambda phase: None).run()
    assert [phase.detail for phase in report.phases if phase.status == "failed"] == ["the phase fails"]
    supervisor = JobFolder.of(tmp_path / "runs", "job-1").spec().handle
    assert json.loads((tmp_path / "runs/.jobs/job-1/exit.json").read_text())
    assert not alive(supervisor["pid"], supervisor["created"])


def test_the_killed_worker_of_verl_is_a_rank(tmp_path):
    """Ray names a worker process after its actor and method."""
    titles = [
        "ray::AgentLoopWorkerTQ.generate_sequences",
        "ray::WorkerDict.actor_rollout_update_actor",
        "ray::TaskRunner.run",
    ]
    processes = [subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 60"]) for title in titles]
    try:
        job = RehearsalJob(tmp_path, tmp_path, tmp_path, "tiny", {})
        job.kill_worker(WORKERS["verl"], lambda: [psutil.Process(process.pid) for process in processes])
        assert processes[1].wait(10) == -signal.SIGKILL
        assert processes[0].poll() is processes[2].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_recipe_that_cannot_be_read_fails_the_rehearsal(tmp_path):
    report = Rehearsal("no-such-recipe", "laptop", {}, tmp_path / "r", lambda phase: None).run()
    assert report.phases[0].status == "failed" and "no-such-recipe" in report.phases[0].detail
    assert {phase.status for phase in report.phases[1:]} == {"not covered"}


@pytest.mark.parametrize("grad_norm", [0.0, 1.0, float("inf"), float("nan"), None])
def test_a_stage_without_a_changed_weight_fails(tmp_path, grad_norm):
    """Neither a stage without a gradient nor one whose checkpoint has the weights of its start passes."""
    model = tmp_path / "runs/r-rl/checkpoints/step=000002"
    for folder, value in ((tmp_path / "start", 1.0), (model, 1.0)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_file({"w": np.full(3, value, np.float32)}, folder / "model.safetensors")
    rehearsal = Rehearsal("tiny", "laptop", {}, tmp_path, lambda phase: None)
    rehearsal.job = RehearsalJob(tmp_path, tmp_path, tmp_path / "runs", "r", {})
    rehearsal.job.id, rehearsal.weights = "job", read_weights(tmp_path / "start")
    shutil.rmtree(tmp_path / "start")  # a checkpoint that the run has removed since
    lines = [{"step": step, "reward": 0.0, "loss": None, "grad_norm": grad_norm} for step in (1, 2)]
    rehearsal.job.lines = lambda stage: lines
    rehearsal.job.last_checkpoint = lambda: 2
    (tmp_path / "runs/r-rl/run.json").write_text(
        json.dumps({"schema_version": 1, "run_id": "r-rl", "kind": "train", "status": "running"})
    )
    stage = load_recipe("tiny_fast").stages[0].model_copy(update={"steps": 2})
    with pytest.raises(
        UserError, match="although the optimizer ran" if grad_norm == 1.0 else "no optimizer step in 2 steps"
    ):
        rehearsal.stage(stage)
    if grad_norm == 1.0:
        save_file({"w": np.float32([1, 1, 2])}, model / "model.safetensors")
        assert "2 updates with a nonzero gradient" in rehearsal.stage(stage)
        assert rehearsal.weights["w"].tolist() == [1, 1, 2]
        # Rounding is no update, broken weights are none either, and the model of the stage counts, not a later checkpoint.
        rehearsal.weights = {"w": np.float32([1, 1, 2.0001])}
        save_file({"w": np.float16([1, 1, 2])}, model / "model.safetensors")
        with pytest.raises(UserError, match="although the optimizer ran"):
            rehearsal.stage(stage)
        save_file({"w": np.float32([1, 1, np.nan])}, model / "model.safetensors")
        with pytest.raises(UserError, match="not finite: w"):
            rehearsal.stage(stage)
        save_file({"w": np.float32([3, 3, 3])}, model / "model.safetensors")
        kept = stage_model(tmp_path / "runs/r-rl", stage.name)
        kept.mkdir(parents=True)
        save_file({"w": np.float32([1, 1, 2.0001])}, kept / "model.safetensors")
        with pytest.raises(UserError, match="although the optimizer ran"):
            rehearsal.stage(stage)


VERL = [
    ("qwen3_14b_mi300x", "mi300x_8x8"), ("qwen2_5_32b", "mi300x_8x8"), ("qwen3_14b_h100x8", "h100x8"),
    ("release_dapo", "h100x8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Path]:
    """Prompt format -> the tiny model of an earlier rehearsal, whose SFT a later one then skips."""
    return {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("recipe", "profile"), [*VERL, ("tiny_three_stage", "laptop")])
def test_all_phases_of_the_rehearsal_pass(recipe, profile, tmp_path, models):
    style, target = load_recipe(recipe).rl.prompt.format, tmp_path / "r" / "models" / "tiny"
    if style in models:
        shutil.copytree(models[style], target)
    command = [
        sys.executable,
        "-m",
        "rstar_lab.cli",
        "rehearse",
        recipe,
        "--profile",
        profile,
        "--folder",
        str(tmp_path / "r"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if (target / "config.json").exists():
        models.setdefault(style, target)
    report = json.loads(done.stdout)
    skipped = {"sft"} if load_recipe(recipe).sft is None else set()
    failed = [p for p in report["phases"] if p["status"] != "passed" and p["name"] not in skipped]
    assert done.returncode == 0 and not failed, failed
    names = {phase["name"] for phase in report["phases"]}
    assert {"resolve", "preflight", "data", "kill of a worker", "kill of the job and resume", "evaluation"} <= names
    assert report["covered"] and report["not_covered"]


@pytest.mark.slow
def test_a_rehearsal_ended_by_sigterm_stops_its_job_and_removes_its_folder(tmp_path):
    script = f"""
import os, signal, sys
from pathlib import Path
from benchmarks.rehearsal import run
from rstar_lab.cli import main

def start(rehearsal, on_phase=None):
    Path({str(tmp_path / "folder")!r}).write_text(str(rehearsal.folder))
    rehearsal.folder.mkdir(exist_ok=True)
    from contextlib import ExitStack
    with ExitStack() as stack:
        stack.callback(Path({str(tmp_path / "stopped")!r}).touch)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

run.Rehearsal.run = start
sys.argv = ["rstar-lab", "rehearse", "tiny"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert (tmp_path / "stopped").exists() and not Path((tmp_path / "folder").read_text()).exists()
