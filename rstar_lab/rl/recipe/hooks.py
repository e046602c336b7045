"""The methods of a recipe section as hooks. The only place that knows which keys select which method."""

from typing import TYPE_CHECKING, Any

from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.methods.control_tokens import ControlTokens, ControlTokensHooks
from rstar_lab.rl.methods.echo import Echo, EchoHooks
from rstar_lab.rl.methods.grpo import Grpo, GrpoHooks
from rstar_lab.rl.methods.maxrl import Maxrl, MaxrlHooks
from rstar_lab.rl.methods.opd import Opd, OpdHooks
from rstar_lab.rl.methods.otb import Otb, OtbHooks
from rstar_lab.rl.methods.overlong_buffer import OverlongBuffer, OverlongBufferHooks
from rstar_lab.rl.methods.overlong_filter import OverlongFilter, OverlongFilterHooks
from rstar_lab.rl.methods.own import own_hooks
from rstar_lab.rl.methods.repetition import Repetition, RepetitionHooks
from rstar_lab.rl.methods.roc import RocHooks
from rstar_lab.rl.methods.sdpo import Sdpo, SdpoHooks
from rstar_lab.rl.methods.task_normalisation import TaskNormalisation, TaskNormalisationHooks
from rstar_lab.rl.methods.tool_budget import ToolBudget, ToolBudgetHooks
from rstar_lab.rl.methods.void_turns import VoidTurns, VoidTurnsHooks
from rstar_lab.rl.recipe.functions import own_penalty, own_rule
from rstar_lab.rl.section import is_own

if TYPE_CHECKING:
    from rstar_lab.rl.recipe.rl import RlSection


def roc_hooks(rl: "RlSection") -> RocHooks:
    """Return the selection of rollouts. Loads the functions that the section names."""
    roc = rl.method.roc
    return RocHooks(
        keep=rl.group_size,
        rule=own_rule(roc.rule) if is_own(roc.rule) else roc.rule,  # type: ignore[arg-type]
        penalties=_penalties(roc.penalties),
        min_positive=roc.min_positive,
        min_negative=roc.min_negative,
        masks_failures=rl.on_infrastructure_failure != "keep",
        environment_penalties={
            entry.name: _penalties(entry.roc_penalties) for entry in rl.environments if entry.roc_penalties is not None
        },
    )


def method_hooks(rl: "RlSection") -> tuple[MethodHooks, ...]:
    """Return the methods of a section, in the order in which their hooks are called. Loads the functions that it names."""
    roc, method, limits = roc_hooks(rl), rl.method, rl.limits
    methods: list[MethodHooks] = [roc]
    if isinstance(method, Grpo):
        methods.append(GrpoHooks(method.normalise_std))
    elif isinstance(method, Maxrl):
        methods.append(MaxrlHooks())
    elif isinstance(method, Otb):
        methods.append(OtbHooks())
    else:
        methods.append(own_hooks(method.type, "rl.method.type"))
    if overlong := method.added(OverlongBuffer):
        methods.append(OverlongBufferHooks(overlong.tokens, limits.max_response_tokens))
    if repetition := method.added(Repetition):
        methods.append(RepetitionHooks(repetition.weight, repetition.ngram))
    if budget := method.added(ToolBudget):
        normalise_std = isinstance(method, Grpo) and method.normalise_std
        methods.append(ToolBudgetHooks(budget.weight, budget.easy_from, limits.max_turns, normalise_std))
    if method.added(TaskNormalisation):
        methods.append(TaskNormalisationHooks())
    if method.added(OverlongFilter):
        methods.append(OverlongFilterHooks())
    if method.added(VoidTurns):
        methods.append(VoidTurnsHooks())
    if method.added(ControlTokens):
        methods.append(ControlTokensHooks())
    if echo := method.added(Echo):
        methods.append(EchoHooks(echo.weight))
    if opd := method.added(Opd):
        methods.append(OpdHooks(opd.weight))
    if sdpo := method.added(Sdpo):
        methods.append(SdpoHooks(sdpo.weight, roc))
    return tuple(methods)


def _penalties(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the penalties; user functions are loaded."""
    return tuple(own_penalty(name) if is_own(name) else name for name in names)
