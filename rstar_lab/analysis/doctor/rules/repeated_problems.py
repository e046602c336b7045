"""The same question occurs under several ids."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    texts = log.texts()
    known = texts.dropna(subset=["question"]).drop_duplicates(["problem_id"])
    plain = known.question.str.replace(r"\W+", " ", regex=True).str.strip().str.lower()
    copies = plain.duplicated(keep=False)
    if len(known) < 10 or copies.mean() < 0.1:
        return None
    text = f"{copies.mean():.0%} of {len(known)} problems that were read have the question of another one"
    return Evidence(text, {"share": float(copies.mean())}, (), examples(known[copies.to_numpy()]), 0.3)


RULE = Rule(
    name="repeated problems",
    reads=("texts", "rollouts.problem_id"),
    cause=(
        "the training set contains the same question under several ids, so intervals are too narrow and problems "
        "are over-weighted"
    ),
    remedy="remove copies with `rstar-lab data prepare`, and give each problem one id",
    source="verl #3065",
    check=check,
)
