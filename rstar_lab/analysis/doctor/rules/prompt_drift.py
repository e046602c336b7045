"""The system prompt changes within the run."""

from rstar_lab.analysis.doctor.rule import Evidence, Log, Rule, examples


def check(log: Log) -> Evidence | None:
    texts = log.texts()
    by_step = texts.groupby("step").prompt.agg(lambda prompts: prompts.mode().iloc[0])
    if len(by_step) < 3 or by_step.nunique() < 2:
        return None
    changed = by_step.index[by_step != by_step.iloc[0]]
    if by_step.nunique() > len(by_step) // 2 + 1:  # a prompt that names the problem differs in every step
        return None
    text = f"the system prompt of step {int(changed[0])} differs from that of step {int(by_step.index[0])}"
    return Evidence(text, {}, [int(step) for step in changed], examples(texts[texts.step.isin(changed)]), 0.5)


RULE = Rule(
    name="the prompt changes",
    reads=("texts",),
    cause="the system prompt changes within the run, so early and late rollouts solve different tasks",
    remedy="fix the prompt in the recipe; compare the first messages of the named rollouts",
    source="template drift between SFT and RL",
    check=check,
)
