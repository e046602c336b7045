"""Filters of a problem set. Each returns the problems to drop, as {index in the list: reason}.

Source: rStar2-Agent, section 4.2.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rstar_lab.rl.data.similarity import Corpus, Texts, contaminated, near_duplicates
from rstar_lab.rl.data.sources import Candidate
from rstar_lab.verify.comparison import canonical_integer, compare

Drops = dict[int, str]


def plain_integer(answer: str) -> str | None:
    """Return an integer answer in normal form (`$1,024$` as 1024, `025` as 25), or None if it is not an integer."""
    return canonical_integer(answer.strip().strip("$").strip())


def not_integer(candidates: Sequence[Candidate]) -> Drops:
    """Drop problems whose answer is not an integer, because only integers are verified reliably. Programs with hidden tests and
    problems without an answer are kept."""
    return {
        place: f"the answer is {answer[:60]!r}"
        for place, answer in enumerate(candidate.problem.answer for candidate in candidates)
        if answer and plain_integer(answer) is None and "tests" not in candidates[place].problem.info
    }


def _equal_questions(candidates: Sequence[Candidate], texts: Texts) -> list[list[int]]:
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, digest in enumerate(texts.hashes().tolist()):
        groups[digest, candidates[place].problem.task()].append(place)
    return [places for places in groups.values() if len(places) > 1]


def conflicts(candidates: Sequence[Candidate], texts: Texts) -> Drops:
    """Drop all copies of a question that has different answers, because the correct one is unknown."""
    drops: Drops = {}
    for places in _equal_questions(candidates, texts):
        answers = [candidates[place].problem.answer for place in places]
        truths = sorted({plain_integer(answer) or answer for answer in answers})
        if len(truths) > 1:
            drops |= {place: f"labelled {' and '.join(truths[:3])}" for place in places}
    return drops


def duplicates(candidates: Sequence[Candidate], texts: Texts) -> Drops:
    """Drop repeated questions. The first one gets the sampled answers of the others."""
    drops: Drops = {}
    for first, *others in _equal_questions(candidates, texts):
        for place in others:
            drops[place] = f"same question as {candidates[first].where}"
            candidates[first].answers += candidates[place].answers
    return drops


def similar_questions(candidates: Sequence[Candidate], texts: Texts, corpus: Corpus, similarity: float) -> Drops:
    """Drop questions that differ from an earlier one only in a few words.

    Numbers, signs and variables must be the same, in the same order. similarity: threshold, see `near_duplicates`.
    """
    originals = near_duplicates(texts, texts.symbols(corpus.is_symbol()), similarity=similarity)
    tasks = [candidate.problem.task() for candidate in candidates]
    return {a: f"near-duplicate of {candidates[b].where}" for a, b in originals.items() if tasks[a] == tasks[b]}


def contamination(
    texts: Texts, corpus: Corpus, evaluation: Texts, owners: Sequence[str], ngram: int
) -> tuple[Drops, dict[str, int]]:
    """Drop questions that share an n-gram with an evaluation question. Also return their number by evaluation set.

    owners: name of the evaluation set of each evaluation text. ngram: length of the n-grams in tokens.
    """
    drops: Drops = {}
    overlaps: dict[str, int] = defaultdict(int)
    for place, (theirs, start) in contaminated(texts, evaluation, ngram).items():
        end = min(start + ngram, int(texts.bounds[place + 1]))
        drops[place] = f'{owners[theirs]}: "{corpus.words(texts.ids[start:end].tolist())}"'
        overlaps[owners[theirs]] += 1
    return drops, overlaps


def wrong_labels(candidates: Sequence[Candidate], min_agree: int, max_answers: int = 16) -> tuple[Drops, int]:
    """Drop problems whose label agrees with fewer than `min_agree` of the first `max_answers` answers of a strong model.

    Also return the number of problems with fewer than `min_agree` such answers, which are unchecked and kept.
    """
    drops: Drops = {}
    unchecked = 0
    for place, candidate in enumerate(candidates):
        answers = candidate.answers[:max_answers] if candidate.problem.answer else []
        if len(answers) < min_agree:
            unchecked += 1
            continue
        agreeing = 0
        for answer in answers:
            agreeing += compare(answer, candidate.problem.answer) is not False
            if agreeing == min_agree:
                break
        if agreeing < min_agree:
            drops[place] = f"{agreeing} of {len(answers)} answers agree with {candidate.problem.answer[:60]}"
    return drops, unchecked


def keep_texts(texts: Texts, drops: Drops) -> Texts:
    """Return the encoded texts that are not dropped."""
    chosen = np.ones(len(texts), bool)
    chosen[list(drops)] = False
    lengths = np.diff(texts.bounds)
    ids = texts.ids[np.repeat(chosen, lengths)]
    return Texts(ids, np.concatenate([[0], np.cumsum(lengths[chosen])]))
