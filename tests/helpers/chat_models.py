"""Small random chat models of several families, each with its own tokenizer, end tokens and chat template.

The templates in chat_templates/ lay out tokens as those of the families do (facts; they are written for the tests). Qwen3 and
Qwen3.5 leave out the reasoning of turns before the last question.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """A family of chat models. tokens: special tokens; plain: added tokens that are not special. eos: of the tokenizer and
    of generation_config.json."""

    name: str
    tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    model: str = "Qwen2"

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text().removesuffix("\n")


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "llama": Family(
        "llama",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
         "<|python_tag|>"),
        eos="<|eot_id|>", bos="<|begin_of_text|>", stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), model="Llama",
    ),
    "qwen2.5": Family("qwen2.5", _CHATML_TOKENS, eos="<|im_end|>", plain=_CALL_TAGS[:2]),
    "qwen3": Family(
        "qwen3", _CHATML_TOKENS, eos="<|im_end|>", plain=(*_CALL_TAGS, "<think>", "</think>"),
        stops=("<|im_end|>", "<|endoftext|>"), model="Qwen3",
    ),
    "qwen3.5": Family(
        "qwen3.5", _CHATML_TOKENS, eos="<|im_end|>",
        plain=(*_CALL_TAGS, "<think>", "</think>"), model="Qwen3",
    ),
    "gemma": Family(
        "gemma", ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), eos="<eos>", bos="<bos>",
        stops=("<eos>", "<end_of_turn>"), model="Gemma3",
    ),
}  # fmt: skip


def write_call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model of the family writes it."""
    if family == "llama":
        return json.dumps({"name": name, "parameters": arguments})
    if family == "qwen3.5":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@cache
def chat_tokenizer(family: str) -> Any:
    """Return a byte-level tokenizer with the special tokens and the chat template of a family."""
    shape = FAMILIES[family]
    return byte_tokenizer(shape.template, shape.tokens, shape.eos, shape.bos, shape.plain)


def byte_tokenizer(
    template: str, tokens: tuple[str, ...], eos: str, bos: str | None = None, plain: tuple[str, ...] = ()
) -> Any:
    """Return a byte-level tokenizer. tokens: special tokens; plain: added tokens that are not special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token=tokens[0])
    made.add_special_tokens({"additional_special_tokens": list(tokens)})
    made.add_tokens(list(plain))
    made.chat_template = template
    return made


def save_chat_model(folder: Path, family: str, seed: int = 0) -> None:
    """Write a random model of a family (two layers, 64 dimensions) and its tokenizer."""
    import torch
    import transformers

    shape, tokenizer = FAMILIES[family], chat_tokenizer(family)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 128, "max_position_embeddings": 2048, "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    name = "Gemma3Text" if shape.model == "Gemma3" else shape.model
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{shape.model}ForCausalLM")(config)
    if shape.stops:
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in shape.stops]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def parity_reward(text: str, answer: str) -> float:
    """Reward half of all texts, so that the groups of a random model have an advantage."""
    return float(sum(text.encode("utf-8", "replace")) % 2)
