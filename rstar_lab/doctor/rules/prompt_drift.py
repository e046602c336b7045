"""The system prompt changes within the run."""

from rstar_lab.doctor.rule import Evidence, Log, examples, rule


@rule(
    "the prompt changes",
    reads=("texts",),
    cause="the system prompt changes within the run, so early and late rollouts solve different tasks",
    remedy="fix the prompt in the recipe; compare the first messages of the named rollouts",
    source="template drift between SFT and RL",
)
def check(log: Log) -> Evidence | None:
    return _tokens(log) if log.has("tokens") else _texts(log)


def _texts(log: Log) -> Evidence | None:
    texts = log.texts()
    by_step = texts.groupby("step").prompt.agg(lambda prompts: prompts.mode().iloc[0])
    if len(by_step) < 3 or by_step.nunique() < 2:
        return None
    changed = by_step.index[by_step != by_step.iloc[0]]
    if by_step.nunique() > len(by_step) // 2 + 1:  # a prompt that names the problem differs in every step
        return None
    text = f"the system prompt of step {int(changed[0])} differs from that of step {int(by_step.index[0])}"
    return Evidence(text, {}, [int(step) for step in changed], examples(texts[texts.step.isin(changed)]), 0.5)


def _tokens(log: Log) -> Evidence | None:
    """Compare the beginning of the prompts with what the prompts of the first steps share."""
    rows = log.tokens()
    rows = rows[rows.prompt_ids.map(lambda ids: ids is not None and len(ids) > 0)]
    shared: tuple[int, ...] = ()
    early: set[tuple[int, ...]] = set()
    for _, own in rows.groupby("step"):  # the few problems of one step can begin with the same words by chance
        early |= {tuple(ids) for ids in own.prompt_ids}
        if len(early) >= LEAST:
            shared = _shared_beginning(early)
            break
    if len(shared) < 2 or rows.step.nunique() < 3:
        return None
    other = rows.prompt_ids.map(lambda ids: tuple(ids[: len(shared)]) != shared)
    shares = other.groupby(rows.step).mean()
    steps = shares.index[shares > 0.9].astype(int).tolist()
    if not steps:
        return None
    text = f"the prompts of step {steps[0]} lack the first {len(shared)} tokens, which all earlier prompts share"
    return Evidence(text, {}, steps, rows.traj_id[other & rows.step.isin(steps)].head(20).tolist(), 0.5)


LEAST = 8  # different prompts from which the shared beginning is taken


def _shared_beginning(prompts: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the tokens with which all prompts begin; none if there is only one prompt."""
    first, last = min(prompts), max(prompts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)]
