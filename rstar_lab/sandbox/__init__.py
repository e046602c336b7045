"""Runs model-written Python in isolated processes: on this machine (LocalSandbox) or on a service (SandboxClient)."""

# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.sandbox.call import Call, CallResult
    from rstar_lab.sandbox.client import SandboxClient
    from rstar_lab.sandbox.limits import Limits
    from rstar_lab.sandbox.local import LocalSandbox

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
