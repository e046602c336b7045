"""Tests of the hashes, shared n-grams and near-duplicates that preparation of problems uses."""

import random

import numpy as np
import pytest

from rstar_lab.rl.data import similarity


def encode(*texts):
    corpus = similarity.Corpus()
    return corpus, corpus.encode(texts)


def test_tokens_leave_layout_aside():
    assert similarity.tokens("Let $\\left( x\\,+\\,1,000 \\right)$  BE — Ⅳ") == ["let", "x", "+", "1000", "be", "iv"]
    assert similarity.tokens("求 x 的值") == ["求", "x", "的", "值"]


def test_hashes_of_different_texts_differ():
    words = ["a", "b", "c d", "d c", "", "a b", "b a", "a a", "a a a", "c d"]
    _, texts = encode(*words)
    hashes = texts.hashes().tolist()
    assert len(set(hashes)) == len(set(words)) and hashes[2] == hashes[-1]


def test_contamination_against_a_plain_search():
    rng = random.Random(0)
    ours = [" ".join(rng.choices("abcdefgh", k=rng.randint(0, 30))) for _ in range(60)]
    theirs = [" ".join(rng.choices("abcdefgh", k=rng.randint(0, 12))) for _ in range(40)]
    corpus = similarity.Corpus()
    found = similarity.contaminated(corpus.encode(ours), corpus.encode(theirs), 4)

    def grams(text):
        words = text.split()
        return {tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3))} if words else set()

    other = set().union(*(grams(text) for text in theirs))
    assert set(found) == {place for place, text in enumerate(ours) if grams(text) & other}
    for place, (their_text, start) in found.items():
        shared = corpus.encode(ours)
        words = corpus.words(shared.ids[start : min(start + 4, shared.bounds[place + 1])].tolist())
        assert words in ours[place] and words in theirs[their_text]


@pytest.mark.parametrize("seed", range(3))
def test_near_duplicates_against_comparing_all_pairs(seed):
    rng = random.Random(seed)
    vocabulary = [f"word{'x' * (n % 7)}{chr(97 + n % 26)}y" for n in range(400)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(20, 60))) for _ in range(60)]
    for _ in range(60):
        words = rng.choice(texts).split()
        for _ in range(rng.randint(0, 4)):
            words[rng.randrange(len(words))] = rng.choice(vocabulary)
        texts.append(" ".join(words))
    _, encoded = encode(*texts)
    found = similarity.near_duplicates(encoded, np.zeros(len(texts), np.uint64), similarity=0.8)

    def shingles(text):
        words = text.split()
        return {tuple(words[i : i + 2]) for i in range(len(words) - 1)}

    sets = [shingles(text) for text in texts]

    def alike(first, second):
        return len(sets[first] & sets[second]) / len(sets[first] | sets[second])

    assert all(alike(first, second) >= 0.8 and second < first for first, second in found.items()), (
        "nothing is dropped wrongly"
    )
    left = [place for place in range(len(texts)) if place not in found]
    pairs = [(first, second) for first in left for second in left if second < first and alike(first, second) >= 0.8]
    assert not pairs, "nothing that is left is a near-duplicate of what is left"
    assert found


def test_symbols_decide():
    """Another number, sign or variable makes another problem."""
    base = (
        "Solve the quadratic equation y squared - 4 y = x squared - 4 for the unknown x "
        "and give all of its many solutions in order"
    )
    texts = [
        base,
        base.replace("unknown x", "unknown y"),
        base.replace("- 4 y", "+ 4 y"),
        base.replace("4 for", "5 for"),
        base.replace("many", "two"),
    ]
    corpus, encoded = encode(*texts)
    assert similarity.near_duplicates(encoded, encoded.symbols(corpus.is_symbol()), similarity=0.7) == {4: 0}


def test_text_commands_do_not_hide_words():
    plain = "How many right angles has a regular polygon with nine sides"
    marked = (
        plain.replace("right", r"\textbf{right}")
        .replace("regular", r"\textit{regular}")
        .replace("nine", r"\emph{nine}")
        .replace("sides", r"\textsc{sides}")
    )
    assert similarity.tokens(marked) == similarity.tokens(plain)
    assert similarity.tokens(r"a \leftarrow \rightarrow \textstyle b") == ["a", "leftarrow", "rightarrow", "b"]
    corpus = similarity.Corpus()
    first, second = corpus.encode([marked]), corpus.encode([plain])
    assert similarity.contaminated(first, second, 8) == {0: (0, 0)}
