"""The attention implementation of the trained model."""

import torch


def attention_implementation(device: torch.device, *, bf16: bool) -> str:
    """Return the name of the attention implementation for transformers.

    flash_attention_2 if flash-attn is installed, the device is a GPU and the model runs in bf16; else sdpa, which uses
    the flash kernel of torch for causal attention without a mask.
    """
    from transformers.utils import is_flash_attn_2_available

    if device.type == "cuda" and bf16 and is_flash_attn_2_available():
        return "flash_attention_2"
    return "sdpa"
