"""Methods: one file per published method, with its recipe section and its source."""

from typing import Annotated

from rstar_lab.rl.methods.grpo import Grpo
from rstar_lab.rl.methods.maxrl import Maxrl
from rstar_lab.rl.methods.otb import Otb
from rstar_lab.rl.methods.reinforce_pp import ReinforcePP
from rstar_lab.rl.methods.user import UserMethod
from rstar_lab.rl.section import ByType

AnyMethod = Annotated[Grpo | Maxrl | Otb | ReinforcePP | UserMethod, ByType()]
