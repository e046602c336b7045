"""Facts of a model's config that differ in their place: a multimodal model nests the config of its text part, a file is a
mapping, and some architectures lack a key or have it per layer."""

from collections.abc import Mapping
from typing import Any

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")  # keys of nested text parts
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")


def text_config(config: Any) -> Any:
    """Return the part of a config that describes the text model. config: of transformers, or a mapping as in config.json."""
    if not isinstance(config, Mapping):
        return config.get_text_config(decoder=True)
    nested = next((config[key] for key in NESTED if isinstance(config.get(key), Mapping)), None)
    return config if nested is None else text_config(nested)


def context_length(config: Any) -> int | None:
    """Return the maximum number of positions; None if the model has no limit. config: as for `text_config`."""
    found = (config_value(config, name) for name in POSITIONS)
    return next((int(value) for value in found if value), None)


def query_width(config: Any) -> int | None:
    """Return the width of the queries of a layer: heads x size of a head; None for a model without attention heads, or whose layers
    differ. config: as for `text_config`."""
    heads, hidden = config_value(config, "num_attention_heads"), config_value(config, "hidden_size")
    if not isinstance(heads, int) or not heads or differs_by_layer(config, "head_dim"):
        return None
    head_dim = config_value(config, "head_dim") or (hidden // heads if isinstance(hidden, int) else None)
    return heads * head_dim if isinstance(head_dim, int) else None


def config_value(config: Any, name: str) -> Any:
    """Return a value of the text part; None if it has none, or one per layer."""
    text = text_config(config)
    if isinstance(text, Mapping):
        return text.get(name)
    return None if differs_by_layer(text, name) else getattr(text, name, None)


def differs_by_layer(config: Any, name: str) -> bool:
    """Return whether the text part has a value per layer. transformers then raises an error if it is read for all layers."""
    layers = getattr(text_config(config), "_heterogeneity_spec", None)
    return layers is not None and name in layers.per_layer_attributes
