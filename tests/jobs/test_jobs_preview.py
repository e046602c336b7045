"""`jobs submit --dry-run` and `jobs evaluate`: what would be sent is printed, and nothing is written."""

import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import load_profile, profile_file
from rstar_lab.jobs import preview, render, submit
from rstar_lab.jobs.slurm import Slurm


def run(*arguments):
    return CliRunner().invoke(app, ["jobs", *map(str, arguments)])


@pytest.fixture
def slurm_profile(tmp_path):
    """The paper's machine, with its folders in a temporary folder and without its image."""
    content = yaml.safe_load(profile_file("mi300x_8x8").read_text()) | {"container": None}
    content["storage"] = {name: str(tmp_path / name) for name in ("runs", "models", "data")}
    path = tmp_path / "mi300x.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--profile", "mi300x_8x8"], ["#SBATCH --nodes=8", "rstar_lab.jobs.supervisor", "command: python3 -m rstar_lab.rl.verl.train"]),
        (["--profile", "h100x8"], ['"entrypoint": "cd /shared/runs/.jobs/', '"image": "rstar-lab:cuda"']),
        (["--profile", "h100x8", "--backend", "kuberay"], ["kind: RayJob", "entrypoint: python3 -m rstar_lab.jobs.supervisor"]),
        (["--profile", "h100x8_local"], ["-m rstar_lab.rl.verl.train tiny_fast --profile h100x8_local"]),
        ([], ["-m rstar_lab.cli run tiny_fast"]),
    ],
)  # fmt: skip
def test_a_dry_run_prints_what_would_be_sent_and_writes_nothing(options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("submit", "tiny_fast", *options, "--dry-run")
    assert done.exit_code == 0, done.output
    assert all(text in done.stdout for text in expected), done.stdout
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_script_that_is_submitted(slurm_profile, tmp_path, monkeypatch):
    monkeypatch.setattr("rstar_lab.jobs.slurm._run", lambda *command, **_: "7" if command[0] == "sbatch" else "")
    options = {"job_id": "job-1", "preflight": False}
    shown = preview("tiny_fast", str(slurm_profile), **options)
    job = submit("tiny_fast", str(slurm_profile), log=lambda line: None, **options)
    assert shown == (job.folder.path / "job.sbatch").read_text() + f"\ncommand: {shlex.join(job.spec.command)}"
    assert job.spec.handle == {"slurm_id": "7"} and job.backend.name == Slurm.name


def test_an_evaluation_is_a_job_of_one_node(slurm_profile, tmp_path, monkeypatch):
    monkeypatch.setattr("rstar_lab.jobs.slurm._run", lambda *command, **_: "7" if command[0] == "sbatch" else "")
    (tmp_path / "model").mkdir()
    (tmp_path / "set.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    done = run("evaluate", "model", "--problems", "aime24", "--problems", "aime25=set.jsonl", "--samples", 4,
               "--profile", slurm_profile, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    folder = tmp_path / "runs" / ".jobs" / row["id"]
    assert "#SBATCH --nodes=1\n" in (folder / "job.sbatch").read_text()
    assert load_profile(row["profile"]).hardware.nodes == 1
    command = json.loads((folder / "job.json").read_text())["command"]
    sets = ["--problems", "aime24", "--problems", f"aime25={tmp_path}/set.jsonl"]
    start = command.index("evaluate") + 1
    assert command[start : start + 7] == [str(tmp_path / "model"), *sets, "--samples", "4"]


@pytest.mark.parametrize("arguments", [(), ("model",), ("--problems", "aime24")])
def test_an_evaluation_without_model_or_problems_is_refused_at_once(arguments, tmp_path):
    with pytest.raises(UserError, match="give models and --problems"):
        submit("evaluate", command="evaluate", runs_dir=tmp_path, arguments=arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["h100x8_local", "a100x8"])
def test_a_profile_of_one_machine_needs_no_cluster(name):
    profile = load_profile(name)
    assert (profile.backend, profile.container, profile.storage.runs) == ("local", None, "runs")
    done = CliRunner().invoke(app, ["profiles", name])
    assert yaml.safe_load(done.stdout)["hardware"]["gpus_per_node"] == 8


@pytest.mark.parametrize(("kind", "text"), [("slurm", "#SBATCH --nodes=8"), ("ray", "ray start --head")])
def test_render_knows_each_backend(kind, text):
    assert text in render.main("mi300x_8x8", kind)
