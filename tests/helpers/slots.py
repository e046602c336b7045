"""Engine slots over engines of a test."""

from collections.abc import Mapping

from rstar_lab.rl.engine import Engine
from rstar_lab.rl.scheduling.base import DispatchPolicy
from rstar_lab.rl.scheduling.policies import LeastInFlight
from rstar_lab.rl.scheduling.scheduler import Scheduler
from rstar_lab.rl.scheduling.slots import ScheduledSlots


def scheduled(
    engines: Mapping[str, Engine], policy: DispatchPolicy | None = None, kv_tokens: int = 10**6
) -> ScheduledSlots:
    """Return slots whose turns are sent to `engines` by a policy. Default: least in flight."""
    scheduler = Scheduler(lambda: policy or LeastInFlight(), max_tokens=kv_tokens, patience_s=0)
    for name in engines:
        scheduler.add_server(name, kv_tokens)
    return ScheduledSlots(scheduler, engines)
