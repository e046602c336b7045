"""Successful tool calls return nothing."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "tools return nothing",
    reads=("texts", "rollouts.calls"),
    cause=(
        "tool calls report success and return no output: the tool does not run the code, loses its output, or the "
        "model forgets to print"
    ),
    remedy="run one of the named programs by hand; check the sandbox with `rstar-lab sandbox check`",
    source="ToRL #27",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts()
    # Programs that print nothing are the model's fault: only rollouts that print in each call count.
    called = texts[(texts.outputs.map(len) > 0) & (texts.own.str.count(r"print\(") >= texts.outputs.map(len))]
    empty = called.outputs.map(lambda outputs: any(not text.strip() for text in outputs)).astype(bool)
    what = "rollouts whose programs print have a successful tool call without output"
    return among(called, empty, what, above=0.02)
