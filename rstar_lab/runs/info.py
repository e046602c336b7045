"""The content of run.json and mirror.json, with the types that readers rely on."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.schema import SCHEMA_VERSION, is_valid_name
from rstar_lab.untrusted.files import read_json
from rstar_lab.untrusted.recipes import ForeignRecipe

MIRROR_FILE = "mirror.json"  # file in a copied run: the host, the run's status there, and the time of the last pull
State = Literal["running", "finished", "failed", "stopped"]


def check_version(version: Any) -> int:
    """Return a schema version that this package reads. Raises ValueError."""
    if type(version) is not int or version < 1:
        raise ValueError(f"it has the invalid schema version {version!r}; it is not a file of a run store")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"it has schema version {version}; this version of rstar_lab reads up to {SCHEMA_VERSION}: upgrade rstar_lab"
        )
    return version


def _name(text: str) -> str:
    if not is_valid_name(text):
        raise ValueError(f"{text[:80]!r} is not a valid name of a run")
    return text


def _time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _recipe(recipe: Any) -> ForeignRecipe:
    if not isinstance(recipe, dict | None):
        raise ValueError("it must be an object")
    return ForeignRecipe(recipe or {})


Time = Annotated[str, AfterValidator(_time)]


class RunInfo(TypedDict, total=False):
    """run.json. Other keys are kept."""

    __pydantic_config__ = ConfigDict(extra="allow", arbitrary_types_allowed=True)  # type: ignore[misc]

    schema_version: Required[Annotated[int, PlainValidator(check_version)]]
    run_id: Required[Annotated[str, AfterValidator(_name)]]
    kind: Required[str]
    status: Required[State]
    created: Time | None
    started: str | None
    ended: Time | None
    attempts: Annotated[int, Field(ge=0, lt=2**15, strict=True)] | None  # the type of the column `attempt`
    seed: int | None
    parent: dict[str, Any] | None
    recipe: Annotated[ForeignRecipe, PlainValidator(_recipe)]
    commit: str | None
    versions: dict[str, Any] | None
    hardware: dict[str, Any] | None
    extra: dict[str, Any] | None
    result: dict[str, Any] | None
    error: str | None


class Mirror(TypedDict):
    """mirror.json. Nothing in the file leads to a connection."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    status: State | Literal["interrupted"]
    host: NotRequired[str | None]


def read_info(run_dir: Path) -> RunInfo:
    """Return the content of run.json. Raises RunStoreError if there is none, and DataError if it is damaged."""
    path = run_dir / "run.json"
    if not path.exists():
        raise RunStoreError(f"{run_dir} is not a run: it has no run.json")
    info = read_json(path, RunInfo)
    info.setdefault("recipe", ForeignRecipe({}))
    return info


def plain_info(info: RunInfo) -> dict[str, Any]:
    """Return the content of run.json as JSON types, to print or store it."""
    return {**info, "recipe": info["recipe"].for_display()}


def read_mirror(run_dir: Path) -> Mirror | None:
    """Return the content of mirror.json if the run is a copy of a run on another host, else None. Raises DataError."""
    path = run_dir / MIRROR_FILE
    hint = "; move this folder away, then copy the run again with `rstar-lab jobs pull JOB`"
    return read_json(path, Mirror, hint=hint) if path.exists() else None
