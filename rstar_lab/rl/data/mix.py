"""Read and mix the files of SFT conversations that a recipe names."""

import random
from collections.abc import Callable, Sequence

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe import MixEntry
from rstar_lab.rl.renderers.conversations import Conversation, read_conversations


def read_mix(
    entries: Sequence[MixEntry], *, seed: int = 0, on_count: Callable[[str], None] = lambda line: None
) -> list[Conversation]:
    """Return the conversations of all entries, drawn without replacement and shuffled. The same seed gives the same list.

    on_count: called with a line such as "apigen_mt: 4,873 of 5,000" for each entry with a count. Raises UserError if a file has
    fewer conversations than an entry with `exact` requests.
    """
    rng = random.Random(seed)
    chosen: list[Conversation] = []
    for entry in entries:
        conversations = list(read_conversations(entry.file))
        if entry.count is not None:
            drawn = min(entry.count, len(conversations))
            if entry.exact and drawn < entry.count:
                raise UserError(f"{entry.file}: {drawn:,} conversations, but the mix requests exactly {entry.count:,}")
            on_count(f"{entry.file.stem}: {drawn:,} of {entry.count:,}")
            conversations = rng.sample(conversations, drawn)
        chosen += conversations
    rng.shuffle(chosen)
    return chosen
