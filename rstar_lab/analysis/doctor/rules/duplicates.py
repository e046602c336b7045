"""Rollouts of a group have the same text."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples, percent, share


def check(log: Log) -> Evidence | None:
    texts = log.texts()
    texts = texts[texts.own.str.strip() != ""]
    if texts.groupby("group_id").size().max() < 4 or len(texts) < 40:
        return None
    long = texts[texts.own.str.len() > 40]
    copies = long.duplicated(["group_id", "own"], keep=False)
    if len(long) < 40 or copies.mean() < 0.6:
        return None
    value = share(copies, long)
    text = f"{percent(value)} of {len(long)} rollouts have the same text as another one of their group"
    return Evidence(
        text, {"share": value[0]}, sorted(long.step[copies].unique().astype(int)), examples(long[copies]), value[0]
    )


RULE = Rule(
    name="copies of rollouts",
    reads=("texts", "rollouts.group_id"),
    cause=(
        "rollouts of a group are copies of each other: the sampler uses one seed or temperature 0, or the policy "
        "is deterministic"
    ),
    remedy="check temperature and seeds of the sampler; look at the entropy",
    source="NeMo-RL #2207",
    check=check,
)
