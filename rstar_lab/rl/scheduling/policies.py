"""The dispatch policies by name."""

from rstar_lab.rl.scheduling.adaptive import Adaptive
from rstar_lab.rl.scheduling.base import DispatchPolicy
from rstar_lab.rl.scheduling.baselines import KvCapacity, LeastInFlight, Static, TurnBarrier
from rstar_lab.rl.scheduling.lengths import LengthPredictor

POLICIES = ("turn-barrier", "static", "least-in-flight", "kv", "adaptive")


def make_policy(name: str, *, max_context: int, predictor: LengthPredictor) -> DispatchPolicy:
    """Return a new policy by its name. max_context: tokens of the longest prompt plus response; predictor: used by `adaptive`."""
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
