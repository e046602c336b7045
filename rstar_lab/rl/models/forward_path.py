"""How the trainer computes the logits of a model, and which sequences may share a row.

The trainer computes hidden states for whole rows and logits only for the tokens that it needs, in chunks. This is exact for models
whose logits are the LM head's output, scaled or soft-capped as their config says. Several sequences in one row are exact
for models in which only attention mixes tokens. `forward_path` compares both with the model's own forward pass once.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from rstar_lab.common.errors import UserError
from rstar_lab.rl.models import packed_attention
from rstar_lab.rl.models.update_mode import noise_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_WINDOWS = ("sliding_window", "attention_chunk_size")
_SPARSE = ("index_topk", "index_topk_blocks", "indexer_budget")  # keys of attention to selected tokens
_LENGTH = 6  # tokens of the prompt and of each of two responses of the comparison
# Largest accepted difference of two logits, as a share of the largest logit. Rounding in bf16 is below 1%.
_TOLERANCE, _TOLERANCE_BF16 = 1e-3, 0.05

_log = logging.getLogger(__name__)
_paths: "WeakKeyDictionary[PreTrainedModel, tuple[Any, ForwardPath]]" = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ForwardPath:
    """What is exact for a model.

    Attributes:
        plain: True: logits are computed by the model's own forward pass, for all tokens of a row. False: the LM head is
            applied to the hidden states of the tokens that need logits.
        shared_width: widest row, in tokens, in which responses to one prompt may be isolated by an attention mask. 0:
            every sequence needs a row of its own.
        packs: whether a row may hold several sequences that position ids separate.
        splits: whether such a row may be computed with `packed_attention`.
    """

    plain: bool = False
    shared_width: float = math.inf
    packs: bool = True
    splits: bool = False

    def states(self, model: "PreTrainedModel", ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states of rows of tokens, (rows, tokens, hidden size), or with `plain` their logits.

        Args:
            model: a causal language model.
            ids: token ids, (rows, tokens).
            positions: position ids, (rows, tokens).
            mask: True where a token may attend, (rows, 1, tokens, tokens). None: causal attention.
        """
        options = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        return model(**options).logits if self.plain else model.base_model(**options).last_hidden_state

    def logits(self, model: "PreTrainedModel", states: Tensor, *, fp32: bool = False) -> Tensor:
        """Return the logits, float32, (tokens, vocabulary), for some of the tokens of `states`.

        Args:
            model: the model that computed the states.
            states: (tokens, hidden size), or with `plain` (tokens, vocabulary).
            fp32: compute the LM head in float32.

        Raises:
            UserError: `fp32` for a model that computes its logits itself.
        """
        if self.plain:
            if fp32:
                name = type(model).__name__
                raise UserError(f"rl.fp32_head: {name} computes its logits in its own way; leave the key out")
            return states.float()
        head = model.get_output_embeddings()
        if fp32:
            weights = {name: parameter.float() for name, parameter in head.named_parameters()}
            with torch.autocast(states.device.type, enabled=False):
                logits = functional_call(head, weights, (states.float(),))
        else:
            logits = head(states).float()
        config = model.config.get_text_config()
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        for name in ("final_logit_softcapping", "logits_soft_cap"):  # Gemma, RecurrentGemma
            if (cap := getattr(config, name, None)) is not None:
                logits = torch.tanh(logits / cap) * cap
        return logits


def forward_path(model: "PreTrainedModel") -> ForwardPath:
    """Return the fastest exact way to compute the model's logits.

    The first call for a model compares a small batch with the model's own forward pass, and logs each part of the fast
    path that is not exact.
    """
    attention = model.config._attn_implementation
    if attention == packed_attention.NAME:  # chosen after the comparison with "sdpa"
        attention = "sdpa"
    known = _paths.get(model)
    if known is None or known[0] != attention:
        _paths[model] = known = (attention, _find_path(model))
    return known[1]


def mixes_tokens_by_attention_only(config: Any) -> bool:
    """Return whether all layers of a model are attention layers: none has a recurrent state or a convolution over tokens.

    Args:
        config: config of the model in transformers' format. A model class that is marked as stateful in transformers
            without listing its layer types is recognised by `forward_path`.
    """
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return all(kind in _ATTENTION for kind in types)


def _find_path(model: "PreTrainedModel") -> ForwardPath:
    name = type(model).__name__
    config = model.config.get_text_config()
    if sparse := next((key for key in _SPARSE if getattr(config, key, None)), None):
        raise UserError(f"{name} cannot be trained: its sparse attention ({sparse}) depends on later tokens")
    windows = [getattr(config, key, None) for key in _WINDOWS]
    path = ForwardPath(shared_width=min((width for width in windows if width), default=math.inf))
    if not mixes_tokens_by_attention_only(config) or getattr(model, "_is_stateful", False):
        _log.warning("%s has layers with a state: every rollout and every conversation gets its own row", name)
        path = replace(path, shared_width=0, packs=False)
    if model.config._attn_implementation != "sdpa":  # others do not accept a mask of shape (rows, 1, tokens, tokens)
        path = replace(path, shared_width=0)
    if isinstance(next(model.parameters()), FakeTensor):  # fake tensors have no values to compare
        return replace(path, splits=path.packs and path.shared_width == math.inf)
    with noise_off(model), torch.no_grad():
        return _compare(model, path, name)


def _compare(model: "PreTrainedModel", path: ForwardPath, name: str) -> ForwardPath:
    """Return the path without the parts whose logits differ from those of the model's own forward pass."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    tokens = (torch.arange(3 * _LENGTH, device=device) * 7919 + 17) % vocabulary
    prompt, first, second = tokens.split(_LENGTH)
    sequences = torch.stack([torch.cat([prompt, first]), torch.cat([prompt, second])])
    rows = torch.arange(2 * _LENGTH, device=device).repeat(2, 1)
    own = ForwardPath(plain=True)
    expected = own.states(model, sequences, rows).float()
    if not _same(lambda: path.logits(model, path.states(model, sequences, rows)), expected, model):
        _log.warning("%s computes its logits in its own way: the trainer uses the whole forward pass", name)
        path = replace(path, plain=True)
    windows = path.shared_width < math.inf
    if path.shared_width >= 3 * _LENGTH:
        positions = torch.cat([rows[0], rows[0, _LENGTH:]])[None]
        part = torch.arange(3, device=device).repeat_interleave(_LENGTH)
        mask = ((part == 0) | (part[:, None] == part)).tril()[None, None]

        def shared() -> Tensor:
            return path.logits(model, path.states(model, tokens[None], positions, mask)[0, _LENGTH:])

        if not _same(shared, expected[:, _LENGTH:].flatten(0, 1), model):
            _log.warning("%s mixes responses that share a row: every rollout gets its own row", name)
            path = replace(path, shared_width=0)
    packed_ids, packed_positions = sequences.reshape(1, -1), rows.reshape(1, -1)

    def packed() -> Tensor:
        return path.logits(model, path.states(model, packed_ids, packed_positions)[0])

    if path.packs and not _same(packed, expected.flatten(0, 1), model):
        _log.warning("%s mixes conversations that share a row: every conversation gets its own row", name)
        return replace(path, packs=False)
    if path.packs and not windows and model.config._attn_implementation == "sdpa":
        packed_attention.use_packed_attention(model, packed_positions, [2 * _LENGTH] * 2)
        path = replace(path, splits=_same(packed, expected.flatten(0, 1), model))
        model.set_attn_implementation("sdpa")
    return path


def _same(logits: Any, expected: Tensor, model: "PreTrainedModel") -> bool:
    try:
        found = logits()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False  # the model does not accept such rows, or has no LM head
    rough = torch.is_autocast_enabled(expected.device.type) or model.dtype in (torch.bfloat16, torch.float16)
    limit = (_TOLERANCE_BF16 if rough else _TOLERANCE) * float(expected.abs().max())
    return float((found.reshape(expected.shape) - expected).abs().max()) <= limit
