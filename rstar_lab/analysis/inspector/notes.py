"""Notes and tags on trajectories, and saved views of the inspector, stored in the run's folder."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from rstar_lab.analysis.filters import has_sql
from rstar_lab.common.errors import UserError
from rstar_lab.runs.files import atomic_write, lock_file
from rstar_lab.untrusted.files import parse_json, read_json, read_text, reading

NOTES = "notes.jsonl"


class Note(TypedDict):
    """A line of the file of notes."""

    traj_id: str
    note: NotRequired[str]
    tags: NotRequired[list[str]]
    time: NotRequired[str]


def read_notes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the notes of a run: traj_id to {traj_id, note, tags, time}. Raises UserError for a line that is not valid."""
    path = Path(run_dir) / NOTES
    notes: dict[str, dict[str, Any]] = {}
    text = read_text(path) if path.exists() else ""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}: not a note"
            with reading(where, "; correct or delete the line"):
                entry = parse_json(line, where, Note)
            notes[entry["traj_id"]] = {"note": "", "tags": [], "time": "", **entry}
    return notes


def write_note(run_dir: Path, traj_id: str, note: str, tags: Sequence[str]) -> dict[str, Any]:
    """Set the note and tags of one trajectory and return the entry. Empty note and tags remove it.

    A file lock keeps the notes of concurrent writers.
    """
    time, own_tags = datetime.now(UTC).isoformat(timespec="seconds"), sorted({tag.strip() for tag in tags} - {""})
    entry = {"traj_id": traj_id, "note": note.strip(), "tags": own_tags, "time": time}
    with lock_file(Path(run_dir) / f".{NOTES}.lock"):
        notes = read_notes(run_dir)
        notes.pop(traj_id, None)
        if entry["note"] or entry["tags"]:
            notes[traj_id] = entry
        with atomic_write(Path(run_dir) / NOTES) as file:
            for kept in notes.values():
                file.write((json.dumps(kept, ensure_ascii=True) + "\n").encode())
    return entry


VIEWS = "views.json"


class View(TypedDict):
    """A saved view: traits of the inspector."""

    filters: dict[str, Any]
    scope: dict[str, Any]
    sort: list[Any]
    columns: list[Any]


def read_views(folder: Path) -> dict[str, View]:
    """Return the views stored in a folder: name to filters, scope, sort and columns. Raises UserError for an invalid file."""
    hint = "; it is not a file of saved views: correct or delete it"
    path = folder / VIEWS
    return read_json(path, dict[str, View], hint=hint) if path.exists() else {}


def write_view(folder: Path, name: str, view: View | None) -> None:
    """Store a view, replacing one of the same name. None deletes it. A file lock keeps the views of concurrent writers."""
    if not name.strip():
        raise UserError("a view needs a name")
    if view is not None:
        check_view(name, view)
    with lock_file(folder / f".{VIEWS}.lock"):
        views = read_views(folder)
        views.pop(name.strip(), None)
        if view is not None:
            views[name.strip()] = view
        with atomic_write(folder / VIEWS) as file:
            file.write((json.dumps(views, indent=1) + "\n").encode())


def is_typed(view: View) -> bool:
    """Return whether the filters of a view contain no SQL text, which is typed in a session and not read from a file."""
    return not has_sql(view["filters"]) and not has_sql(view["scope"].get("filter"))


def check_view(name: str, view: View) -> None:
    """Raise UserError if the filters of a view contain SQL text."""
    if not is_typed(view):
        hint = "views store the other filters; keep the condition in the notebook"
        raise UserError(f"view {name!r} contains an SQL condition: {hint}")
