"""The same question occurs under several ids."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "repeated problems",
    reads=("texts", "rollouts.problem_id"),
    cause=(
        "the training set contains the same question under several ids, so intervals are too narrow and problems "
        "are over-weighted"
    ),
    remedy="remove copies with `rstar-lab data prepare`, and give each problem one id",
    source="verl #3065",
)
def check(log: Log) -> Evidence | None:
    known = log.texts(12).dropna(subset=["question"]).drop_duplicates(["problem_id"])
    plain = known.question.str.replace(r"\W+", " ", regex=True).str.strip().str.lower()
    what = "problems have the question of another one"
    return among(known, plain.duplicated(keep=False), what, above=0.02, least=10, cost=0.3)
