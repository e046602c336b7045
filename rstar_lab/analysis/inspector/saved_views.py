"""Saved views of the inspector: named filters, order and columns of the list, stored in `views.json`."""

import json
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.runs.files import atomic_write, lock_file, read_text

VIEWS = "views.json"
PARTS = ("filters", "scope", "sort", "columns")  # traits of the inspector that a view consists of
View = dict[str, Any]


def read_views(folder: Path) -> dict[str, View]:
    """Return the views stored in a folder: name to filters, scope, sort and columns. Raises UserError for an invalid file."""
    path = folder / VIEWS
    try:
        stored = json.loads(read_text(path))
        return {str(name): _checked(view) for name, view in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a file of saved views ({error}); correct or delete it") from error


def write_view(folder: Path, name: str, view: View | None) -> None:
    """Store a view, replacing one of the same name. None deletes it. A file lock keeps the views of concurrent writers."""
    if not name.strip():
        raise UserError("a view needs a name")
    with lock_file(folder / f".{VIEWS}.lock"):
        views = read_views(folder)
        views.pop(name.strip(), None)
        if view is not None:
            views[name.strip()] = {part: view[part] for part in PARTS}
        with atomic_write(folder / VIEWS) as file:
            file.write((json.dumps(views, indent=1) + "\n").encode())


def _checked(view: View) -> View:
    """Return the parts of a stored view. Raises ValueError unless each has the type of its trait."""
    parts = {part: view[part] for part in PARTS}
    for part, kind in zip(PARTS, (dict, dict, list, list), strict=True):
        if not isinstance(parts[part], kind):
            raise ValueError(f"{part} must be a {kind.__name__}")
    return parts
