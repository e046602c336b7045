"""The input of every preflight check: recipe, profile and the shape of the model; and the results other than a message or a UserError."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile
from rstar_lab.rl.models.config_facts import context_length, text_config
from rstar_lab.rl.models.sources import ModelError, get_model, is_named
from rstar_lab.rl.recipe import Recipe
from rstar_lab.untrusted.files import read_json, reading


@dataclass(frozen=True)
class Architecture:
    """A decoder with gated feed-forward layers.

    experts 0: dense. Otherwise every layer has `experts` feed-forward blocks of width `feed_forward`, of which a token uses
    `active_experts`. positions: the longest sequence; 0 if unknown. query_norm: queries and keys pass an RMSNorm.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool
    experts: int = 0
    active_experts: int = 0
    positions: int = 0
    query_norm: bool = False

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses."""
        return self._parameters(self.active_experts)

    @property
    def layer_parameters(self) -> int:
        """The parameters of one layer."""
        return self._layer_parameters(self.experts)

    def _layer_parameters(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden * self.feed_forward * max(1, experts) + self.hidden * self.experts
        return attention + feed_forward + 2 * self.hidden + 2 * self.head_dim

    def _parameters(self, experts: int) -> int:
        layers = self.layers * self._layer_parameters(experts)
        return layers + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def kv_bytes(self, bytes_each: int = 2) -> int:
        """KV cache of one token: 2 (key, value) x layers x kv heads x head dimension x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each

    def forward_flops(self, tokens: float, context: float) -> float:
        """2 x active parameters per token, and attention: 4 x layers x heads x head dimension x half the context."""
        return tokens * (2 * self.active_parameters + 2 * self.layers * self.heads * self.head_dim * context)


# For recipes whose model is not on this machine.
KNOWN = {
    "Qwen3-14B": Architecture(40, 5120, 40, 8, 128, 17408, 151_936, False, positions=32_768, query_norm=True),
    "Qwen3-8B": Architecture(36, 4096, 32, 8, 128, 12288, 151_936, False, positions=32_768, query_norm=True),
    "Qwen3-4B": Architecture(36, 2560, 32, 8, 128, 9728, 151_936, True, positions=32_768, query_norm=True),
    "Qwen3-1.7B": Architecture(28, 2048, 16, 8, 128, 6144, 151_936, True, positions=32_768, query_norm=True),
    "Qwen3-30B-A3B": Architecture(48, 2048, 32, 4, 128, 768, 151_936, False, 128, 8, 40_960, query_norm=True),
    "Qwen2.5-7B": Architecture(28, 3584, 28, 4, 128, 18944, 152_064, False, positions=32_768),
    "Qwen2.5-32B": Architecture(64, 5120, 40, 8, 128, 27648, 152_064, False, positions=32_768),
    "Qwen2.5-0.5B": Architecture(24, 896, 14, 2, 64, 4864, 151_936, True, positions=32_768),
    "tiny": Architecture(4, 192, 6, 2, 32, 512, 1024, False, positions=1024, query_norm=True),
}


def architecture_of(model: str) -> Architecture | None:
    """Return the shape from the folder's config.json, or by name; None if neither exists. Of a model on the Hub,
    config.json is downloaded.

    Raises UserError for a config.json without the keys of a decoder.
    """
    path = Path(model) / "config.json"
    if is_named(model):
        with contextlib.suppress(ModelError):
            path = get_model(model, weights=False) / "config.json"
    if not path.is_file():
        return KNOWN.get(Path(model).name.partition("@")[0].removesuffix("-Base").removesuffix("-Instruct"))
    with reading(f"{path}: the shape of the model cannot be read"):
        config = text_config(read_json(path, dict))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=head_dim,
            feed_forward=(config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            experts=experts,
            active_experts=config.get("num_experts_per_tok") or 0,
            positions=context_length(config) or 0,
            query_norm=str(config.get("model_type")).startswith(("qwen3", "gemma3", "olmo2")),
        )


class NotNeeded(Exception):
    """The check does not apply to this recipe or profile; it passes."""


class Skip(Exception):
    """The check needs something that cannot be reached from this machine."""


class Warn(Exception):
    """Unusual, but possibly intended."""


@dataclass(frozen=True)
class CheckContext:
    """The inputs of a check. verl_overrides: keys of verl's own configuration. model_name: the recipe's model before paths are
    resolved against the profile's storage."""

    recipe: Recipe
    profile: Profile
    verl_overrides: Mapping[str, Any]
    model_name: str = ""

    @property
    def model_dir(self) -> Path:
        """The folder of the model, which may not exist. For a model on the Hub: of its configuration and tokenizer. Raises
        UserError if a model by name cannot be found."""
        model = self.recipe.model
        return get_model(model, weights=False) if is_named(model) else Path(model)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model. Raises Skip if it is not on this machine."""
        try:
            folder = self.model_dir
        except UserError:
            raise Skip("the check `model` says why the model cannot be read") from None
        if not (folder / "tokenizer_config.json").is_file():
            raise Skip(f"the tokenizer of {self.recipe.model} is not on this machine")
        from rstar_lab.rl.models.model import load_tokenizer

        return load_tokenizer(folder)

    @property
    def architecture(self) -> Architecture:
        """The shape of the model. Raises UserError if config.json cannot be read, Skip if there is none."""
        shape = architecture_of(self.recipe.model)
        if shape is None:
            raise Skip(f"the shape of model {self.recipe.model} is unknown: the check `model` says why")
        return shape

    @property
    def gpu_profile(self) -> Profile:
        """The profile. Raises NotNeeded if it has no GPU."""
        if not self.profile.hardware.gpus:
            raise NotNeeded(f"profile {self.profile.name} has no GPU")
        return self.profile
