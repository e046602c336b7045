"""Rewarded rollouts stop to reason."""

import pandas as pd

from rstar_lab.doctor.rule import LEVEL, Evidence, Log, examples, percent, rule, share


@rule(
    "answers without reasoning",
    reads=("texts", "rollouts.reward"),
    cause="rewarded rollouts have become bare answers: the policy guesses, or it has found answers that need no reasoning",
    remedy="look for problems with few possible answers and for answers in the prompt; check length penalties",
    source="Baker et al. 2025, arXiv 2503.11926",
)
def check(log: Log) -> Evidence | None:
    texts = log.texts()
    texts = texts[(texts.reward > 0) & (texts.own.str.strip() != "")]
    steps = sorted(texts.step.unique())
    early, late = texts[texts.step.isin(steps[:2])], texts[texts.step.isin(steps[-2:])]
    if len(steps) < 4 or min(len(early), len(late)) < 20:
        return None
    before, after = share(_bare(early.own), early, LEVEL), share(_bare(late.own), late, LEVEL)
    if not (after[1] > before[2] and after[0] > 0.5):
        return None
    what = "rewarded rollouts have an answer without reasoning or tool call"
    text = f"{percent(share(_bare(late.own), late))} of {len(late)} {what}, {before[0]:.0%} at the start"
    return Evidence(text, {"first": before[0], "last": after[0]}, steps[-2:], examples(late[_bare(late.own)]), 0.6)


def _bare(texts: pd.Series) -> pd.Series:
    """Return which texts have fewer than five words besides their answer."""
    plain = texts.str.replace(r"(?s)<answer>.*?</answer>|\\boxed\{[^}]*\}|</?\w+>", " ", regex=True)
    return (plain.str.count(r"\S+") < 5) & ~texts.str.contains("<tool_call>", regex=False)
