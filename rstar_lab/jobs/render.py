"""Render cluster files from a hardware profile: the sbatch script, `ray start` commands, KubeRay's RayCluster and RayJob."""

import json
import shlex
import sys
from pathlib import Path
from string import Template
from typing import Any

import yaml

from rstar_lab.common.errors import UserError, exit_with_message
from rstar_lab.common.resources import resource_folder
from rstar_lab.hardware.container import (
    apptainer_words,
    is_amd,
    mounted_folders,
    pyxis_options,
    registry_image,
    slurm_runtime,
)
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.store import JobFolder, JobSpec

TEMPLATES = resource_folder("cluster")
# Variables that hide GPUs of AMD. A Slurm without AutoDetect sets them for GPUs of all vendors, and again in every step.
AMD_VARIABLES = ("HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


class _PercentTemplate(Template):
    """A template with %% as its delimiter, because shell scripts use $."""

    delimiter = "%%"


def sbatch_script(profile: Profile, spec: JobSpec, folder: Path) -> str:
    """Return the batch script of a job: Ray on every node of the allocation, then the supervisor on the first."""
    hardware, slurm = profile.hardware, profile.slurm
    step_options, container, on_head = _container(profile, spec, folder)
    return _fill(
        "slurm/job.sbatch",
        directives="\n".join(sbatch_directives(profile, spec.id, f"{folder}/slurm.out")),
        environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        setup="\n".join(slurm.setup),
        python=shlex.quote(spec.python),
        folder=shlex.quote(str(folder)),
        secrets=shlex.quote(str(secrets)) if (secrets := JobFolder(folder).secrets).exists() else "",
        gpu_variables=_unset_gpu_variables(profile),
        gpus=str(hardware.gpus_per_node),
        cpus=str(hardware.cpus_per_node),
        sandbox_workers=str(spec.sandbox_workers),
        requeue_before_s=str(slurm.requeue_before_s),
        step_options=step_options,
        container=container,
        on_head=on_head,
    )


def _unset_gpu_variables(profile: Profile) -> str:
    # vLLM for AMD copies CUDA_ to HIP_VISIBLE_DEVICES when it is imported, and stops if verl sets another value afterwards.
    names = [*AMD_VARIABLES, "CUDA_VISIBLE_DEVICES"] if is_amd(profile) else AMD_VARIABLES
    options = " ".join(f"-u {name}" for name in names)
    return f'\nunset {" ".join(names)}\ninside=(env {options} "${{inside[@]}}")'


def sbatch_directives(profile: Profile, name: str, output: str) -> list[str]:
    """Return the #SBATCH lines of a job on the profile's nodes."""
    hardware, slurm = profile.hardware, profile.slurm
    requeue = [f"--signal=B:USR1@{slurm.requeue_before_s}", "--requeue"] if slurm.requeue_before_s else ["--no-requeue"]
    lines = [
        f"--job-name={name}",
        f"--nodes={hardware.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={hardware.cpus_per_node}",
        f"--time={slurm.time}",
        *requeue,
        f"--output={output}",
        "--open-mode=append",
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *slurm.options,
    ]
    return [f"#SBATCH {line}" for line in lines]


def _container(profile: Profile, spec: JobSpec, folder: Path) -> tuple[str, str, str]:
    """Return (options of srun, words before a command on a node, words before a command of the batch script)."""
    image = profile.container
    if image is None:
        return "", "", '"${inside[@]}"'
    mounts = mounted_folders(profile, spec.runs_dir, folder)
    if slurm_runtime(image) == "pyxis":
        options = shlex.join(pyxis_options(image, mounts, folder))
        return f" {options}", "", '"${step[@]}" --nodelist="$head" "${inside[@]}"'
    return "", " " + shlex.join(apptainer_words(profile, image, mounts, folder)), '"${inside[@]}"'


def ray_cluster(profile: Profile, code: str = "") -> dict[str, Any]:
    """Return a KubeRay RayCluster: a head without GPUs and one worker per node, with the same image, environment and volume.

    code: folder of the packed tree, which takes precedence over the package in the image. Raises UserError if the profile's
    `container` is not an image of a registry.
    """
    hardware, kuberay = profile.hardware, profile.kuberay
    variables = dict(profile.env) | ({"PYTHONPATH": code} if code else {})
    resources = {"cpu": str(hardware.cpus_per_node), "memory": f"{hardware.memory_gb_per_node:g}Gi"}
    if hardware.gpus_per_node:
        resources["amd.com/gpu" if is_amd(profile) else "nvidia.com/gpu"] = str(hardware.gpus_per_node)
    return _fill_yaml(
        "kuberay/raycluster.yaml",
        metadata={"name": f"rstar-lab-{profile.name.replace('_', '-')}"}
        | ({"namespace": kuberay.namespace} if kuberay.namespace else {}),
        image=registry_image(profile, "kuberay"),
        env=[{"name": name, "value": value} for name, value in variables.items()]
        + [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": kuberay.secret, "key": name, "optional": True}}}
            for name in profile.secrets
        ],
        mount=kuberay.mount,
        claim=kuberay.claim,
        nodes=hardware.nodes,
        resources=resources,
    )


def ray_job(profile: Profile, spec: JobSpec, folder: Path, name: str) -> dict[str, Any]:
    """Return the KubeRay RayJob of a job: the cluster of `ray_cluster`, and the supervisor as entry point on its head.

    name: name of the RayJob. Raises UserError if the profile has no image, or if the pods would not see the job's folder.
    """
    mount = profile.kuberay.mount
    cluster = ray_cluster(profile, f"{folder}/code")
    if not folder.is_relative_to(mount):
        raise UserError(
            f"profile {profile.name}: the pods mount the claim {profile.kuberay.claim} at {mount}, but the job's folder is {folder}; "
            f"choose a --runs-dir under {mount}, or change kuberay.mount"
        )
    entrypoint = shlex.join([spec.python, "-m", "rstar_lab.jobs.supervisor", str(folder)])
    return _fill_yaml(
        "kuberay/rayjob.yaml", name=name, job=spec.id, recipe=spec.recipe, profile=spec.profile, entrypoint=entrypoint,
        cluster=cluster["spec"],
    )  # fmt: skip


def to_yaml(document: dict[str, Any]) -> str:
    """Return a manifest as YAML without anchors."""
    return yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False)


def _fill_yaml(template: str, **values: Any) -> dict[str, Any]:
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    document: dict[str, Any] = yaml.safe_load(_fill(template, **texts))
    return document


def _fill(template: str, **values: str) -> str:
    return _PercentTemplate((TEMPLATES / template).read_text()).substitute(values)


def main(profile: str, kind: str) -> str:
    """Return the output of `python -m rstar_lab.jobs.render PROFILE kuberay|ray|slurm`, with placeholders of a job."""
    machine = load_profile(profile)
    if kind == "kuberay":
        return to_yaml(ray_cluster(machine))
    if kind == "slurm":
        spec = JobSpec("JOB", "RECIPE", profile, "slurm", ["python3"], "/", machine.storage.runs, {}, "")
        return sbatch_script(machine, spec, JobFolder.of(Path(machine.storage.runs), spec.id).path)
    if kind == "ray":
        node = f"--num-cpus={machine.hardware.cpus_per_node} --num-gpus={machine.hardware.gpus_per_node} --block"
        lines = [
            *(f"export {name}={shlex.quote(value)}" for name, value in machine.env.items()),
            "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/shared/ray.token  # the same file on every node, mode 600",
            f"# the first node\nray start --head --port=6379 {node}",
            f"# every other node\nray start --address=HEAD:6379 {node}",
        ]
        return "\n".join(lines)
    raise UserError(f"render {kind}: unknown; choose kuberay, ray or slurm")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m rstar_lab.jobs.render PROFILE kuberay|ray|slurm")
    with exit_with_message():
        print(main(*sys.argv[1:]))
