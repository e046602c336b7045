"""Finished rollouts have no answer that the grader can read."""

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "answers in another format",
    reads=("rollouts.answer", "rollouts.truncated", "rollouts.reward"),
    cause="most finished rollouts have no answer where the grader looks for it",
    remedy=(
        "state the format in the prompt (`rl.prompt.answer_instruction`), read it from another place (`rl.answer:"
        " boxed`), or teach it with SFT"
    ),
    source="lm-evaluation-harness #3644",
)
def check(log: Log) -> Evidence | None:
    late = log.last()
    late = late[late.truncated.notna() & ~late.truncated.fillna(True).astype(bool)]
    without = (late.answer.isna() | (late.answer.astype(str).str.strip() == "")) & (late.reward <= 0)
    return among(late, without, "finished rollouts of the last steps have no answer", above=0.35)
