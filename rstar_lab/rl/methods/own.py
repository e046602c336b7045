"""A method of the user."""

from rstar_lab.rl.methods.method import Method
from rstar_lab.rl.section import Function


class OwnMethod(Method):
    """Advantages by your own function (docs/extending.md)."""

    type: Function
    """Your own `module:function` of (rewards, trajectories) that returns one advantage per rollout."""
