"""Dataframes, metrics, figures and the inspector over the run store. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar_lab.analysis.inspector import Inspector, inspect
    from rstar_lab.analysis.inspector_link import LinkedFigure, explore, link
    from rstar_lab.analysis.inspector_watch import watch
    from rstar_lab.analysis.runs import Runs, open_runs

_HOMES = {
    "Inspector": "inspector",
    "LinkedFigure": "inspector_link",
    "Runs": "runs",
    "explore": "inspector_link",
    "inspect": "inspector",
    "link": "inspector_link",
    "open_runs": "runs",
    "watch": "inspector_watch",
}

__all__ = ["Inspector", "LinkedFigure", "Runs", "explore", "inspect", "link", "open_runs", "watch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
