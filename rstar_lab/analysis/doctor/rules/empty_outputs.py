"""Successful tool calls return nothing."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    texts = log.texts()
    outputs = texts.outputs.map(len)
    called = texts[outputs > 0]
    calls = int(outputs.sum())
    if calls < 30:
        return None
    empty = called.outputs.map(lambda own: sum(not text.strip() for text in own))
    rate = float(empty.sum() / calls)
    if rate < 0.05:
        return None
    hit = called[empty > 0]
    text = f"{int(empty.sum())} of {calls} successful tool calls that were read return no text ({rate:.0%})"
    return Evidence(text, {"share": rate}, sorted(hit.step.unique().astype(int)), examples(hit), min(1.0, 2 * rate))


RULE = Rule(
    name="tools return nothing",
    reads=("texts", "rollouts.calls"),
    cause=(
        "tool calls report success and return no output: the tool does not run the code, loses its output, or the "
        "model forgets to print"
    ),
    remedy="run one of the named programs by hand; check the sandbox with `rstar-lab sandbox check`",
    source="ToRL #27",
    check=check,
)
