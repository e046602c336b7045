"""The values of `isolation`, and the class that runs calls with each."""

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
