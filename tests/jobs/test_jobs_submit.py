"""What `submit` writes: resolved paths, the trainer of the profile, the sandbox service; and the job list."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.jobs import job_spec
from typer.testing import CliRunner

from rstar_lab.cli.jobs import app
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import EXPECTED_GPUS, load_profile, resolve_file, resolve_model, resolve_recipe_paths
from rstar_lab.jobs import find_job_runs_dir, list_jobs, submit
from rstar_lab.jobs.job import Job
from rstar_lab.jobs.local import Local
from rstar_lab.jobs.slurm import Slurm
from rstar_lab.jobs.store import JobFolder

ROOT = Path(__file__).parent.parent.parent
RECIPE = {
    "model": "Qwen/Small",
    "sft": {"conversations": [{"file": "data/sft/a.jsonl", "count": 3}]},
    "stages": [{"name": "one", "problems": {"file": "data/rl/train.parquet"}, "steps": 1}],
    "evaluate": {"sets": {"math": {"file": "data/eval/math.parquet"}}},
}


@pytest.fixture
def cluster_profile(tmp_path):
    """A Slurm profile with shared storage under tmp_path."""

    def write(**changes):
        content = yaml.safe_load((ROOT / "cluster/profiles/mi300x_8x8.yaml").read_text())
        content["storage"] = {name: str(tmp_path / "shared" / name) for name in ("runs", "models", "data")}
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return str(path)

    return write


@pytest.fixture
def submitted(monkeypatch):
    """Submit without starting anything; returns the job."""

    def run(*arguments, **keywords):
        monkeypatch.setattr(Local, "start", lambda self, folder, spec: {})
        monkeypatch.setattr(Slurm, "start", lambda self, folder, spec: {"slurm_id": "1"})
        return submit(*arguments, preflight=False, log=lambda line: None, **keywords)

    return run


def test_recipe_paths_are_looked_up_in_the_storage_of_the_profile(cluster_profile, tmp_path):
    profile = load_profile(cluster_profile())
    shared = tmp_path / "shared"
    (shared / "models" / "Small").mkdir(parents=True)
    resolved = resolve_recipe_paths(RECIPE, profile)
    assert resolved["model"] == str(shared / "models" / "Small")
    assert resolved["sft"]["conversations"][0] == {"file": str(shared / "data/sft/a.jsonl"), "count": 3}
    assert resolved["stages"][0]["problems"]["file"] == str(shared / "data/rl/train.parquet")
    assert resolved["evaluate"]["sets"]["math"]["file"] == str(shared / "data/eval/math.parquet")
    (shared / "models" / "Qwen" / "Small").mkdir(parents=True)
    assert resolve_model("Qwen/Small", profile) == str(shared / "models/Qwen/Small"), "the full name comes first"
    assert resolve_recipe_paths(resolved, profile) == resolved


def test_absolute_paths_urls_and_tiny_are_not_changed(cluster_profile):
    profile = load_profile(cluster_profile())
    for model in ("tiny", "/models/x", "http://host:1"):
        assert resolve_model(model, profile) == model
    assert resolve_file("/data/x.parquet", profile) == "/data/x.parquet"
    assert resolve_recipe_paths({"stages.0.problems.file": "data/a.jsonl", "rl.lr": 1}, profile) == {
        "stages.0.problems.file": f"{profile.storage.data}/a.jsonl", "rl.lr": 1,
    }  # fmt: skip


def test_on_this_machine_the_current_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other.jsonl").touch()
    laptop = load_profile("laptop")
    assert resolve_file("problems.jsonl", laptop) == str(tmp_path / "problems.jsonl")
    assert resolve_file("other.jsonl", laptop) == str(tmp_path / "data" / "other.jsonl")
    assert resolve_file("missing.jsonl", laptop) == "missing.jsonl"


def test_a_cluster_job_gets_a_recipe_with_absolute_paths(cluster_profile, submitted, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    job = submitted(path, cluster_profile(), {"evaluate.sets.math.file": "data/other.parquet"})
    sent = Path(job.spec.command[3])
    assert sent.parent == job.folder.path and sent.stem == "mine"
    content = yaml.safe_load(sent.read_text())
    assert content["stages"][0]["problems"]["file"] == str(tmp_path / "shared/data/rl/train.parquet")
    assert f"evaluate.sets.math.file={tmp_path}/shared/data/other.parquet" in job.spec.command
    assert Path(job.spec.profile).parent == job.folder.path, "no node may see the submitter's profile file"


@pytest.mark.parametrize(
    ("command", "module"),
    [(None, "rstar_lab.rl.verl.train"), ("run", "rstar_lab.rl.verl.train"), ("train", "rstar_lab.rl.verl.train"),
     ("sft", "rstar_lab.rl.verl.train"), ("verl", "rstar_lab.rl.verl.train")],
)  # fmt: skip
def test_every_command_uses_the_trainer_of_the_profile(cluster_profile, submitted, command, module):
    job = submitted("tiny", cluster_profile(), command=command)
    assert job.spec.command[1:3] == ["-m", module]
    assert "--profile" in job.spec.command


def test_command_verl_overrides_the_profile(submitted, tmp_path):
    assert "rstar_lab.rl.verl.train" in submitted("tiny", "laptop", command="verl", runs_dir=tmp_path).spec.command
    with pytest.raises(UserError, match="choose run, train, sft or verl"):
        submitted("tiny", "laptop", command="dance", runs_dir=tmp_path)


@pytest.mark.slow
def test_submit_checks_the_trainer_that_will_run(tmp_path):
    with pytest.raises(UserError, match=r"preflight failed: .*positions: .*2048 for the prompt"):
        submit("tiny", "laptop", command="verl", runs_dir=tmp_path / "runs", log=lambda line: None)
    assert not (tmp_path / "runs").exists()


def test_sandbox_workers_are_started_unless_the_recipe_names_a_service(cluster_profile, submitted):
    profile = cluster_profile()
    assert submitted("tiny", profile).spec.sandbox_workers == 64
    assert submitted("tiny", profile, {"sandbox.url": "http://box:8088"}).spec.sandbox_workers == 0
    assert submitted("tiny", cluster_profile(sandbox={"redis": False})).spec.sandbox_workers == 0


def test_a_job_folder_is_private_and_its_parent_is_shared_like_runs(submitted, tmp_path):
    runs = tmp_path / "shared"
    runs.mkdir()
    runs.chmod(0o1777)
    previous = os.umask(0)
    try:
        job = submitted("tiny_fast", runs_dir=runs)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((runs / ".jobs").stat().st_mode) == 0o1777
    assert stat.S_IMODE(job.folder.path.stat().st_mode) == 0o700


def test_a_run_of_another_user_is_not_continued(submitted, tmp_path):
    runs = tmp_path / "shared"
    (runs / "tiny_fast-rl").mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user requires root")
    os.chown(runs / "tiny_fast-rl", 65534, 65534)
    with pytest.raises(UserError, match=r"run tiny_fast-rl in .* belongs to user nobody: submit with another --name"):
        submitted("tiny_fast", runs_dir=runs)
    assert list_jobs(runs) == []
    assert submitted("tiny_fast", runs_dir=runs, name="mine").spec.run == "mine-rl"


@pytest.mark.parametrize("state", ["queued", "failed"])
def test_secrets_are_deleted_if_the_supervisor_never_started(cluster_profile, submitted, monkeypatch, tmp_path, state):
    monkeypatch.setenv("WANDB_API_KEY", "abc123secret")
    job = submitted("tiny_fast", cluster_profile(), runs_dir=tmp_path)
    assert job.folder.secrets.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(Slurm, "state", lambda self, folder, spec: state)
    monkeypatch.setattr(Slurm, "stop", lambda self, folder, spec: None)
    if state == "queued":
        job.status()
        assert job.folder.secrets.exists(), "the job will need them"
        job.stop()
    else:
        job.status()
    assert not job.folder.secrets.exists()


def test_a_submission_that_fails_leaves_no_job(monkeypatch, tmp_path):
    def fail(self, folder, spec):
        raise UserError("sbatch: no such partition")

    monkeypatch.setattr(Local, "start", fail)
    with pytest.raises(UserError, match="no such partition"):
        submit("tiny", runs_dir=tmp_path, preflight=False)
    assert list_jobs(tmp_path) == []


def unreachable_ray_job(runs_dir: Path, job_id: str) -> Job:
    folder = JobFolder.of(runs_dir, job_id)
    folder.save(job_spec(runs_dir, job_id, profile="h100x8", backend="ray", handle={"address": "http://127.0.0.1:9"}))
    return Job(folder)


@pytest.mark.slow
def test_one_unreachable_cluster_does_not_break_the_list(submitted, tmp_path):
    job = unreachable_ray_job(tmp_path, "qwen3_14b_mi300x-20261123-120000-abcd")
    other = submitted("tiny", runs_dir=tmp_path)
    assert "status=unknown" in repr(job)
    done = CliRunner().invoke(app, ["list", "--runs-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows[job.id]["status"] == "unknown" and "http://127.0.0.1:9" in rows[job.id]["error"]
    assert rows[other.id]["status"] == "queued" and rows[other.id]["error"] is None


def test_the_list_shows_complete_ids_on_80_columns(submitted, tmp_path):
    ids = [submitted("tiny", runs_dir=tmp_path, name=name).id for name in ("qwen3_14b_mi300x-second-try", "short")]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["list", "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0
    assert set(ids) <= set(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_runs_of_a_notebooks_jobs_are_on_the_storage_that_the_nodes_share(tmp_path, monkeypatch):
    monkeypatch.setenv("RSTAR_LAB_RUNS", str(tmp_path / "here"))
    assert find_job_runs_dir("laptop") == tmp_path / "here"
    assert find_job_runs_dir("mi300x_8x8") == Path("/shared/runs")
    assert find_job_runs_dir("mi300x_8x8", tmp_path / "given") == tmp_path / "given"
    assert find_job_runs_dir("mi300x_8x8", host="login") == tmp_path / "here", "ssh copies the runs to this machine"


def test_a_job_for_gpus_does_not_run_on_a_machine_without_one(tmp_path, monkeypatch):
    rows = [{"check": "devices", "status": "skip", "message": "no GPU on this machine"}]
    monkeypatch.setattr("rstar_lab.jobs.preflight.preflight_rows", lambda *arguments: rows)
    with pytest.raises(UserError, match="devices: no GPU on this machine"):
        submit("tiny_fast", "one_gpu", runs_dir=tmp_path)
    assert not list_jobs(tmp_path)
    monkeypatch.setattr(Local, "start", lambda self, folder, spec: {})
    job = submit("tiny_fast", "one_gpu", runs_dir=tmp_path, preflight=False)
    assert job.spec.environment[EXPECTED_GPUS] == "1"
    laptop = submit("tiny_fast", "laptop", runs_dir=tmp_path, preflight=False)
    assert EXPECTED_GPUS not in laptop.spec.environment


def test_the_list_of_an_empty_folder_names_the_command_that_starts_a_job(tmp_path):
    done = CliRunner().invoke(app, ["list", "--runs-dir", str(tmp_path)])
    assert "rstar-lab jobs submit RECIPE" in done.stdout


def test_an_evaluation_is_a_job_with_its_own_arguments(cluster_profile, submitted, tmp_path):
    arguments = ["/models/a", "--problems", "aime24", "--samples", "16"]
    job = submitted(
        "evaluate",
        cluster_profile(),
        {"engine.kind": "vllm"},
        command="evaluate",
        arguments=arguments,
        runs_dir=tmp_path,
    )
    command = job.spec.command[1:]
    assert command[:4] == ["-m", "rstar_lab.cli", "evaluate", "/models/a"]
    recipe = str(job.folder.path / "evaluate.yaml")
    options = ["--recipe", recipe, "--set", "engine.kind=vllm", "--runs-dir", str(tmp_path), "--json"]
    assert command[4:] == [*arguments[1:], *options]
    assert job.run_dir is None


def test_a_job_starts_in_the_same_folder_of_the_packed_tree(cluster_profile, submitted, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    (tree / "work").mkdir(parents=True)
    (tree / "work" / "my_tools.py").write_text("")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    monkeypatch.chdir(tree / "work")
    job = submitted("tiny", cluster_profile(env={"PYTHONPATH": "/own"}), runs_dir=tmp_path / "runs")
    code = job.folder.path / "code"
    assert job.spec.cwd == str(code / "work") and (code / "work" / "my_tools.py").is_file()
    assert job.spec.environment["PYTHONPATH"] == f"{code}:/own"
