"""The isolations of a sandbox, and the class that runs calls in each."""

from rstar_lab.errors import UserError
from rstar_lab.sandbox.gvisor import GvisorPool
from rstar_lab.sandbox.supervisor_pool import SupervisorPool

Pool = SupervisorPool | GvisorPool  # these classes have the same methods
POOLS: dict[str, type[SupervisorPool] | type[GvisorPool]] = {"namespaces": SupervisorPool, "gvisor": GvisorPool}


def check_isolation(isolation: str) -> str:
    """Return `isolation`. Raises UserError for an unknown one."""
    if isolation not in POOLS:
        raise UserError(f"isolation: {isolation!r} must be one of {', '.join(POOLS)}")
    return isolation
