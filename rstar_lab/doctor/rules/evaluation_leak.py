"""Problems of an evaluation set are trained on."""

import re

from rstar_lab.doctor.rule import Evidence, Log, examples, rule


@rule(
    "evaluation problems in training",
    reads=("texts", "evaluations"),
    cause="the training set contains problems of the evaluation set, so the held-out score is not held out",
    remedy="remove them with `rstar-lab data prepare`; `rstar-lab preflight` finds them before the run",
    source="benchmark contamination, arXiv 2311.01964",
)
def check(log: Log) -> Evidence | None:
    assert log.evaluations is not None
    known = log.evaluations.arrow("SELECT DISTINCT question FROM transcripts").column("question").to_pylist()
    held_out = {_plain(question) for question in known if question}
    texts = log.texts(12).dropna(subset=["question"]).drop_duplicates("problem_id")
    leaked = texts.question.map(_plain).isin(held_out)
    if leaked.sum() < 2:
        return None
    text = f"{int(leaked.sum())} of {len(texts)} training problems that were read are problems of an evaluation set"
    return Evidence(text, {"share": float(leaked.mean())}, (), examples(texts[leaked]), 0.7)


def _plain(question: str) -> str:
    return re.sub(r"\W+", " ", question).strip().lower()
