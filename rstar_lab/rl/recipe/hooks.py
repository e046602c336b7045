"""The methods of a recipe section as hooks. The only place that knows which keys select which method."""

from typing import TYPE_CHECKING, Any

from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.methods.control_tokens import ControlTokensHooks
from rstar_lab.rl.methods.echo import EchoHooks
from rstar_lab.rl.methods.grpo import GrpoHooks
from rstar_lab.rl.methods.maxrl import MaxrlHooks
from rstar_lab.rl.methods.opd import OpdHooks
from rstar_lab.rl.methods.otb import OtbHooks
from rstar_lab.rl.methods.overlong_buffer import OverlongBufferHooks
from rstar_lab.rl.methods.own import own_hooks
from rstar_lab.rl.methods.roc import RocHooks
from rstar_lab.rl.methods.sdpo import SdpoHooks
from rstar_lab.rl.methods.tool_budget import ToolBudgetHooks
from rstar_lab.rl.methods.void_turns import VoidTurnsHooks
from rstar_lab.rl.recipe.functions import own_penalty, own_rule
from rstar_lab.rl.section import is_own

if TYPE_CHECKING:
    from rstar_lab.rl.recipe.rl import RlSection


def roc_hooks(rl: "RlSection") -> RocHooks:
    """Return the selection of rollouts. Loads the functions that the section names."""
    return RocHooks(
        keep=rl.group_size,
        rule=own_rule(rl.roc) if is_own(rl.roc) else rl.roc,  # type: ignore[arg-type]
        penalties=_penalties(rl.roc_penalties),
        min_positive=rl.roc_min_positive,
        min_negative=rl.roc_min_negative,
        environment_penalties={
            entry.name: _penalties(entry.roc_penalties) for entry in rl.environments if entry.roc_penalties is not None
        },
    )


def method_hooks(rl: "RlSection") -> tuple[MethodHooks, ...]:
    """Return the methods of a section, in the order in which their hooks are called. Loads the functions that it names."""
    roc = roc_hooks(rl)
    methods: list[MethodHooks] = [roc]
    if rl.advantage == "group":
        methods.append(GrpoHooks(rl.normalise_std))
    elif rl.advantage == "maxrl":
        methods.append(MaxrlHooks())
    elif rl.advantage == "otb":
        methods.append(OtbHooks())
    else:
        methods.append(own_hooks(rl.advantage, "rl.advantage"))
    if rl.overlong_buffer:
        methods.append(OverlongBufferHooks(rl.overlong_buffer, rl.max_response_tokens))
    if rl.tool_budget:
        methods.append(ToolBudgetHooks(rl.tool_budget, rl.tool_budget_from, rl.max_turns, rl.normalise_std))
    if rl.drop_void_turns:
        methods.append(VoidTurnsHooks())
    if rl.drop_control_tokens:
        methods.append(ControlTokensHooks())
    if rl.tool_output_loss:
        methods.append(EchoHooks(rl.tool_output_loss))
    if rl.teacher_weight:
        methods.append(OpdHooks(rl.teacher_weight))
    if rl.self_distillation:
        methods.append(SdpoHooks(rl.self_distillation, roc))
    return tuple(methods)


def _penalties(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the penalties; user functions are loaded."""
    return tuple(own_penalty(name) if is_own(name) else name for name in names)
