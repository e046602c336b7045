"""Models and runs on the Hugging Face Hub: `rstar-lab push` and `rstar-lab pull`.

A model becomes a model repository and a run becomes a data set, each with a card written from the run store. Only data is
sent and fetched: safetensors, JSON, text and Parquet, by exact names; never pickles, Python files or links.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import yaml
from huggingface_hub import (
    CardData,
    CommitOperationAdd,
    DatasetCard,
    DatasetCardData,
    HfApi,
    ModelCard,
    ModelCardData,
    RepoCard,
    snapshot_download,
)

from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import format_interval
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.info import plain_info
from rstar_lab.runs.reader import RunReader, check_file
from rstar_lab.untrusted.parquet import read_footer
from rstar_lab.untrusted.text import counted

Kind = Literal["model", "run"]
REPO_TYPES = {"model": "model", "run": "dataset"}
# Exact names: a pattern such as `tokenizer*` would also match Python files and pickles.
MODEL_FILE = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|(adapter_)?model\.safetensors\.index\.json"
    r"|(generation_|adapter_|tokenizer_|preprocessor_|processor_)?config\.json"
    r"|tokenizer\.(json|model)|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
    r"|special_tokens_map\.json|added_tokens\.json"
)
RUN_FILE = re.compile(
    r"run\.json|metrics\.jsonl|rollup\.parquet|tokens\.json|difficulty/stage=[A-Za-z0-9][A-Za-z0-9._-]*\.parquet"
    r"|(trajectories|calls|transcripts)/stage=[A-Za-z0-9][A-Za-z0-9._-]*/steps?=\d+(-\d+)?\.parquet"
)
TABLES = ("trajectories", "calls", "transcripts")


@dataclass(frozen=True)
class Upload:
    """What `push` sends. files: path in the repository -> local file, or content of the file."""

    kind: Kind
    files: dict[str, Path | bytes]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in self.files.values())


def prepare(folder: Path) -> Upload:
    """Return the files to upload for a folder, with a card. folder: folder of a run, a model or an adapter. run.json is
    sent without the host name, and absolute paths are reduced to their last part.
    Raises UserError for another folder, or a run without steps.
    """
    for name in ("run.json", "metrics.jsonl", "config.json", "adapter_config.json"):
        if (folder / name).is_symlink():
            raise UserError(
                f"{folder / name} is a link: only files of the folder are sent. Copy the folder with `cp -rL` first"
            )
    if (folder / "run.json").is_file():
        reader = RunReader(folder)
        if not reader.steps():
            raise UserError(f"run {reader.run_id} has no steps yet")
        info = plain_info(reader.info)
        info["hardware"] = {key: value for key, value in (info.get("hardware") or {}).items() if key != "host"}
        info["recipe"] = _without_paths(info["recipe"])
        files = _matching(folder, RUN_FILE)
        return Upload("run", files | {"run.json": json.dumps(info, indent=1).encode(), "README.md": _data_card(reader)})
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{folder} is neither a run (run.json) nor a model (config.json)")
    files = _matching(folder, MODEL_FILE)
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"{folder} has no weights in safetensors format")
    return Upload("model", files | {"README.md": _model_card(folder)})


def push(upload: Upload, repo: str, *, public: bool = False) -> str:
    """Create the repository if needed, and send all files in one commit. Returns its URL. public: applies to a new
    repository only. The token is read from `hf auth login` or the environment variable HF_TOKEN. Raises UserError if
    the Hub rejects the upload.
    """
    api, repo_type = HfApi(), REPO_TYPES[upload.kind]
    with _hub_errors(f"push to {repo}"):
        url = api.create_repo(repo, repo_type=repo_type, private=not public, exist_ok=True)
        files = [CommitOperationAdd(name, file) for name, file in upload.files.items()]
        api.create_commit(repo, files, commit_message="Upload with rstar-lab push", repo_type=repo_type)
    return str(url)


def pull(repo: str, folder: Path, *, revision: str | None = None) -> tuple[Kind, Path]:
    """Fetch a run into `folder`/<its id>, or a model into `folder`/<name of the repository>. Returns its kind and folder.

    A data-set repository with a run.json is a run. The target appears only when all files are complete. Raises
    UserError if the repository is not found, contains neither a run nor a model, or if the target exists.
    """
    api = HfApi()
    folder.mkdir(parents=True, exist_ok=True)
    with _hub_errors(f"pull of {repo}"), tempfile.TemporaryDirectory(dir=folder, prefix=".hub-") as temporary:
        fetched = Path(temporary) / "data"
        is_run = api.repo_exists(repo, repo_type="dataset")
        place: dict[str, Any] = {"repo_type": "dataset" if is_run else "model", "revision": revision}
        names = RUN_FILE if is_run else MODEL_FILE
        if not (wanted := [name for name in api.list_repo_files(repo, **place) if names.fullmatch(name)]):
            raise UserError(f"{repo} has neither a run nor a model in safetensors format")
        snapshot_download(repo, allow_patterns=wanted, local_dir=fetched, **place)
        shutil.rmtree(fetched / ".cache", ignore_errors=True)
        if not is_run and not (any(fetched.glob("*config.json")) and any(fetched.glob("*.safetensors"))):
            raise UserError(f"{repo} has no model in safetensors format")
        target = folder / (RunReader(fetched).run_id if is_run else repo.split("/")[-1])
        if target.parent != folder or target.exists():
            raise UserError(f"{target} exists already: choose another --to")
        fetched.rename(target)
    return ("run" if is_run else "model"), target


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # huggingface_hub has many kinds of errors, and also raises those of its HTTP library
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        network = isinstance(error, ConnectionError) or "connect" in type(error).__name__.lower()
        hint = "; check the network, or HF_ENDPOINT if you use a mirror" if network else ""
        raise UserError(f"{what} failed: {reason}{hint}") from error


def _matching(folder: Path, names: re.Pattern[str]) -> dict[str, Path | bytes]:
    """Return the files of a folder with these names, by their path in it. Links are left out: they could name any file of
    this machine. Raises RunStoreError for a table of a run that is damaged or another table."""
    found: dict[str, Path | bytes] = {}
    for parent, _, files in os.walk(folder):  # does not follow links
        for path in (Path(parent, file) for file in files):
            name = path.relative_to(folder).as_posix()
            if names.fullmatch(name) and path.is_file() and not path.is_symlink():
                if (level := name.partition("/")[0]) in TABLES:
                    check_file(path, level)
                found[name] = path
    return dict(sorted(found.items()))


# Cards, from the templates beside this module


def _model_card(folder: Path) -> bytes:
    """Return the card of a model: base model, training, evaluations and chat format."""
    run = next((RunReader(parent) for parent in folder.resolve().parents if (parent / "run.json").is_file()), None)
    data = ModelCardData(library_name="transformers", tags=["rstar_lab", "tool-use", "reinforcement-learning"])
    if run is None:
        return _card(ModelCard, data, None, title=folder.name)
    step, base = folder.name.removeprefix("step="), Path(str(run.info["recipe"].get("model"))).name
    step = f", step {int(step)}" if step.isdecimal() else ""
    return _card(ModelCard, data, run, title=run.run_id, step=step, base=base, evaluations=_evaluations(run, folder))


def _data_card(run: RunReader) -> bytes:
    """Return the card of a run: its tables for the data-set viewer, its last step, its recipe and versions."""
    have = [table for table in TABLES if any((run.run_dir / table).rglob("*.parquet"))]
    configs: list[dict[str, Any]] = [{"config_name": table, "data_files": f"{table}/**/*.parquet"} for table in have]
    features: dict[str, Any] = {}
    if configs:
        configs[0]["default"] = True
    if "trajectories" in have:
        # `datasets` has no type for maps, so it can read the table only without the column `metrics`.
        stored = read_footer(run.files("trajectories")[0].path).schema.to_arrow_schema()
        fields = [field for field in stored if not pa.types.is_map(field.type)]
        configs[0]["columns"] = [field.name for field in fields]
        features["dataset_info"] = [{"config_name": "trajectories", "features": [_feature(field) for field in fields]}]
    data = DatasetCardData(tags=["rstar_lab", "tool-use", "rollouts"], configs=configs, **features)
    steps = run.metrics()
    shown = {name: steps[-1].get(name) for name in ("correct", "error_rate_correct", "response_tokens", "rollouts")}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float))
    return _card(DatasetCard, data, run, steps=counted(len(steps), "step"), last=steps[-1], numbers=numbers)


def _card(kind: type[RepoCard], data: CardData, run: RunReader | None, **values: Any) -> bytes:
    if run:
        version = (run.info.get("versions") or {}).get("rstar_lab", "")
        recipe = yaml.safe_dump(_without_paths(run.info["recipe"].for_display()), sort_keys=False).rstrip()
        values |= {"version": f"rstar_lab {version}".rstrip(), "recipe": recipe}
    template = Path(__file__).with_name("model_card.md" if kind is ModelCard else "data_card.md")
    return str(kind.from_template(data, template_path=str(template), run=run, **values)).encode()


def _feature(field: pa.Field) -> dict[str, str]:
    """Return a column as the cards of data sets declare it."""
    listed = pa.types.is_list(field.type)
    kind = str(field.type.value_type if listed else field.type)
    return {
        "name": field.name,
        "list" if listed else "dtype": {"float": "float32", "double": "float64"}.get(kind, kind),
    }


def _evaluations(run: RunReader, folder: Path) -> list[tuple[Any, ...]]:
    """Return the finished evaluations of exactly this model folder, beside its run."""
    rows = []
    for path in sorted(run.run_dir.parent.glob("*/run.json")):
        with contextlib.suppress(*READ_ERRORS):  # of a run that is being written, or of somebody else
            info = RunReader(path.parent).info
            model = (info.get("extra") or {}).get("model")
            if info["kind"] != "evaluate" or info["status"] != "finished" or not model:
                continue
            # Compared as text: to look at a path that a file names could mount a file system of its choice.
            if os.path.normpath(Path(model).absolute()) in (os.path.normpath(folder.absolute()), str(folder.resolve())):
                result = info.get("result") or {}
                counts = int(result["problems"]), int(result["samples"])
                rows.append((info["run_id"], format_interval(result["pass1"]), *counts))
    return rows


def _without_paths(recipe: Any) -> Any:
    """Return a recipe with absolute paths reduced to their last part: full paths have no meaning on other machines."""
    if isinstance(recipe, dict):
        return {key: _without_paths(value) for key, value in recipe.items()}
    if isinstance(recipe, list):
        return [*map(_without_paths, recipe)]
    return Path(recipe).name if isinstance(recipe, str) and recipe.startswith("/") else recipe
