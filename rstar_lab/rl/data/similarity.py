"""Find equal texts, shared n-grams and near-duplicates among questions, with numpy operations over all texts at once."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

_LAYOUT_COMMAND = re.compile(
    r"\\(?:(?:left|right|displaystyle|text[a-z]*|math[a-z]+|mbox|boldsymbol|bm|emph|underline|operatorname|q?quad)"
    r"(?![A-Za-z])|[,;!: ])"
)
_DIGIT_GROUP = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Words of Latin letters, numbers, single other letters (Chinese text has no spaces), arithmetic signs.
_TOKEN = re.compile(r"[a-z]+|\d+|[^\W\d_a-z]|[-+*/^=<>!]")


def tokens(text: str) -> list[str]:
    """Return the words, numbers and signs of a text in lower case, without punctuation, spaces and LaTeX layout commands."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if "\\" in text:
        text = _LAYOUT_COMMAND.sub(" ", text)
    return _TOKEN.findall(_DIGIT_GROUP.sub("", text.lower()))


# Maximum comparisons of a text within one bucket. Without a limit, large buckets would take quadratic time.
_COMPARISONS = 64


class Corpus:
    """Token vocabulary of a set of texts. Only hashes of texts from the same corpus can be compared."""

    def __init__(self) -> None:
        self._vocabulary: dict[str, int] = {}

    def encode(self, texts: Iterable[str]) -> "Texts":
        """Return the token ids of texts. New tokens are added to the vocabulary."""
        ids: list[np.ndarray] = []
        vocabulary = self._vocabulary
        for text in texts:
            words = tokens(text)
            ids.append(
                np.fromiter((vocabulary.setdefault(token, len(vocabulary)) for token in words), np.int32, len(words))
            )
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        flat = np.concatenate(ids) if ids else np.empty(0, np.int32)
        return Texts(flat, np.concatenate([[0], np.cumsum(lengths)]))

    def is_symbol(self) -> np.ndarray:
        """Return whether each token is a number, a sign or a variable (one letter, except the article a): bool, (vocabulary,)."""
        symbols = (token[0].isdigit() or (len(token) == 1 and token != "a") for token in self._vocabulary)
        return np.fromiter(symbols, bool, len(self._vocabulary))

    def words(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        names = list(self._vocabulary)
        return " ".join(names[index] for index in ids)


class Texts:
    """Token ids of texts in one array: text i is ids[bounds[i]:bounds[i + 1]].

    Hashes have 64 bits, are deterministic, and can be compared only between texts of one Corpus.
    """

    def __init__(self, ids: np.ndarray, bounds: np.ndarray) -> None:
        self.ids, self.bounds = ids, bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def hashes(self) -> np.ndarray:
        """Return one uint64 hash per text: (texts,). Texts with equal tokens have equal hashes."""
        mixed = _mix(self.ids.astype(np.uint64) + np.uint64(1))
        # Sum of token hashes, each times a hash of its position, so that the order matters.
        lengths = np.diff(self.bounds)
        places = np.arange(len(mixed)) - np.repeat(self.bounds[:-1], lengths)
        weighted = mixed * _mix(places.astype(np.uint64) + np.uint64(7))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
        return _mix(sums[self.bounds[1:]] - sums[self.bounds[:-1]] + lengths.astype(np.uint64))

    def symbols(self, is_symbol: np.ndarray) -> np.ndarray:
        """Return one uint64 hash per text, of its symbols in order: (texts,). is_symbol: see `Corpus.is_symbol`."""
        chosen = is_symbol[self.ids] if len(self.ids) else np.empty(0, bool)
        bounds = np.concatenate([[0], np.cumsum(chosen)])[self.bounds]
        return Texts(self.ids[chosen], bounds).hashes()

    def ngrams(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the hash of each n-gram, the index of its text, and its start in `ids`: three arrays of shape (n-grams,).

        A text shorter than n has one n-gram: the whole text.
        """
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
    """Return the finaliser of splitmix64, a hash of 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def contaminated(texts: Texts, evaluation: Texts, n: int) -> dict[int, tuple[int, int]]:
    """Find the first n-gram that each text shares with an evaluation text.

    Returns {index of the text: (index of the evaluation text, start of the n-gram in texts.ids)}.
    """
    theirs, their_owner, _ = evaluation.ngrams(n)
    theirs, first = np.unique(theirs, return_index=True)
    ours, owner, start = texts.ngrams(n)
    if not len(theirs) or not len(ours):
        return {}
    at = np.searchsorted(theirs, ours).clip(max=len(theirs) - 1)
    hits = np.flatnonzero(theirs[at] == ours)
    matched, first_hits = np.unique(owner[hits], return_index=True)
    return {
        int(text): (int(their_owner[first[at[hits[hit]]]]), int(start[hits[hit]]))
        for text, hit in zip(matched, first_hits, strict=True)
    }


def near_duplicates(texts: Texts, symbols: np.ndarray, *, similarity: float = 0.8) -> dict[int, int]:
    """Return {index of a text: index of the earlier text of which it is a near-duplicate}.

    Two texts are near-duplicates if they have the same symbols in the same order (`symbols`: one hash per text) and the Jaccard
    similarity of their pairs of tokens is at least `similarity`. So questions that differ in a number, sign or
    variable are different problems; questions that differ in a few words are not.
    MinHash with 16 bands of 4 hashes (Broder, 1997) finds candidate pairs. It finds a pair of similarity s with probability
    1 - (1 - s^4)^16, which is 0.9998 at 0.8. The similarity of each candidate pair is then computed exactly.
    """
    shingles, owner, _ = texts.ngrams(2)
    bounds = np.searchsorted(owner, np.arange(len(texts) + 1))
    filled = np.flatnonzero(np.diff(bounds))
    if not len(filled):
        return {}
    rng = np.random.default_rng(0)
    original_of: dict[int, int] = {}
    for _ in range(16):
        band = symbols[filled].copy()
        for _ in range(4):
            salt = np.uint64(rng.integers(1, 2**63))
            band = _mix(band + np.minimum.reduceat(_mix(shingles ^ salt), bounds[:-1][filled]))
        order = np.argsort(band, kind="stable")
        edges = np.flatnonzero(np.diff(band[order])) + 1
        for bucket in np.split(order, edges):
            if len(bucket) > 1:
                _compare(filled[bucket].tolist(), shingles, bounds, symbols, similarity, original_of)
    return original_of


def _compare(
    bucket: list[int],
    shingles: np.ndarray,
    bounds: np.ndarray,
    symbols: np.ndarray,
    similarity: float,
    original_of: dict[int, int],
) -> None:
    originals: list[tuple[int, set[int]]] = []
    for text in bucket:
        if text in original_of:
            continue
        own = set(shingles[bounds[text] : bounds[text + 1]].tolist())
        for other, theirs in originals[:_COMPARISONS]:
            shared = len(own & theirs)
            if symbols[text] == symbols[other] and shared >= similarity * (len(own) + len(theirs) - shared):
                original_of[text] = other
                break
        else:
            originals.append((text, own))
