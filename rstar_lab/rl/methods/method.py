"""Keys that all methods share: the policy loss of a step and the methods that are added to it."""

from typing import Annotated, TypeVar, get_args

from pydantic import Field, field_validator

from rstar_lab.rl.algorithm.config import Aggregation, Variant
from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.methods.base import MethodSection
from rstar_lab.rl.methods.branching import Branching
from rstar_lab.rl.methods.control_tokens import ControlTokens
from rstar_lab.rl.methods.cross_policy import CrossPolicy
from rstar_lab.rl.methods.echo import Echo
from rstar_lab.rl.methods.opd import Distillation, Opd
from rstar_lab.rl.methods.overlong_buffer import OverlongBuffer
from rstar_lab.rl.methods.overlong_filter import OverlongFilter
from rstar_lab.rl.methods.repetition import Repetition
from rstar_lab.rl.methods.roc import Roc
from rstar_lab.rl.methods.samplers import EasyFirst, ImprovementPotential, Learnability, Sampler, Thompson
from rstar_lab.rl.methods.sdpo import Sdpo
from rstar_lab.rl.methods.task_normalisation import TaskNormalisation
from rstar_lab.rl.methods.tool_budget import ToolBudget
from rstar_lab.rl.methods.void_turns import VoidTurns
from rstar_lab.rl.section import ByType, Function

Added = TypeVar("Added", bound=MethodSection)
# In the order in which their hooks are called.
Addition = Annotated[
    OverlongBuffer | Repetition | ToolBudget | TaskNormalisation | OverlongFilter | VoidTurns | ControlTokens | Echo | Opd | Sdpo
    | Branching | CrossPolicy | EasyFirst | ImprovementPotential | Learnability | Thompson,
    ByType(required=True),
]  # fmt: skip

EXCLUSIONS = tuple(kind.excluded for kind in get_args(get_args(Addition)[0]) if kind.excluded != MethodHooks.excluded)


class Method(MethodSection):
    """How rollouts become an update: selection, advantages and loss."""

    roc: Roc = Roc()
    """Resampling on correct: which rollouts are trained on."""
    loss: Variant | Function = "grpo"
    """Policy loss. Default: paper. `gspo`: arXiv 2507.18071. `cispo`: 2506.13585. `clip_cov`, `kl_cov`: 2505.22617. Or your own
    `module:function` (docs/extending.md)."""
    clip_low: float = 0.2
    """Lower clip range of the importance ratio; without effect on the first mini-batch, whose ratio is 1. Default: paper, section
    2.2.1."""
    clip_high: float = 0.28
    """Upper clip range of the importance ratio (clip-higher of DAPO). Default: paper, section 2.2.1."""
    aggregation: Aggregation = "token-mean"
    """How token losses are averaged. `token-mean`: over the batch (as verl). `group-token-mean`: over each group (the paper's
    objective). `seq-mean-token-sum-norm`: Dr.GRPO."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the KL (k3 estimator) to the model at the start of the stage. Default: paper."""
    add: tuple[Addition, ...] = ()
    """Methods to add, such as `[{type: echo, weight: 0.1}]`. Default: none (paper)."""

    def added(self, kind: type[Added]) -> Added | None:
        """Return the added method whose section is of class `kind`, or None."""
        return next((addition for addition in self.add if isinstance(addition, kind)), None)

    @property
    def parts(self) -> tuple[MethodSection, ...]:
        """All methods of the section: resampling, the method itself, and those that are added, in the order of their hooks."""
        order = get_args(get_args(Addition)[0])
        return self.roc, self, *sorted(self.add, key=lambda addition: order.index(type(addition)))

    @field_validator("add")
    @classmethod
    def _check_additions(cls, additions: tuple[Addition, ...]) -> tuple[Addition, ...]:
        types = [addition.type for addition in additions]
        if twice := next((name for name in types if types.count(name) > 1), None):
            raise ValueError(f"{twice} is given twice; remove one")
        for kind, problem in ((Sampler, "both choose the problems of a step"), (Distillation, "cannot be combined")):
            same = sorted(addition.type for addition in additions if isinstance(addition, kind))
            if len(same) > 1:
                raise ValueError(f"{same[0]} and {same[1]} {problem}; remove one")
        return additions
