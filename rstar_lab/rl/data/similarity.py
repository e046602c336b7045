"""Which problems are the same but for their wording: normal form, shared n-grams, near-duplicates. Vectorised over
all texts."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

_COMMAND_OF_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|text|textbf|textit|mathrm|mathbf|mathit|operatorname|quad|qquad|,|;|!|:| )"
)
_DIGIT_GROUP = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Words, numbers, and each other letter by itself (a Chinese text has no spaces), each sign of arithmetic.
_TOKEN = re.compile(r"[a-z]+|\d+|[^\W\d_a-z]|[-+*/^=<>!]")


def tokens(text: str) -> list[str]:
    """The words, numbers and signs of a text, without what only lays it out: case, spaces, punctuation, LaTeX's
    layout."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if "\\" in text:
        text = _COMMAND_OF_LAYOUT.sub(" ", text)
    return _TOKEN.findall(_DIGIT_GROUP.sub("", text.lower()))


# Of a text within one bucket: a bucket of many that are alike, yet no near-duplicates, must not cost its square.
_COMPARISONS = 64


class Corpus:
    """Texts as token ids in one array: ids (int64), and where each text starts and ends in it."""

    def __init__(self) -> None:
        self._vocabulary: dict[str, int] = {}

    def encode(self, texts: Iterable[str]) -> "Texts":
        ids: list[np.ndarray] = []
        vocabulary = self._vocabulary
        for text in texts:
            found = tokens(text)
            ids.append(
                np.fromiter((vocabulary.setdefault(token, len(vocabulary)) for token in found), np.int32, len(found))
            )
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        flat = np.concatenate(ids) if ids else np.empty(0, np.int32)
        return Texts(flat, np.concatenate([[0], np.cumsum(lengths)]))

    def is_symbol(self) -> np.ndarray:
        """Of every token id, whether it is a number, a sign or a name of one letter (all but the article a)."""
        symbols = (token[0].isdigit() or (len(token) == 1 and token != "a") for token in self._vocabulary)
        return np.fromiter(symbols, bool, len(self._vocabulary))

    def words(self, ids: Sequence[int]) -> str:
        names = list(self._vocabulary)
        return " ".join(names[index] for index in ids)


class Texts:
    """What a Corpus encoded. Hashes are 64 bits wide, deterministic, and alike for texts of one Corpus only."""

    def __init__(self, ids: np.ndarray, bounds: np.ndarray) -> None:
        self.ids, self.bounds = ids, bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def whole(self) -> np.ndarray:
        """One hash a text: equal where all tokens are."""
        return self._fold(_mix(self.ids.astype(np.uint64) + np.uint64(1)))

    def symbols(self, is_symbol: np.ndarray) -> np.ndarray:
        """One hash a text, of its symbols in their order."""
        chosen = is_symbol[self.ids] if len(self.ids) else np.empty(0, bool)
        bounds = np.concatenate([[0], np.cumsum(chosen)])[self.bounds]
        return Texts(self.ids[chosen], bounds).whole()

    def _fold(self, mixed: np.ndarray) -> np.ndarray:
        # Sum of token hashes times a hash of their place: order counts.
        lengths = np.diff(self.bounds)
        places = np.arange(len(mixed)) - np.repeat(self.bounds[:-1], lengths)
        weighted = mixed * _mix(places.astype(np.uint64) + np.uint64(7))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
        return _mix(sums[self.bounds[1:]] - sums[self.bounds[:-1]] + lengths.astype(np.uint64))

    def ngrams(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(hashes of all n-grams, which text each is of, where it starts in ids). Texts shorter than n have one: all
        they are."""
        lengths = np.diff(self.bounds)
        size = np.minimum(lengths, n)
        counts = np.where(lengths > 0, lengths - size + 1, 0)
        owner = np.repeat(np.arange(len(self)), counts)
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        start = self.bounds[owner] + offset
        width = size[owner]
        hashes = width.astype(np.uint64)
        for place in range(n):
            inside = place < width
            part = _mix(self.ids[np.where(inside, start + place, 0)].astype(np.uint64) + np.uint64(1 + (place << 32)))
            hashes = hashes + np.where(inside, part, np.uint64(0))
        return _mix(hashes), owner, start


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: spreads neighbouring integers over 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def contaminated(texts: Texts, evaluation: Texts, n: int) -> dict[int, tuple[int, int]]:
    """{text: (evaluation text, start in texts.ids)} for the first n-gram a text shares with an evaluation text."""
    theirs, their_owner, _ = evaluation.ngrams(n)
    theirs, first = np.unique(theirs, return_index=True)
    ours, owner, start = texts.ngrams(n)
    if not len(theirs) or not len(ours):
        return {}
    at = np.searchsorted(theirs, ours).clip(max=len(theirs) - 1)
    hits = np.flatnonzero(theirs[at] == ours)
    found, where = np.unique(owner[hits], return_index=True)
    return {
        int(text): (int(their_owner[first[at[hits[hit]]]]), int(start[hits[hit]]))
        for text, hit in zip(found, where, strict=True)
    }


def near_duplicates(
    texts: Texts, symbols: np.ndarray, *, similarity: float = 0.8, shingle: int = 2, bands: int = 16, rows: int = 4
) -> dict[int, int]:
    """{text: an earlier text that it nearly equals}; what is not in the result may be kept.

    Two texts are near-duplicates if they hold the same symbols in the same order (`symbols`, a hash of each) and the
    Jaccard similarity of their token `shingle`-grams is at least `similarity`: another number, sign or variable makes
    another problem, another word does not.
    Candidates come from MinHash with `bands` x `rows`: a pair at similarity s is compared
    with probability 1 - (1 - s^rows)^bands, 0.9998 at 0.8; every pair found is then compared exactly.
    """
    shingles, owner, _ = texts.ngrams(shingle)
    bounds = np.searchsorted(owner, np.arange(len(texts) + 1))
    filled = np.flatnonzero(np.diff(bounds))
    if not len(filled):
        return {}
    rng = np.random.default_rng(0)
    twin: dict[int, int] = {}
    for _ in range(bands):
        band = symbols[filled].copy()
        for _ in range(rows):
            salt = np.uint64(rng.integers(1, 2**63))
            band = _mix(band + np.minimum.reduceat(_mix(shingles ^ salt), bounds[:-1][filled]))
        order = np.argsort(band, kind="stable")
        edges = np.flatnonzero(np.diff(band[order])) + 1
        for bucket in np.split(order, edges):
            if len(bucket) > 1:
                _compare(filled[bucket].tolist(), shingles, bounds, symbols, similarity, twin)
    return twin


def _compare(
    bucket: list[int],
    shingles: np.ndarray,
    bounds: np.ndarray,
    symbols: np.ndarray,
    similarity: float,
    twin: dict[int, int],
) -> None:
    originals: list[tuple[int, set[int]]] = []
    for text in bucket:
        if text in twin:
            continue
        own = set(shingles[bounds[text] : bounds[text + 1]].tolist())
        for other, theirs in originals[:_COMPARISONS]:
            shared = len(own & theirs)
            if symbols[text] == symbols[other] and shared >= similarity * (len(own) + len(theirs) - shared):
                twin[text] = other
                break
        else:
            originals.append((text, own))
