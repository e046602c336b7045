"""Words that TRL, the Trainer of Hugging Face, verl and OpenRLHF use for keys of a recipe, and the keys; and keys of the release."""

from pathlib import Path

import yaml

_WORDS = yaml.load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)
RELEASE_KEYS: dict[str, str] = _WORDS["release"]
SYNONYMS: dict[str, str] = {word: keys for keys, words in _WORDS["synonyms"].items() for word in words}


def synonym_line(key: str) -> str | None:
    """Return the line of an error about a word of another trainer; None if the last part of the key is not such a word.

    key: dotted. The keys of its own section come first: `sft.learning_rate` is `sft.lr`.
    """
    *sections, word = key.lower().replace("-", "_").split(".")
    found = SYNONYMS.get(word)
    if found is None:
        return None
    if found.startswith("- "):
        return f"{key}: unknown key; {found.removeprefix('- ')}"
    keys = found.split(", ")
    near = {"rl": ("rl", "stages"), "stages": ("stages", "rl")}.get(sections[0], sections[:1]) if sections else ()
    own = [ours for ours in keys if ours.split(".")[0] in near]
    chosen = [ours for ours in own or keys if ours != key]
    return f"{key}: unknown key; here it is {' or '.join(chosen)}" if chosen else None
