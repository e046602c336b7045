"""The answer key stands in the prompt."""

import re

import pandas as pd

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    texts = log.texts().dropna(subset=["question", "truth"]).drop_duplicates("problem_id")
    if len(texts) < 10:
        return None
    pairs = zip(texts.question, texts.truth.astype(str), strict=True)
    marked = pd.Series(
        [
            bool(truth) and re.search(MARK + re.escape(truth) + r"(?!\d)", question) is not None
            for question, truth in pairs
        ],
        index=texts.index,
    )
    if marked.mean() < 0.05:
        return None
    text = (
        f"in {marked.mean():.0%} of {len(texts)} problems that were read, the question names the true answer as "
        f"the answer"
    )
    return Evidence(text, {"share": float(marked.mean())}, (), examples(texts[marked]), 0.8)


MARK = r"(?i)(?:answer|solution|key|result|target)\W{0,12}(?:is|=|:)?\W{0,4}"


RULE = Rule(
    name="the prompt contains the answer",
    reads=("texts", "rollouts.truth"),
    cause="the prompt contains the true answer, so the policy learns to copy it",
    remedy="remove the answer from the question; `rstar-lab data lint` names the rows",
    source="benchmark contamination, arXiv 2311.01964",
    check=check,
)
