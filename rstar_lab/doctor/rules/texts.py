"""Rules over the texts of prompts and rollouts, and over their token ids, loss masks and log-probs."""

import re
import zlib
from collections import Counter, defaultdict
from itertools import takewhile

import numpy as np
import pandas as pd

from rstar_lab.common.estimates import format_interval
from rstar_lab.doctor.rule import LEVEL, SHOWN, Evidence, Log, among, examples, share
from rstar_lab.runs.tables import UNUSABLE

MARK = r"(?i)(?:answer|solution|key|result|target)\W{0,12}(?:is|=|:)?\W{0,4}"
_TOKEN = re.compile(r"\w+(?:[.,/]\w+)*|[^\w\s]")
_PART = re.compile(r"\d+(?:[.,/]\d+)*|[^\W\d_]+|[^\w\s]")  # a file name or a key can contain an answer
_WORD = re.compile(r"[^\W\d_]{3,}")
_ROLE = r"<\|(?:im_start|start_header_id|user|system)\|?>|<tool_response>"
SPAN = 8  # so many consecutive tokens without a sampled log-prob are not a coincidence
LEAST_PROMPTS = 8  # different prompts from which the shared beginning is taken


def control_tokens(log: Log) -> Evidence | None:
    texts = log.texts()
    return among(texts, texts.own.str.contains(_ROLE), "rollouts contain a role marker of the model", above=0.02)


def copies(log: Log) -> Evidence | None:
    texts = log.texts()
    return _copies(texts) or _copies(texts[texts.step.isin(sorted(texts.step.unique())[-2:])])


def _copies(texts: pd.DataFrame) -> Evidence | None:
    texts = texts[texts.own.str.strip().str.len() > 40]
    size = texts.groupby("group_id").own.transform("size")
    texts = texts[size >= 4]
    size = size[texts.index]
    copied = texts.duplicated(["group_id", "own"], keep=False)
    # A policy with little entropy repeats itself. Its log-probs say how often: compare with rollouts that are drawn independently.
    same = (texts.engine_log_prob * texts.model_tokens).astype(float).map(np.exp)
    what = "rollouts have the same text as another one of their group"
    if texts.empty or same.isna().any():
        above = 0.3 if len(texts) and texts.own.str.len().median() > 200 else 0.6
        return among(texts, copied, what, above=above, least=40)
    expected = float((1 - (1 - same) ** (size - 1)).mean())
    what += f"; {expected:.0%} are expected from their log-probs"
    found = among(texts, copied, what, above=max(0.3, 2 * expected), least=40)
    if found:
        return found
    # Samples that are drawn greedily raise what is expected of single rollouts, but make far more pairs of equal texts.
    others = texts.groupby(["group_id", "own"]).own.transform("size") - 1
    pairs, expected = float((others / (size - 1)).mean()), float(same.mean())
    return among(texts, copied, what, above=0.3, least=40) if pairs > 2 * expected + 0.1 else None


def empty_rollouts(log: Log) -> Evidence | None:
    texts = log.texts()
    empty = (texts.own.str.strip() == "") & (texts.reward <= 0) & ~texts.stop_reason.isin(UNUSABLE)
    return among(texts, empty, "rollouts contain no text of the model and have no reward", above=0.005)


def no_reasoning(log: Log) -> Evidence | None:
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
    text = f"{format_interval(share(_bare(late.own), late), '.0%')} of {len(late)} {what}, {before[0]:.0%} at the start"
    return Evidence(text, {"first": before[0], "last": after[0]}, steps[-2:], examples(late[_bare(late.own)]), 0.6)


def _bare(texts: pd.Series) -> pd.Series:
    """Return which texts have fewer than five words besides their answer."""
    plain = texts.str.replace(r"(?s)<answer>.*?</answer>|\\boxed\{[^}]*\}|</?\w+>", " ", regex=True)
    return (plain.str.count(r"\S+") < 5) & ~texts.str.contains("<tool_call>", regex=False)


def repetition(log: Log) -> Evidence | None:
    texts = log.texts()
    texts = texts[texts.own.str.len() >= 400]
    starts = texts.own.str[:20_000]
    packed = starts.map(lambda text: len(zlib.compress(text.encode("utf-8", "replace"))))
    repeated = packed.astype(float) < 0.1 * starts.str.len()
    return among(texts, repeated, "long rollouts repeat the same words over and over", above=0.2)


def unreadable(log: Log) -> Evidence | None:
    """Compare the words of the last steps with those of the first ones."""
    texts = log.texts()
    steps = sorted(texts.step.unique())
    known: set[str] = set(_WORD.findall(" ".join(texts.own[texts.step == steps[0]]).lower()))
    usual = _new_words(texts[texts.step == steps[1]], known).mean()
    known |= set(_WORD.findall(" ".join(texts.own[texts.step == steps[1]]).lower()))
    late = texts[texts.step.isin(steps[-2:])]
    new = _new_words(late, known)
    late = late[new.notna()]
    if not usual < 0.4 or late.empty:
        return None
    what = f"rollouts of the last steps consist of words that the first steps do not have (new in an early step: {usual:.0%})"
    return among(late, new[late.index] > max(0.6, 2 * usual), what, above=0.15)


def _new_words(texts: pd.DataFrame, known: set[str]) -> pd.Series:
    """Return the share of the letters of each text that are in unknown words; NaN for texts with fewer than 20 letters."""
    words = texts.own.str.lower().map(_WORD.findall)
    letters = words.map(lambda own: sum(map(len, own)))
    return words.map(lambda own: sum(len(word) for word in own if word not in known)) / letters.where(letters >= 20)


def other_question(log: Log) -> Evidence | None:
    """Compare the rare words of each question with the texts of all questions of the step."""
    texts = log.texts().dropna(subset=["question"])
    hits, rows = [], []
    for _, own in texts.groupby("step"):
        tokens = {question: set(_TOKEN.findall(question.lower())) for question in own.question.unique()}
        counts = Counter(token for found in tokens.values() for token in found if len(token) > 1)
        few = {token for token, count in counts.items() if count <= max(1, 0.2 * len(tokens))}
        rare = {question: found & few for question, found in tokens.items() if len(found & few) >= 2}
        for index, question, text in own.head(256)[["question", "own"]].itertuples():
            if question in rare and len(rare) > 2:
                words = set(_TOKEN.findall(text.lower()))
                shares = {other: len(found & words) / len(found) for other, found in rare.items()}
                if max(shares.values()) >= 0.5:
                    rows.append(index)
                    hits.append(shares[question] < max(shares.values()) - 0.25)
    chosen = texts.loc[rows]
    what = "rollouts contain the rare words of another question, and not those of their own"
    return among(chosen, pd.Series(hits, index=chosen.index, dtype=bool), what, above=0.3, least=40, cost=0.9)


def same_text_everywhere(log: Log) -> Evidence | None:
    texts = log.texts()
    known = texts.groupby("own").problem_id.transform("nunique")
    # Several problems can have the same short answer, such as a letter, but not most of them.
    most = (known > 0.5 * texts.problem_id.nunique()) & (texts.truth.nunique() >= 10)
    texts = texts[(texts.own.str.strip().str.len() > 60) | (most & (texts.own.str.strip() != ""))]
    known = known[texts.index] > 1
    what = "rollouts have exactly the text of a rollout of another problem"
    return among(texts, known, what, above=0.05, least=40, cost=0.8)


def replayed(log: Log) -> Evidence | None:
    texts = log.texts(12)
    likely = (texts.engine_log_prob * texts.model_tokens).astype(float).map(np.exp).mean()
    texts = texts[texts.own.str.strip().str.len() > 100]
    if texts.step.nunique() < 3 or likely > 0.05:
        return None
    first = texts.groupby(["question", "own"], dropna=False).step.transform("min")
    late = texts[texts.step > texts.step.min()]
    what = "rollouts have exactly the text of a rollout of an earlier step"
    return among(late, late.step > first[late.index], what, above=0.1, least=40)


def repeated_problems(log: Log) -> Evidence | None:
    known = log.texts(12).dropna(subset=["question"]).drop_duplicates(["problem_id"])
    # Questions about a picture can have the same text, but then have other answers.
    plain = known.question.map(_plain) + "\n" + known.truth.map(str)
    what = "problems have the question of another one"
    return among(known, plain.duplicated(keep=False), what, above=0.02, least=10, cost=0.3)


def evaluation_leak(log: Log) -> Evidence | None:
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


def leaked_answer(log: Log) -> Evidence | None:
    texts = log.texts().dropna(subset=["question", "truth"]).drop_duplicates("problem_id")
    pairs = list(zip(texts.question, texts.truth.astype(str), strict=True))
    marked = [_names_answer(question, truth, pairs) for question, truth in pairs]
    if sum(marked) < 0.01 * len(marked) or not sum(marked):
        prompts = texts.prompt + "\n" + texts.question
        marked = _predicted([(prompt, truth) for prompt, (_, truth) in zip(prompts, pairs, strict=True)])
    what = "problems name the true answer as the answer in their question"
    return among(texts, pd.Series(marked, index=texts.index, dtype=bool), what, above=0.01, least=10, cost=0.8)


def _names_answer(question: str, truth: str, pairs: list[tuple[str, str]]) -> bool:
    found = re.search(MARK + re.escape(truth) + r"(?!\d)", question) if truth else None
    if found is None or not truth[-1].isalpha():
        return found is not None
    # "Answer: yes or no" is the instruction, and stands in questions with other true answers, too.
    whole = re.match(r"\w", question[found.end() :]) is None
    return whole and not any(found[0] in other for other, own in pairs if own != truth)


def _predicted(pairs: list[tuple[str, str]]) -> list[bool]:
    """Return for each (prompt, true answer) whether words of the prompt predict its answer.

    Words predict the answer if what follows or precedes them is the answer of the prompt in 90% of the prompts that have them, and
    chance does not explain it: the answers of other problems stand there as often as they are equal by chance.
    """
    places: dict[tuple[str, ...], list[tuple[int, bool, str]]] = defaultdict(list)
    truths = [tuple(_PART.findall(truth.lower())) for _, truth in pairs]
    equal = Counter(truths)
    for number, (prompt, _) in enumerate(pairs):
        tokens, truth = _PART.findall(prompt.lower()[:20_000]), truths[number]
        masked = [re.sub(r"\d+", "#", token) for token in tokens]
        width = len(truth)
        for at in range(len(tokens) - width + 1 if width else 0):
            here = tuple(tokens[at : at + width])
            if not here[0][0].isalnum() or (truth[0][0].isdigit() and not here[0][0].isdigit()):
                continue
            for context in (("<", *masked[max(0, at - 3) : at]), (">", *masked[at + width : at + width + 3])):
                if any(word.isalpha() for word in context):
                    places[context].append((number, here == truth, " ".join(here)))
    leaked: set[int] = set()
    chance = max(0.02, sum(count**2 for count in equal.values()) / max(1, len(pairs)) ** 2)
    for found in places.values():
        own, others = ({number for number, hit, _ in found if hit is wanted} for wanted in (True, False))
        values = {value for _, hit, value in found if hit}
        if len(own) >= max(5, 0.9 * len(own | others)) and len(values) > 3 and chance ** len(own) < 1e-7:
            leaked |= own
    return [number in leaked for number in range(len(pairs))]


def prompt_changes(log: Log) -> Evidence | None:
    return _changed_tokens(log) if log.has("tokens") else _changed_texts(log)


def _changed_texts(log: Log) -> Evidence | None:
    texts = log.texts()
    by_step = texts.groupby("step").prompt.agg(lambda prompts: prompts.mode().iloc[0])
    if len(by_step) < 3 or by_step.nunique() < 2:
        return None
    changed = by_step.index[by_step != by_step.iloc[0]]
    if by_step.nunique() > len(by_step) // 2 + 1:  # a prompt that names the problem differs in every step
        return None
    text = f"the system prompt of step {int(changed[0])} differs from that of step {int(by_step.index[0])}"
    return Evidence(text, {}, [int(step) for step in changed], examples(texts[texts.step.isin(changed)]), 0.5)


def _changed_tokens(log: Log) -> Evidence | None:
    """Compare the beginning of the prompts with what the prompts of the first steps share."""
    rows = log.tokens()
    rows = rows[rows.prompt_ids.map(lambda ids: ids is not None and len(ids) > 0)]
    shared: list[int] = []
    early: set[tuple[int, ...]] = set()
    for _, own in rows.groupby("step"):  # the few problems of one step can begin with the same words by chance
        early |= {tuple(ids) for ids in own.prompt_ids}
        if len(early) >= LEAST_PROMPTS:
            shared = [own[0] for own in takewhile(lambda own: len(set(own)) == 1, zip(*early, strict=False))]
            break
    if len(shared) < 2 or rows.step.nunique() < 3:
        return None
    other = rows.prompt_ids.map(lambda ids: list(ids[: len(shared)]) != shared)
    shares = other.groupby(rows.step).mean()
    steps = shares.index[shares > 0.9].astype(int).tolist()
    if not steps:
        return None
    text = f"the prompts of step {steps[0]} lack the first {len(shared)} tokens, which all earlier prompts share"
    return Evidence(text, {}, steps, rows.traj_id[other & rows.step.isin(steps)].head(SHOWN).tolist(), 0.5)


def loss_mask(log: Log) -> Evidence | None:
    """Every token in the loss mask has the log-prob with which the engine sampled it, and no other token has one."""
    rows = log.tokens()
    arrays = rows[["loss_mask", "engine_log_probs"]].to_numpy()
    pairs = [(np.asarray(mask, bool), np.asarray(own, float)) for mask, own in arrays]
    outside = pd.Series([bool((~mask & (np.nan_to_num(own) != 0)).any()) for mask, own in pairs], rows.index, bool)
    inside = pd.Series([_without_log_prob(mask, own) for mask, own in pairs], rows.index, bool)
    what = "rollouts have tokens in the loss mask that the engine did not sample, such as outputs of tools"
    found = among(
        rows, outside, "rollouts have sampled tokens outside of the loss mask", above=0.01, least=10, cost=0.9
    )
    return found or among(rows, inside, what, above=0.02, least=10, cost=0.9)


def _without_log_prob(mask: np.ndarray, log_probs: np.ndarray) -> bool:
    """Return whether tokens in the mask have no log-prob: NaN, or exactly 0 over a span between sampled tokens."""
    if np.isnan(log_probs[mask]).any():
        return True
    unsampled = mask & (log_probs == 0)
    if unsampled[mask].mean() > 0.9 if mask.any() else True:  # the engine returns no log-probs at all
        return False
    edges = np.flatnonzero(np.diff(np.concatenate([[0], unsampled.astype(int), [0]])))
    return bool(len(edges)) and int((edges[1::2] - edges[::2]).max()) >= SPAN


def no_log_probs(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.engine_log_prob.notna() & (log.rollouts.model_tokens.fillna(0) > 0)]
    return among(rows, rows.engine_log_prob == 0, "rollouts have log-probs of 0", above=0.5, cost=1.0)


def impossible_log_probs(log: Log) -> Evidence | None:
    rows = log.rollouts[log.rollouts.engine_log_prob.notna()]
    positive = rows.engine_log_prob > 1e-6
    if positive.any():
        what = "rollouts have a mean log-prob above 0, which no probability has"
        return among(rows, positive, what, above=0.0, cost=0.9)
    what = "rollouts have sampled tokens with a mean log-prob below -8, far below that of any text of a policy"
    return among(rows, rows.engine_log_prob < -8, what, above=0.2, cost=0.9)
