"""Hardly any rollout calls a tool."""

from rstar_lab.doctor.rule import Evidence, Log, examples, percent, rule, share


@rule(
    "tools are not used",
    reads=("rollouts.calls", "rollouts.reward"),
    cause="hardly any rollout calls a tool: the model does not know the syntax, or calls do not pay",
    remedy="check that the prompt describes the tool and that its calls are parsed; teach the syntax with SFT",
    source="ToRL, arXiv 2503.23383",
)
def check(log: Log) -> Evidence | None:
    late = log.last()
    late = late[late.calls.notna()]
    if len(late) < 20 or (log.rollouts.calls.fillna(0).sum() == 0 and log.source != "rstar_lab"):
        return None
    value = share(late.calls > 0, late)
    if value[0] > 0.02 or value[2] > 0.2:
        return None
    text = f"{percent(value)} of the rollouts of the last steps call a tool"
    return Evidence(text, {"share": value[0], "high": value[2]}, (), examples(late), 0.4)
