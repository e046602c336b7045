"""The answer key stands in the prompt."""

import re

import pandas as pd

from rstar_lab.doctor.rule import Evidence, Log, among, rule


@rule(
    "the prompt contains the answer",
    reads=("texts", "rollouts.truth"),
    cause="the prompt contains the true answer, so the policy learns to copy it",
    remedy="remove the answer from the question; `rstar-lab data lint` names the rows",
    source="benchmark contamination, arXiv 2311.01964",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts().dropna(subset=["question", "truth"]).drop_duplicates("problem_id")
    pairs = list(zip(texts.question, texts.truth.astype(str), strict=True))
    marked = [_names_answer(question, truth, pairs) for question, truth in pairs]
    what = "problems name the true answer as the answer in their question"
    return among(texts, pd.Series(marked, index=texts.index), what, above=0.01, least=10, cost=0.8)


MARK = r"(?i)(?:answer|solution|key|result|target)\W{0,12}(?:is|=|:)?\W{0,4}"


def _names_answer(question: str, truth: str, pairs: list[tuple[str, str]]) -> bool:
    found = re.search(MARK + re.escape(truth) + r"(?!\d)", question) if truth else None
    if found is None or not truth[-1].isalpha():
        return found is not None
    # "Answer: yes or no" is the instruction, and stands in questions with other true answers, too.
    whole = re.match(r"\w", question[found.end() :]) is None
    return whole and not any(found[0] in other for other, own in pairs if own != truth)
