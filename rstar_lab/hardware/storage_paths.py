"""Resolve the relative paths of a recipe against the storage folders of a hardware profile.

| recipe | on a cluster (profile `storage`) | on this machine |
|---|---|---|
| `model: Qwen/Qwen3-14B-Base` | `MODELS/Qwen/Qwen3-14B-Base`, else `MODELS/Qwen3-14B-Base` | the folder, else under `storage.models` |
| `file: data/rl/train.parquet` | `DATA/rl/train.parquet` | the file, else under `storage.data` |

`tiny`, URLs and absolute paths stay as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rstar_lab.hardware.profiles import Profile


def resolve_recipe_paths(data: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Return a copy of a recipe's YAML content (or of dotted overrides) with resolved `model` and `file` entries."""
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
