"""Find the folders beside the package: `notebooks` and `cluster`, which an installed wheel contains too, and `benchmarks`, which
only the repository contains."""

import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rstar_lab.common.errors import UserError

_PACKAGE = Path(__file__).parent.parent


def resource_folder(name: str) -> Path:
    """Return the folder `notebooks` or `cluster`: the copy in an installed wheel, else the folder of the source tree."""
    installed = _PACKAGE / "_resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def package_toml(module: str, name: str) -> dict[str, Any]:
    """Return the content of a TOML file of the package. module: `__file__` of a module beside it."""
    return tomllib.loads(Path(module).with_name(name).read_text("utf-8"))


def benchmark_file(name: str) -> Path:
    """Return a file of recorded results in `benchmarks/data`. Raises UserError outside of the repository."""
    return _benchmarks() / "data" / name


def load_benchmark(name: str) -> ModuleType:
    """Import `benchmarks.NAME`. Raises UserError outside of the repository."""
    repository = str(_benchmarks().parent)
    sys.path.insert(0, repository)  # before the current folder, whose `benchmarks` is of somebody else
    try:
        return import_module(f"benchmarks.{name}")
    finally:
        sys.path.remove(repository)


def _benchmarks() -> Path:
    folder = _PACKAGE.parent / "benchmarks"
    if not (folder / "data").is_dir():
        raise UserError(
            "the benchmarks and their recorded results are in the repository only, not in the installed package: clone it, "
            "run `make setup` there, and use its .venv/bin/rstar-lab"
        )
    return folder


def copy_notebooks(target: Path) -> list[Path]:
    """Copy the notebooks into `target` and return the new files. Raises UserError, and copies nothing, if one exists there."""
    sources = sorted(resource_folder("notebooks").glob("[0-9]*.ipynb"))
    if existing := [source.name for source in sources if (target / source.name).exists()]:
        raise UserError(f"{target}: {existing[0]} exists already; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(source, target / source.name)) for source in sources]
