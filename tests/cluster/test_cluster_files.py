"""Cluster files: profiles load, rendered files are complete, and every command of docs/cluster.md exists."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import load_profile, profile_names
from rstar_lab.jobs.render import main, sbatch_script
from rstar_lab.jobs.store import JobSpec

ROOT = Path(__file__).parent.parent.parent
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("cluster", "jobs", "verl"))


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_has_no_secret_in_env(name):
    profile = load_profile(name)
    assert profile.name == name
    assert not set(profile.secrets) & set(profile.env)


def test_unknown_profile_key_raises_with_the_nearest_key(tmp_path):
    content = yaml.safe_load((ROOT / "cluster/profiles/laptop.yaml").read_text())
    content["engine"]["tensor_paralel"] = 2
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"engine\.tensor_paralel.*did you mean 'tensor_parallel'"):
        load_profile(tmp_path / "mine.yaml")


def spec(profile, folder, **changes):
    return JobSpec(
        "job-1", "paper", profile.name, "slurm", [sys.executable, "-c", ""], str(folder), str(folder), {}, "now",
        environment=dict(profile.env), **changes,
    )  # fmt: skip


def test_slurm_script_parses_and_has_the_resources_of_the_profile(tmp_path):
    profile = load_profile("mi300x_8x8")
    text = sbatch_script(profile, spec(profile, tmp_path), tmp_path)
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    assert text.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=job-1\n#SBATCH --nodes=8\n")
    assert "#SBATCH --gres=gpu:8" in text
    assert "export HSA_NO_SCRATCH_RECLAIM=1" in text
    assert "--num-gpus=8" in text
    assert "%%" not in text
    assert "ray stop" not in text, "it would end other people's clusters"


def test_slurm_steps_get_all_cpus_and_no_rocr_variable(tmp_path):
    profile = load_profile("mi300x_8x8")
    text = sbatch_script(profile, spec(profile, tmp_path), tmp_path)
    assert "unset ROCR_VISIBLE_DEVICES" in text
    assert "inside=(env -u ROCR_VISIBLE_DEVICES " in text, "Slurm sets it again in every step"
    assert "step=(srun --nodes=1 --ntasks=1 --overlap --cpus-per-task=96)" in text
    steps = [line for line in text.splitlines() if "ray.scripts" not in line and '"${step[@]}"' in line]
    assert steps and "--exact" not in text


def test_slurm_job_requeues_itself_before_the_wall_time(tmp_path):
    profile = load_profile("mi300x_8x8")
    text = sbatch_script(profile, spec(profile, tmp_path), tmp_path)
    assert "#SBATCH --signal=B:USR1@600\n#SBATCH --requeue\n" in text
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text
    once = profile.model_copy(update={"slurm": profile.slurm.model_copy(update={"requeue_before_s": 0})})
    text = sbatch_script(once, spec(once, tmp_path), tmp_path)
    assert "#SBATCH --no-requeue" in text and "--signal" not in text


@pytest.mark.parametrize(
    "image", ["/shared/rstar-lab.sif", "docker://registry.org/rstar-lab:rocm", "registry.org/a/rstar-lab:rocm"]
)
def test_slurm_job_runs_in_the_container_of_the_profile(image, tmp_path):
    profile = load_profile("mi300x_8x8").model_copy(update={"container": image})
    text = sbatch_script(profile, spec(profile, tmp_path, sandbox_workers=64), tmp_path)
    (tmp_path / "job.sbatch").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    if image != "registry.org/a/rstar-lab:rocm":
        assert "apptainer exec --rocm" in text and "--bind=/shared/models" in text and f" {image})" in text
        assert text.index("env -u ROCR_VISIBLE_DEVICES apptainer exec") > 0
    else:
        assert "--container-image=registry.org#a/rstar-lab:rocm" in text and "/shared/data:/shared/data" in text
        assert 'on_head=("${step[@]}" --nodelist="$head" "${inside[@]}")' in text
    without = profile.model_copy(update={"container": None})
    text = sbatch_script(without, spec(without, tmp_path), tmp_path)
    assert "inside=(env -u ROCR_VISIBLE_DEVICES)" in text and "container-image" not in text


def test_slurm_job_starts_the_sandbox_service_and_workers_on_every_node(tmp_path):
    profile = load_profile("mi300x_8x8")
    text = sbatch_script(profile, spec(profile, tmp_path, sandbox_workers=64), tmp_path)
    assert "if [ 64 -gt 0 ]; then" in text and "sandbox worker --workers 64" in text
    assert "if [ 0 -gt 0 ]; then" in sbatch_script(profile, spec(profile, tmp_path), tmp_path)


@pytest.mark.parametrize(("kind", "words"), [("slurm", "#SBATCH --nodes=1"), ("kuberay", "kind: RayCluster")])
def test_the_files_of_a_profile_are_printed(kind, words):
    assert words in main("h100x8", kind)


def test_rendered_ray_options_exist_in_ray():
    spec = importlib.util.find_spec("ray")
    assert spec and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "scripts" / "scripts.py").read_text()
    known = set(re.findall(r'"(--[a-z-]+)"', source[: source.index("def start(")]))  # importing it takes seconds
    for text in (main("h100x8", "ray"), (ROOT / "cluster/slurm/job.sbatch").read_text()):
        used = {option for line in text.splitlines() if "ray" in line for option in re.findall(r"--[a-z-]+", line)}
        options = used & {"--head", "--port", "--address", "--num-cpus", "--num-gpus", "--block", "--temp-dir",
                          "--node-ip-address", "--include-dashboard", "--disable-usage-stats", "--dashboard-host"}  # fmt: skip
        assert options
        assert not {option for option in options if option not in known}


def test_files_named_by_page_and_readme_exist():
    text = PAGE + (ROOT / "cluster" / "README.md").read_text()
    for name in re.findall(r"`((?:cluster|notebooks|docs)/[\w./]+?)`", text):
        assert (ROOT / name).exists() or name.endswith("cluster.ipynb"), name


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_images_have_a_pinned_base_and_install_the_locked_set(backend):
    text = (ROOT / "cluster" / backend / "Dockerfile").read_text()
    (base,) = re.findall(r"^(?:ARG BASE=|FROM )([a-z][^\s$]+)$", text, re.MULTILINE)
    assert re.search(r":v?\d+\.\d+\.\d+", base), "an image without a version changes under our feet"
    assert f"--no-deps --require-hashes --requirement constraints/{backend}.lock" in re.sub(r"--python \S+ ", "", text)
    locked = (ROOT / "constraints" / f"{backend}.txt").read_text()
    for package, version in re.findall(r"v\('(\w+)'\) == '([\d.]+)'", text):
        assert f"{package}=={version}\n" in locked


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_dockerfiles_pass_hadolint(backend):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (extra dev)")
    done = subprocess.run([hadolint, str(ROOT / "cluster" / backend / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_rocm_image_has_the_vllm_of_the_cuda_set():
    version = re.search(r"^vllm==(\S+)$", (ROOT / "constraints" / "cuda.txt").read_text(), re.MULTILINE)
    assert version and f"vllm-openai-rocm:v{version[1]}\n" in (ROOT / "cluster/rocm/Dockerfile").read_text()
