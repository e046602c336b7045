"""Hardware profiles (cluster/profiles/*.yaml): a machine, and the settings tuned for it. Read by jobs, verl and preflight."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import resource_folder
from rstar_lab.untrusted.files import parse_yaml

FOLDER = resource_folder("cluster") / "profiles"
# Environment variable of a job: the GPUs that its profile promises. The local trainer stops if torch finds none.
EXPECTED_GPUS = "RSTAR_LAB_EXPECTED_GPUS"


class ProfileSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(ProfileSection):
    """The resources of one node, and the number of nodes."""

    nodes: int = Field(default=1, ge=1)
    cpus_per_node: int = Field(ge=1)
    memory_gb_per_node: float = Field(gt=0)
    disk_gb: float = Field(gt=0, description="free space expected under the runs folder")
    gpus_per_node: int = Field(default=0, ge=0)
    gpu: str | None = None
    hbm_gb: float = Field(default=0, ge=0, description="memory of one GPU")
    hbm_tb_per_s: float = Field(default=0, ge=0, description="peak memory bandwidth of one GPU")
    bf16_tflops: float = Field(default=0, ge=0, description="peak dense bf16 rate of one GPU")
    price_per_gpu_hour: float | None = Field(default=None, ge=0, description="for the cost that `jobs describe` shows")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class EngineSettings(ProfileSection):
    """The rollout engine, one replica on `tensor_parallel` GPUs."""

    tensor_parallel: int = Field(default=1, ge=1)
    memory_utilization: float = Field(default=0.7, gt=0, le=1, description="share of HBM for weights and KV cache")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    eager: bool = False
    max_sequences: int = Field(default=256, ge=1, description="sequences decoded together by one replica")
    kv_cache_dtype_bytes: int = Field(default=2, ge=1)


class Parallelism(ProfileSection):
    """The training engine: FSDP over all GPUs, with sequences split over `sequence_parallel` of them."""

    fsdp_size: int = Field(default=-1, description="GPUs over which weights are sharded; -1 is all")
    sequence_parallel: int = Field(default=1, ge=1)
    offload_params: bool = False
    offload_optimizer: bool = False
    tokens_per_gpu: int = Field(default=16_384, ge=1, description="tokens of one micro-batch on one GPU")


class Measured(ProfileSection):
    """Efficiencies by which the time estimate multiplies peak rates. A profile should state their source."""

    training_mfu: float = Field(default=0.35, gt=0, le=1)
    decode_bandwidth_share: float = Field(default=0.5, gt=0, le=1)
    prefill_mfu: float = Field(default=0.4, gt=0, le=1)
    network_gb_per_s: float = Field(
        default=25, gt=0, description="collectives between nodes, per GPU, in one direction"
    )
    overlap: float = Field(default=0.7, ge=0, le=1, description="share of collectives that computation can hide")
    weight_sync_gb_per_s: float = Field(default=4, gt=0, description="new weights from the trainer to the engines")
    link_gb_per_s: float = Field(default=150, gt=0, description="collectives inside a node, per GPU, in one direction")


class SandboxSettings(ProfileSection):
    """Where tool calls run. With `redis: true`, the job starts Redis, the sandbox service and its workers, and the
    recipe's calls are sent to it. A recipe that sets `sandbox.url` uses its own service.
    """

    workers_per_node: int = Field(default=0, ge=0, description="workers that the job starts on a node; 0: one per CPU")
    redis: bool = False
    call_s: float = Field(default=0.3, gt=0, description="mean seconds of a call, including queueing")


class Storage(ProfileSection):
    """Folders that every node sees under the same path. Relative paths of a recipe are looked up in them (`resolve_recipe_paths`)."""

    runs: str = "runs"
    models: str = "models"
    data: str = "data"


class Slurm(ProfileSection):
    partition: str | None = None
    account: str | None = None
    time: str = "24:00:00"
    options: list[str] = Field(default_factory=list, description="additional #SBATCH options, such as --gres=gpu:8")
    setup: list[str] = Field(default_factory=list, description="shell lines to run first: modules, environment")
    requeue_before_s: int = Field(
        default=600, ge=0, description="stop and requeue the job this long before its wall time; 0: never"
    )


class Ssh(ProfileSection):
    """The login host of a remote cluster. Keys, agents and aliases come from the user's OpenSSH configuration."""

    host: str | None = Field(default=None, description="host name, HOST alias of ~/.ssh/config, or USER@HOST")
    user: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    jump: str | None = Field(default=None, description="jump host, in the format of `ssh -J`")
    config: str | None = Field(default=None, description="OpenSSH configuration file instead of ~/.ssh/config")
    remote_dir: str = Field(default="rstar-lab", description="folder for code and jobs, relative to the remote home")
    backend: Literal["local", "ray", "slurm"] = Field(default="slurm", description="backend of the job on the host")
    python: str = Field(default="python3", description="interpreter on the host that has the package's dependencies")
    setup: list[str] = Field(default_factory=list, description="shell lines to run first: modules, environment")


class KubeRay(ProfileSection):
    """Kubernetes with the KubeRay operator. The job's pods run `container`; `hardware` determines their number and size."""

    context: str | None = Field(default=None, description="context of the kubeconfig file; default: the current one")
    namespace: str | None = Field(default=None, description="default: that of the context")
    claim: str = Field(default="rstar-lab-shared", description="PersistentVolumeClaim with the folders of `storage`")
    mount: str = Field(default="/shared", description="where the pods mount the claim")
    secret: str = Field(default="rstar-lab", description="Secret that has the variables of `secrets` as keys")
    sandbox_url: str = Field(
        default="http://rstar-lab-sandbox:8088", description="sandbox service of jobs, if `sandbox.redis` is true"
    )


class Profile(ProfileSection):
    """A machine and its settings."""

    name: str
    description: str
    backend: Literal["local", "ray", "slurm", "ssh", "kuberay"]
    trainer: Literal["local", "verl"]
    hardware: Hardware
    engine: EngineSettings = EngineSettings()
    parallelism: Parallelism = Parallelism()
    measured: Measured = Measured()
    sandbox: SandboxSettings = SandboxSettings()
    storage: Storage = Storage()
    env: dict[str, str] = Field(default_factory=dict, description="environment of every process of the job")
    secrets: list[str] = Field(default_factory=list, description="names of secret variables to forward to the job")
    container: str | None = Field(
        default=None,
        description="image in which Slurm, Ray and Kubernetes run the job's processes; default: directly on the nodes",
    )
    slurm: Slurm = Slurm()
    ssh: Ssh = Ssh()
    kuberay: KubeRay = KubeRay()


def load_profile(name: str | Path) -> Profile:
    """Return a profile by name (cluster/profiles/NAME.yaml) or by path.

    Raises UserError for an unknown name or key, with the nearest known one.
    """
    path = profile_file(name)
    return parse_profile(path.read_text(encoding="utf-8", errors="replace"), str(path))


def profile_file(name: str | Path) -> Path:
    """Return the file of a profile, given by name or path. Raises UserError for an unknown name."""
    path = Path(name)
    if path.suffix != ".yaml":
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = profile_names()
        near = difflib.get_close_matches(str(name), known, 1)
        raise UserError(
            f"no profile {name!r}{f', did you mean {near[0]!r}?' if near else ''}; choose one of {', '.join(known)}"
        )
    return path


def parse_profile(text: str, source: str) -> Profile:
    """Return the profile in a YAML text. source: where it comes from, for the error message. Raises UserError."""
    content = parse_yaml(text, source)
    if not isinstance(content, dict):
        raise UserError(f"{source}: expected a mapping of profile keys")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from error


def profile_names() -> list[str]:
    """Return the names of the profiles that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _explain(error: ValidationError) -> str:
    schema = Profile.model_json_schema()
    known = sorted({name for section in (schema, *schema["$defs"].values()) for name in section["properties"]})
    lines = []
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        text = f"{key}: {problem['msg']}"
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
            text = f"unknown key {key!r}{f', did you mean {near[0]!r}?' if near else ''}"
        lines.append(text)
    return "; ".join(lines)


def resolve_recipe_paths(data: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Return a copy of a recipe's YAML content (or of dotted overrides) with resolved `model` and `file` entries.

    | recipe | on a cluster (profile `storage`) | on this machine |
    |---|---|---|
    | `model: Qwen/Qwen3-14B-Base` | `MODELS/Qwen/Qwen3-14B-Base`, else `MODELS/Qwen3-14B-Base` | the folder, else under `storage.models` |
    | `file: data/rl/train.parquet` | `DATA/rl/train.parquet` | the file, else under `storage.data` |

    `tiny`, URLs and absolute paths stay as they are.
    """
    return {key: _resolve(key, value, profile) for key, value in data.items()}


def resolve_model(model: str, profile: Profile) -> str:
    """Return the folder of a model, or `model` itself if no folder is meant."""
    path, root = Path(model), Path(profile.storage.models)
    if model == "tiny" or path.is_absolute() or "://" in model:
        return model
    return _first_existing(model, [root / _without(path, "models"), root / path.name], profile)


def resolve_file(file: str, profile: Profile) -> str:
    """Return the path of a data file; a name without a suffix, such as `openai/gsm8k:test`, is that of a data set."""
    path = Path(file)
    if path.is_absolute() or not path.suffix:
        return file
    return _first_existing(file, [Path(profile.storage.data) / _without(path, "data")], profile)


def _resolve(key: str, value: Any, profile: Profile) -> Any:
    name = key.rpartition(".")[2]
    if isinstance(value, Mapping):
        return {inner: _resolve(inner, item, profile) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve("", item, profile) for item in value]
    if isinstance(value, str | Path):
        if key == "model":
            return resolve_model(str(value), profile)
        if name == "file":
            return resolve_file(str(value), profile)
    return value


def _first_existing(name: str, stored: list[Path], profile: Profile) -> str:
    """Return the first existing path. On a cluster only the storage folders are searched, because other nodes may not see the
    current folder; a path that does not exist there is an error, which preflight reports. On this machine the name is kept."""
    candidates, default = ([Path(name), *stored], name) if profile.backend == "local" else (stored, str(stored[-1]))
    return next((str(candidate.absolute()) for candidate in candidates if candidate.exists()), default)


def _without(path: Path, folder: str) -> Path:
    return Path(*path.parts[1:]) if len(path.parts) > 1 and path.parts[0] == folder else path
