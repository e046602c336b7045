"""The dispatch policies by name."""

from rstar_lab.errors import UserError
from rstar_lab.rl.plugins import NAME, load_function
from rstar_lab.rl.scheduling.adaptive import Adaptive
from rstar_lab.rl.scheduling.base import DispatchPolicy
from rstar_lab.rl.scheduling.baselines import KvCapacity, LeastInFlight, Static, TurnBarrier
from rstar_lab.rl.scheduling.lengths import LengthPredictor

POLICIES = ("turn-barrier", "static", "least-in-flight", "kv", "adaptive")


def make_policy(name: str, *, max_context: int, predictor: LengthPredictor) -> DispatchPolicy:
    """Return a new policy by its name, or from the user's own `module:Class`, which is called without arguments.

    max_context: prompt plus response of the longest rollout, in tokens; used by `kv`. predictor: used by `adaptive`.
    Raises UserError if the user's object is not a dispatch policy, and ValueError for an unknown name.
    """
    if NAME.fullmatch(name):
        policy = load_function(name, "engine.scheduler", ())()
        if missing := [method for method in ("ready", "finished", "dispatch") if not hasattr(policy, method)]:
            raise UserError(
                f"engine.scheduler: {name} has no {', '.join(missing)} (see DispatchPolicy in scheduling/base.py)"
            )
        return policy
    match name:
        case "turn-barrier":
            return TurnBarrier()
        case "static":
            return Static()
        case "least-in-flight":
            return LeastInFlight()
        case "kv":
            return KvCapacity(max_context)
        case "adaptive":
            return Adaptive(predictor)
    raise ValueError(f"engine.scheduler: unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
