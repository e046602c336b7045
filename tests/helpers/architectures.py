"""Tiny random models of the architectures that rstar_lab trains."""

from typing import Any

VOCABULARY = 259
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# The sliding window is shorter than the test's rows.
_WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Qwen3Moe": _EXPERTS,
    "Qwen3_5": _LINEAR,
    "Qwen3Next": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32},
    "Gemma2": _WINDOW | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Gemma3": _WINDOW | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Phi3": {"sliding_window": 8},
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "Cohere2": _WINDOW | {"logit_scale": 0.25},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Olmo2": {},
    "SmolLM3": {},
}


def tiny_architecture(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model in float32 with an attention implementation that accepts shared rows."""
    import torch
    import transformers

    config_name = {"Qwen3_5": "Qwen3_5TextConfig", "Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_name)(**_SHAPE | ARCHITECTURES[name] | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms start as zeros and ones
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.2)
    return model.eval()
