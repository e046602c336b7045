"""A mix of conversation sets as a recipe entry: which files, how many of each, in which order."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.rl.chat_format.conversations import Conversation, read_conversations
from rstar_lab.rl.recipe import MixEntry

# rStar2-Agent, section 4.1: 165K function calls, 30K instruction following, 27K chat. Parts are given to the
# nearest thousand.
PAPER_COUNTS = {
    "toolace": 11_000,
    "apigen_mt": 5_000,
    "glaive_v2": 101_000,
    "magicoder": 48_000,
    "tulu3_if": 30_000,
    "nemotron_chat": 27_000,
}


def paper_mix(folder: Path) -> list[MixEntry]:
    """The paper's mix of FOLDER/toolace.jsonl, FOLDER/apigen_mt.jsonl ..."""
    return [MixEntry(file=folder / f"{name}.jsonl", count=count) for name, count in PAPER_COUNTS.items()]


def read_mix(entries: Sequence[MixEntry], *, seed: int = 0) -> list[Conversation]:
    """Every entry's conversations, drawn without replacement and shuffled together; the same seed gives the same list.

    Raises UserError where a file holds fewer than its entry asks for: a mix that is not the one that was asked for
    is an error.
    """
    rng = random.Random(seed)
    chosen = [conversation for entry in entries for conversation in _draw(entry, rng)]
    rng.shuffle(chosen)
    return chosen


def _draw(entry: MixEntry, rng: random.Random) -> Iterator[Conversation]:
    conversations = list(read_conversations(entry.file))
    if entry.count is None:
        return iter(conversations)
    if len(conversations) < entry.count:
        raise UserError(f"{entry.file}: holds {len(conversations):,} conversations, the mix asks for {entry.count:,}")
    return iter(rng.sample(conversations, entry.count))
