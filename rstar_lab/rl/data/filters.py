"""What is dropped from a set of problems, one rule a function: {place in the list: why}. Source of the rules:
rStar2-Agent, section 4.2."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rstar_lab.rl.data.similarity import Corpus, Texts, contaminated, near_duplicates
from rstar_lab.rl.data.sources import Candidate
from rstar_lab.verify import canonical_integer, same_answer, warm_up

Drops = dict[int, str]


def plain_integer(answer: str) -> str | None:
    """`$1,024$` or `025` as 1024 or 25; None for what is no integer written out."""
    return canonical_integer(answer.strip().strip("$").strip())


def not_integer(candidates: Sequence[Candidate]) -> Drops:
    """Answers that are no integers: only those are checked without doubt."""
    return {
        place: f"the answer is {candidate.problem.answer[:60]!r}"
        for place, candidate in enumerate(candidates)
        if plain_integer(candidate.problem.answer) is None
    }


def _same_words(texts: Texts) -> list[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for place, digest in enumerate(texts.whole().tolist()):
        groups[digest].append(place)
    return [places for places in groups.values() if len(places) > 1]


def conflicts(candidates: Sequence[Candidate], texts: Texts) -> Drops:
    """One question with different answers: all of them go, for which one is right nobody knows."""
    drops: Drops = {}
    for places in _same_words(texts):
        answers = [candidates[place].problem.answer for place in places]
        truths = sorted({plain_integer(answer) or answer for answer in answers})
        if len(truths) > 1:
            drops |= {place: f"labelled {' and '.join(truths[:3])}" for place in places}
    return drops


def duplicates(candidates: Sequence[Candidate], texts: Texts) -> Drops:
    """The same question again; the answers known for it go to the one that is kept."""
    drops: Drops = {}
    for first, *others in _same_words(texts):
        for place in others:
            drops[place] = f"the same as {candidates[first].where}"
            candidates[first].answers += candidates[place].answers
    return drops


def near(candidates: Sequence[Candidate], texts: Texts, corpus: Corpus, similarity: float) -> Drops:
    """Questions that repeat an earlier one but for a few words, with the same numbers, signs and variables in the
    same order."""
    twins = near_duplicates(texts, texts.symbols(corpus.is_symbol()), similarity=similarity)
    return {place: f"nearly {candidates[twin].where}" for place, twin in twins.items()}


def contamination(
    texts: Texts, corpus: Corpus, evaluation: Texts, owners: Sequence[str], ngram: int
) -> tuple[Drops, dict[str, int]]:
    """(questions that share an n-gram with an evaluation set's, how many of them by set). owners: the set of each
    evaluation text."""
    drops: Drops = {}
    overlaps: dict[str, int] = defaultdict(int)
    for place, (theirs, start) in contaminated(texts, evaluation, ngram).items():
        end = min(start + ngram, int(texts.bounds[place + 1]))
        drops[place] = f'{owners[theirs]}: "{corpus.words(texts.ids[start:end].tolist())}"'
        overlaps[owners[theirs]] += 1
    return drops, overlaps


def wrong_labels(candidates: Sequence[Candidate], least: int, most_answers: int = 16) -> tuple[Drops, int]:
    """(labels that fewer than `least` of a strong model's first 16 answers confirm, how many had no such answers to
    check with)."""
    drops: Drops = {}
    unchecked = 0
    if any(plain_integer(answer) is None for candidate in candidates for answer in candidate.answers):
        warm_up()
    for place, candidate in enumerate(candidates):
        answers = candidate.answers[:most_answers]
        if not answers:
            unchecked += 1
            continue
        agreeing = 0
        for answer in answers:
            agreeing += same_answer(answer, candidate.problem.answer)
            if agreeing == least:
                break
        if agreeing < least:
            drops[place] = f"{agreeing} of {len(answers)} answers agree with {candidate.problem.answer[:60]}"
    return drops, unchecked


def solved(candidates: Sequence[Candidate], pass_rates: Mapping[str, tuple[float, int]]) -> Drops:
    """Problems that the policy solves every time: nothing is left to learn from them (stage 3's filter)."""
    drops: Drops = {}
    for place, candidate in enumerate(candidates):
        rate, samples = pass_rates.get(candidate.problem.problem_id, (0.0, 0))
        if samples and rate >= 1.0:
            drops[place] = f"solved {samples} of {samples} times"
    return drops


def keep(candidates: Sequence[Candidate], drops: Drops) -> list[Candidate]:
    return [candidate for place, candidate in enumerate(candidates) if place not in drops]


def keep_texts(texts: Texts, drops: Drops) -> Texts:
    """The same selection of encoded texts."""
    chosen = np.ones(len(texts), bool)
    chosen[list(drops)] = False
    lengths = np.diff(texts.bounds)
    ids = texts.ids[np.repeat(chosen, lengths)]
    return Texts(ids, np.concatenate([[0], np.cumsum(lengths[chosen])]))
