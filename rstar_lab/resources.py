"""Find the folders `notebooks` and `cluster`, which are inside an installed package but beside it in the source
tree."""

import shutil
from pathlib import Path

from rstar_lab.errors import UserError

_PACKAGE = Path(__file__).parent


def resource_folder(name: str) -> Path:
    """Return the folder `notebooks` or `cluster`: the copy in an installed wheel, else the folder of the source
    tree."""
    installed = _PACKAGE / "_resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def copy_notebooks(target: Path, *, overwrite: bool = False) -> list[Path]:
    """Copy the notebooks into `target` and return the new files.

    Raises UserError, and copies nothing, if a notebook of that name exists and `overwrite` is false.
    """
    sources = sorted(resource_folder("notebooks").glob("[0-9]*.ipynb"))
    existing = [source.name for source in sources if (target / source.name).exists()]
    if existing and not overwrite:
        raise UserError(f"{target}: {existing[0]} exists already; choose another folder or add --overwrite")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; give a folder")
    target.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(source, target / source.name)) for source in sources]
