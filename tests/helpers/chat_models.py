"""Small random chat models of several families, each with its own tokenizer, end tokens and chat template.

The templates lay out tokens as those of the families do (facts; the templates themselves are written for the tests).
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{%- endif %}{{ 'Tools:\n<tools>' }}{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
)
_TOOL_TURNS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
)
_HERMES_CALL = (
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + '
    "(c.function.arguments | tojson) + '}\n</tool_call>' }}"
)
_TAG_CALL = (
    "{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}{%- for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{%- endfor %}{{ '</function>\n</tool_call>' }}"
)


def _chatml(call: str, turn: str = "{{ m.content }}", start: str = "") -> str:
    return (
        _TOOLS
        + "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
        + "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        + turn
        + "{%- for c in m.tool_calls or [] %}"
        + call
        + "{%- endfor %}{{ '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
        + _TOOL_TURNS
        + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n"
        + start
        + "' }}{%- endif %}"
    )


# Qwen3 and Qwen3.5 leave out the reasoning of turns before the last question.
_STRIP = (
    "{%- if '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{ m.content }}{%- endif %}"
)
_LLAMA = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}{{ '<|eot_id|>' }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}"
    '{%- if tools and loop.index0 < 2 %}{{ \'Functions, called with {"name": ..., "parameters": ...}:\n\' }}'
    "{%- for tool in tools %}{{ tool | tojson + '\n' }}{%- endfor %}{%- endif %}{{ m.content | trim + '<|eot_id|>' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call a turn') }}{%- endif %}{%- set f = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + f.name + \'", "parameters": \' }}'
    "{{ f.arguments | tojson + '}<|eot_id|>' }}{%- elif m.role == 'assistant' %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson }}"
    "{{ '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_GEMMA = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of chat models. tokens: special tokens; plain: added tokens that are not special. eos: of the tokenizer and
    of generation_config.json."""

    template: str
    tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    model: str = "Qwen2"


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "llama": Family(
        _LLAMA,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
         "<|python_tag|>"),
        eos="<|eot_id|>", bos="<|begin_of_text|>", stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), model="Llama",
    ),
    "qwen2.5": Family(_chatml(_HERMES_CALL), _CHATML_TOKENS, eos="<|im_end|>", plain=_CALL_TAGS[:2]),
    "qwen3": Family(
        _chatml(_HERMES_CALL, _STRIP), _CHATML_TOKENS, eos="<|im_end|>", plain=(*_CALL_TAGS, "<think>", "</think>"),
        stops=("<|im_end|>", "<|endoftext|>"), model="Qwen3",
    ),
    "qwen3.5": Family(
        _chatml(_TAG_CALL, _STRIP, "<think>\n"), _CHATML_TOKENS, eos="<|im_end|>",
        plain=(*_CALL_TAGS, "<think>", "</think>"), model="Qwen3",
    ),
    "gemma": Family(
        _GEMMA, ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), eos="<eos>", bos="<bos>",
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
