"""Cluster files from a hardware profile: the sbatch script, Ray's start commands, a KubeRay RayCluster."""

import shlex
import sys
from pathlib import Path
from string import Template
from typing import Any

import yaml

from rstar_lab.errors import UserError
from rstar_lab.jobs.store import JobSpec
from rstar_lab.profiles import Profile, load_profile
from rstar_lab.resources import resource_folder

TEMPLATES = resource_folder("cluster")


class _Percent(Template):
    """$-free, since the templates are shell scripts."""

    delimiter = "%%"


def sbatch_script(profile: Profile, spec: JobSpec, folder: Path) -> str:
    """The batch script of a job: Ray on every node of the allocation, then the supervisor on the first."""
    hardware, slurm = profile.hardware, profile.slurm
    lines = [
        f"--job-name={spec.id}",
        f"--nodes={hardware.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={hardware.cpus_per_node}",
        f"--time={slurm.time}",
        f"--output={folder}/slurm.out",
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *slurm.options,
    ]
    return _fill(
        "slurm/job.sbatch",
        directives="\n".join(f"#SBATCH {line}" for line in lines),
        environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        setup="\n".join(slurm.setup),
        python=shlex.quote(spec.python),
        folder=shlex.quote(str(folder)),
        gpus=str(hardware.gpus_per_node),
        cpus=str(hardware.cpus_per_node),
        sandbox_workers=str(profile.sandbox.workers_per_node),
    )


def ray_start(profile: Profile, *, head: bool, address: str = "HEAD:6379") -> list[str]:
    """`ray start` for one node of the profile, without the word `ray`."""
    hardware = profile.hardware
    where = ["--head", "--port=6379"] if head else [f"--address={address}"]
    return ["start", *where, f"--num-cpus={hardware.cpus_per_node}", f"--num-gpus={hardware.gpus_per_node}", "--block"]


def ray_cluster(profile: Profile) -> str:
    """A KubeRay RayCluster: the head without GPUs' work, one worker a node, the same image and environment."""
    document: dict[str, Any] = yaml.safe_load(_fill("kuberay/raycluster.yaml", name=profile.name.replace("_", "-")))
    hardware = profile.hardware
    resource = "amd.com/gpu" if (profile.hardware.gpu or "").startswith("MI") else "nvidia.com/gpu"
    environment = [{"name": name, "value": value} for name, value in profile.env.items()]
    from_secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": "rstar-lab", "key": name, "optional": True}}}
        for name in profile.secrets
    ]
    head, worker = document["spec"]["headGroupSpec"], document["spec"]["workerGroupSpecs"][0]
    worker |= {"replicas": hardware.nodes, "minReplicas": hardware.nodes, "maxReplicas": hardware.nodes}
    for group in (head, worker):
        container = group["template"]["spec"]["containers"][0]
        container["image"] = profile.image or container["image"]
        container["env"] = [*container.get("env", []), *environment, *from_secret]
    quantity = {"cpu": hardware.cpus_per_node, "memory": f"{hardware.memory_gb_per_node:g}Gi"}
    if hardware.gpus_per_node:
        quantity[resource] = hardware.gpus_per_node
    worker["template"]["spec"]["containers"][0]["resources"] = {"limits": quantity, "requests": dict(quantity)}
    return yaml.safe_dump(document, sort_keys=False)


def _fill(template: str, **values: str) -> str:
    return _Percent((TEMPLATES / template).read_text()).substitute(values)


def main(profile: str, kind: str) -> str:
    """`python -m rstar_lab.jobs.render PROFILE kuberay|ray`"""
    chosen = load_profile(profile)
    if kind == "kuberay":
        return ray_cluster(chosen)
    if kind == "ray":
        first, others = (["ray", *ray_start(chosen, head=head)] for head in (True, False))
        exports = [f"export {name}={shlex.quote(value)}" for name, value in chosen.env.items()]
        token = [
            "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/shared/ray.token  # the same file on every node, mode 600"
        ]
        return "\n".join(
            [*exports, *token, "# the first node", " ".join(first), "# every other node", " ".join(others)]
        )
    raise UserError(f"render {kind}: kuberay or ray")


if __name__ == "__main__":
    try:
        print(main(*sys.argv[1:3]))
    except UserError as error:
        sys.exit(f"error: {error}")
