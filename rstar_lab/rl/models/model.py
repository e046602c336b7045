"""Loads and saves models and tokenizers as Hugging Face folders, and builds the randomly initialised tiny model.

Weights are read from safetensors files only. Code in a model folder is never run.
"""

import functools
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypedDict

from rstar_lab.common.errors import first_line
from rstar_lab.rl.models.lora import ADAPTER, full_state, has_lora, save_adapter
from rstar_lab.rl.models.sources import ModelError, check_files, get_model, read_config
from rstar_lab.rl.renderers.base import PromptFormat
from rstar_lab.rl.renderers.formats import renderer_type
from rstar_lab.rl.renderers.paper import control_tokens
from rstar_lab.untrusted.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

_log = logging.getLogger(__name__)
_BF16_SPEEDUP = 1.2  # smallest speed-up of bf16 on a CPU that is worth its rounding
_INDEX = "model.safetensors.index.json"  # index of weights that are stored in several files


def build_tiny(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seed: int,
    hidden_size: int = 192,
    layers: int = 4,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 512,
    max_length: int = 1024,
) -> "Qwen3ForCausalLM":
    """Return a randomly initialised Qwen3 in float32. The same seed and shape give the same weights.

    The embeddings are not tied to the LM head: vLLM on a CPU keeps the old head when tied weights are reloaded.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def load_model(folder: str | Path, dtype: torch.dtype | None = None, **options: Any) -> "PreTrainedModel":
    """Load a causal language model from a folder, or by name (`sources.get_model`). dtype: None keeps the dtype of the
    folder. options: passed to from_pretrained.

    Raises ModelError if the folder is missing or broken, the weights are not in safetensors format, or tensors are missing.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = _check(get_model(str(folder)))
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # transformers, safetensors and json raise different exceptions for broken files
        raise ModelError(f"model folder {folder} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    if wrong := {
        kind: keys for kind in ("missing_keys", "mismatched_keys") if (keys := sorted(map(str, report[kind])))
    }:
        kind, keys = next(iter(wrong.items()))
        raise ModelError(
            f"model folder {folder}: {kind.replace('_', ' ')} in the weights: {', '.join(keys[:3])} ({len(keys)})"
        )
    return model


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model folder. Raises ModelError if it is missing or broken."""
    from transformers import AutoTokenizer

    folder = get_model(str(folder))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(f"model folder {folder} has no tokenizer (tokenizer.json): save the tokenizer in the folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error


def save_model(
    folder: str | Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_format: PromptFormat = "paper",
) -> None:
    """Write model (safetensors), tokenizer and the chat template of training to `folder`.

    For a model with LoRA adapters, the weights are merged, and `folder/adapter` has the adapters alone. prompt_format:
    format in which the model is trained; `model` keeps the chat template of the tokenizer. transformers and vLLM can
    load the folder. It is not replaced atomically: for that, write to a temporary folder and rename it.
    """
    from transformers.utils import logging

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=full_state(model) if has_lora(model) else None)
    if has_lora(model):
        save_adapter(folder / ADAPTER, model)
    if renderer_type(prompt_format).has_template:
        tokenizer.chat_template = chat_template_of(tokenizer, prompt_format)
    tokenizer.save_pretrained(folder)


def chat_template_of(tokenizer: "PreTrainedTokenizerBase", prompt_format: str) -> str:
    """Return the Jinja chat template of the format paper or released."""
    return renderer_type(prompt_format).chat_template(control_tokens(tokenizer))


def export_chat_template(folder: Path, prompt_format: PromptFormat = "paper") -> None:
    """Replace the chat template of the tokenizer in `folder` by that of the format; `model` keeps it."""
    if not renderer_type(prompt_format).has_template:
        return
    text = chat_template_of(load_tokenizer(folder), prompt_format)
    path = folder / "chat_template.jinja"
    path.unlink(missing_ok=True)  # the file may be a hard link to another folder's
    path.write_text(text)


def has_bf16(device: torch.device) -> bool:
    """Return whether matrix products in bf16 are faster than in float32. On a CPU with bf16, this is measured once."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return supported and _bf16_speedup() >= _BF16_SPEEDUP


@functools.cache
def _bf16_speedup() -> float:
    """Measure how many times faster this CPU computes a matrix product in bf16 than in float32, in CPU time."""

    def seconds(dtype: torch.dtype) -> float:
        states, weights = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        times = []
        for _ in range(5):  # the first prepares the kernel
            started = time.process_time()
            torch.nn.functional.linear(states, weights)
            times.append(time.process_time() - started)
        return min(times)

    speedup = seconds(torch.float32) / seconds(torch.bfloat16)
    chosen = "bf16" if speedup >= _BF16_SPEEDUP else "float32"
    _log.info("bf16 is %.1f times as fast as float32 on this CPU; precision auto is %s", speedup, chosen)
    return speedup


def _check(folder: Path) -> Path:
    config = read_config(folder)
    if "model_type" not in config:
        raise ModelError(f"{folder / 'config.json'} has no model_type: not a model in Hugging Face format")
    if config.get("auto_map"):
        raise ModelError(f"model folder {folder} contains Python code, which is not run (trust_remote_code)")
    for name in _weight_files(folder):
        if not (folder / name).is_file() or Path(name).name != name:
            raise ModelError(
                f"model folder {folder}: {name}, listed in {_INDEX}, is missing: copy all files of the model"
            )
    return check_files(folder)


class _Index(TypedDict):
    weight_map: dict[str, str]


def _weight_files(folder: Path) -> set[str]:
    """Return the names of the weight files: model.safetensors, or the files of the index. Raises ModelError without any."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors"}
    path = folder / _INDEX
    if path.is_file():
        return set(read_json(path, _Index)["weight_map"].values())
    others = ("*.safetensors", "*.bin", "*.pt*")
    other = next((path.name for pattern in others for path in sorted(folder.glob(pattern))), "none")
    raise ModelError(
        f"model folder {folder}: found {other}, but weights are read only from model.safetensors or from {_INDEX} and its files"
    )


def attention_implementation(device: torch.device, *, bf16: bool) -> str:
    """Return the name of the attention implementation for transformers.

    flash_attention_2 if flash-attn is installed, the device is a GPU and the model runs in bf16; else sdpa, which uses
    the flash kernel of torch for causal attention without a mask.
    """
    from transformers.utils import is_flash_attn_2_available

    if device.type == "cuda" and bf16 and is_flash_attn_2_available():
        return "flash_attention_2"
    return "sdpa"
