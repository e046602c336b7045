"""Rollouts agree on answers that differ from the true ones."""

from rstar_lab.doctor.rule import Evidence, Log, among, plain_answer, rule


@rule(
    "true answers look wrong",
    reads=("rollouts.answer", "rollouts.truth", "rollouts.problem_id"),
    cause=(
        "most rollouts of a problem agree on an answer that is not the true one, for many problems: the true answers are"
        " wrong or belong to other problems"
    ),
    remedy="solve some of the named problems by hand; compare the order of questions and answers in the data file",
    source="Northcutt et al. 2021, arXiv 2103.14749 (label errors)",
)
def check(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.answer.notna() & log.rollouts.truth.notna()]
    answers, truths = plain_answer(rows.answer), plain_answer(rows.truth)
    if truths.nunique() < 10:  # with few possible answers, such as A to D, rollouts agree on wrong ones
        return None
    same = answers.groupby([rows.problem_id, answers]).transform("size")
    size = answers.groupby(rows.problem_id).transform("size")
    # One row per problem: an answer that at least three rollouts and half of those of the problem give.
    agreed = rows[(same >= 3) & (same >= 0.5 * size)].drop_duplicates("problem_id")
    # A hard problem is solved by some rollouts. If its true answer is wrong, by none.
    solved = (answers == truths).groupby(rows.problem_id).transform("any")
    what = "problems on whose answer most rollouts agree have another true answer, which no rollout gives"
    return among(agreed, ~solved[agreed.index], what, above=0.05, least=15, cost=0.6)
