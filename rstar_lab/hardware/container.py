"""Start a job's processes in the profile's `container`: options of Apptainer, pyxis and Ray, and the image of Kubernetes' pods."""

from pathlib import Path
from typing import Any, Literal

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile


def slurm_runtime(image: str) -> Literal["apptainer", "pyxis"]:
    """Return what starts an image in a Slurm job: Apptainer for .sif files and URIs, such as docker://IMAGE, else pyxis."""
    return "apptainer" if image.endswith(".sif") or "://" in image else "pyxis"


def registry_image(profile: Profile, backend: str) -> str:
    """Return the profile's image for a backend that pulls it from a registry. Raises UserError for none and for a file."""
    image = profile.container
    if image is None or is_file(image) or "://" in image:
        raise UserError(
            f"profile {profile.name}: container: {image or 'not set'}: backend {backend} requires an image of a registry, such as "
            "registry/rstar-lab:cuda"
        )
    return image


def is_file(image: str) -> bool:
    """Whether an image is a file, not a name in a registry."""
    return image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh"))


def apptainer_words(profile: Profile, image: str, mounts: list[str], folder: Path) -> list[str]:
    """Return the words before a command that run it in the image with Apptainer. folder: the job's folder."""
    gpu = [] if not profile.hardware.gpus else ["--rocm" if is_amd(profile) else "--nv"]
    return ["apptainer", "exec", *gpu, *(f"--bind={path}" for path in mounts), f"--pwd={folder}/code", image]


def pyxis_options(image: str, mounts: list[str], folder: Path) -> list[str]:
    """Return the options of srun that run a step in the image with pyxis. folder: the job's folder."""
    registry, slash, name = image.partition("/")
    if slash and ("." in registry or ":" in registry) and not is_file(image):
        image = f"{registry}#{name}"  # enroot separates the registry from the name by #
    # Otherwise every step has a /tmp of its own, and the driver does not find the sockets of Ray.
    mounts = [*mounts, "/tmp"]
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
        f"--container-workdir={folder}/code",
    ]


def ray_container(profile: Profile, mounts: list[str]) -> dict[str, Any]:
    """Return the key `container` of Ray's runtime environment, with which Ray starts all workers of a job with podman."""
    devices: list[str] = []
    if profile.hardware.gpus:
        amd = ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"]
        devices = amd if is_amd(profile) else ["--device=nvidia.com/gpu=all"]
    volumes = [f"--volume={path}:{path}" for path in mounts]
    return {"image": registry_image(profile, "ray"), "run_options": [*volumes, *devices]}


def mounted_folders(profile: Profile, runs_dir: str, folder: Path) -> list[str]:
    """Return the folders that a container sees under the same paths: runs, the job's folder, models and data."""
    folders = (runs_dir, str(folder), profile.storage.models, profile.storage.data)
    return list(dict.fromkeys(path for path in folders if Path(path).is_absolute()))


def is_amd(profile: Profile) -> bool:
    """Whether the profile's GPUs are AMD Instinct."""
    return (profile.hardware.gpu or "").startswith("MI")
