"""Read and mix the files of SFT conversations that a recipe names."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe import MixEntry
from rstar_lab.rl.renderers.conversations import Conversation, read_conversations

# rStar2-Agent, section 4.1: 165K function calls, 30K instruction following, 27K chat. Rounded to thousands.
PAPER_COUNTS = {
    "toolace": 11_000,
    "apigen_mt": 5_000,
    "glaive_v2": 101_000,
    "magicoder": 48_000,
    "tulu3_if": 30_000,
    "nemotron_chat": 27_000,
}


def paper_mix(folder: Path) -> list[MixEntry]:
    """Return the mix of the paper, for the files FOLDER/toolace.jsonl, FOLDER/apigen_mt.jsonl ..."""
    return [MixEntry(file=folder / f"{name}.jsonl", count=count) for name, count in PAPER_COUNTS.items()]


def read_mix(entries: Sequence[MixEntry], *, seed: int = 0) -> list[Conversation]:
    """Return the conversations of all entries, drawn without replacement and shuffled. The same seed gives the same list.

    Raises UserError if a file has fewer conversations than its entry requests.
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
        raise UserError(f"{entry.file}: {len(conversations):,} conversations, but the mix requests {entry.count:,}")
    return iter(rng.sample(conversations, entry.count))
