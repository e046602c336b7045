"""Runs model-written Python in isolated processes: on this machine (LocalSandbox) or on a service (SandboxClient)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rstar_lab.sandbox.call import Call, CallResult
    from rstar_lab.sandbox.client import SandboxClient
    from rstar_lab.sandbox.limits import Limits
    from rstar_lab.sandbox.local import LocalSandbox

__all__ = ["Call", "CallResult", "Limits", "LocalSandbox", "SandboxClient"]

_HOMES = {"Call": "call", "CallResult": "call", "Limits": "limits", "LocalSandbox": "local", "SandboxClient": "client"}


def __getattr__(name: str) -> Any:
    # Imported lazily, because zygotes import this package and must stay small.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
