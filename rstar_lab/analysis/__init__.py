"""Dataframes, metrics, figures and the inspector over the run store. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar_lab.analysis.runs import Runs, open_runs

_HOMES = {
    "Runs": "runs",
    "open_runs": "runs",
}

__all__ = ["Runs", "open_runs"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
