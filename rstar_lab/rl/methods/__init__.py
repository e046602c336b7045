"""Methods: one file per published method, with its recipe section and its source."""

from typing import Annotated

from rstar_lab.rl.methods.branching import Branching
from rstar_lab.rl.methods.control_tokens import ControlTokens
from rstar_lab.rl.methods.cross_policy import CrossPolicy
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.methods.grpo import Grpo
from rstar_lab.rl.methods.maxrl import Maxrl
from rstar_lab.rl.methods.method import Addition, Method
from rstar_lab.rl.methods.opd import Opd
from rstar_lab.rl.methods.otb import Otb
from rstar_lab.rl.methods.overlong_buffer import OverlongBuffer
from rstar_lab.rl.methods.overlong_filter import OverlongFilter
from rstar_lab.rl.methods.own import OwnMethod
from rstar_lab.rl.methods.reinforce_pp import ReinforcePP
from rstar_lab.rl.methods.repetition import Repetition
from rstar_lab.rl.methods.roc import Roc
from rstar_lab.rl.methods.samplers import EasyFirst, ImprovementPotential, Learnability, Sampler, Thompson
from rstar_lab.rl.methods.sdpo import Sdpo
from rstar_lab.rl.methods.task_normalisation import TaskNormalisation
from rstar_lab.rl.methods.tool_budget import ToolBudget
from rstar_lab.rl.methods.void_turns import VoidTurns
from rstar_lab.rl.section import ByType

AnyMethod = Annotated[Grpo | Maxrl | Otb | ReinforcePP | OwnMethod, ByType()]

__all__ = [
    "Addition",
    "AnyMethod",
    "Branching",
    "ControlTokens",
    "CrossPolicy",
    "EasyFirst",
    "Echo",
    "Grpo",
    "ImprovementPotential",
    "Learnability",
    "Maxrl",
    "Method",
    "Opd",
    "Otb",
    "OverlongBuffer",
    "OverlongFilter",
    "OwnMethod",
    "ReinforcePP",
    "Repetition",
    "Roc",
    "Sampler",
    "Sdpo",
    "TaskNormalisation",
    "Thompson",
    "ToolBudget",
    "VoidTurns",
]
