"""LoRA (arXiv 2106.09685): train low-rank adapters beside frozen linear layers, with peft's layers.

The model keeps its class. Engines and checkpoints receive the weights with the adapters merged, under the names of the base model.
The base weights in the trainer never change.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rstar_lab.common.errors import UserError
from rstar_lab.rl.recipe.sft import Lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter"  # subfolder of a stored model
PREFIX = "base_model.model."  # prefix of the weights' names in a model that peft has wrapped
_NAME = "default"  # peft's name of the adapter


def attach_lora(model: "PreTrainedModel", lora: Lora, seed: int, key: str = "rl.lora") -> None:
    """Freeze the model and add adapters to its linear layers, in place. The first output is unchanged: B is 0.

    seed: seed of the initial values of A. key: recipe key of `lora`, for errors. Raises UserError if no layer has one of the
    names in `targets`, or if the LM head is one of them and shares its weights with the embeddings.
    """
    from peft import inject_adapter_in_model

    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [target for target in lora.targets if target not in names]:
        raise UserError(
            f"{key}.targets: the model has no linear layer {', '.join(missing)}; it has {', '.join(sorted(names))}"
        )
    if "lm_head" in lora.targets and model.config.get_text_config().tie_word_embeddings:
        raise UserError(
            f"{key}.targets: lm_head shares its weights with the embeddings of this model, so its adapter cannot be merged; "
            "leave lm_head out"
        )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        device = next(model.parameters()).device
        model.to("cpu")  # type: ignore[arg-type]  # the same initial values on every device
        inject_adapter_in_model(peft_config(lora), model, adapter_name=_NAME)
        model.to(device)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()


def peft_config(lora: Lora, **options: Any) -> Any:
    """Return peft's configuration of the adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=lora.resolved_alpha, target_modules=list(lora.targets), bias="none", **options
    )


def has_lora(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


Adapter = tuple[Tensor, Tensor, float]  # A, B, alpha / rank


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Adapter]]:
    """Return the weights of the base model and the adapters, both under the base model's names of the weights. Copies nothing."""
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    state = model.state_dict()
    base = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}
    adapters = {
        f"{name}.weight": (
            layer.lora_A[_NAME].weight.detach(),
            layer.lora_B[_NAME].weight.detach(),
            layer.scaling[_NAME],
        )
        for name, layer in layers.items()
    }
    return base, adapters


def merge(weight: Tensor, adapter: Adapter | None) -> Tensor:
    """Return W + alpha / rank * B A, computed in float32 and rounded to the dtype of W."""
    if adapter is None:
        return weight
    a, b, scale = adapter
    return (weight.float() + b.float() @ a.float() * scale).to(weight.dtype)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model; with adapters, merged weights under the base model's names.

    Merged weights are on the CPU: a second copy of the model on the GPU would take as much memory as LoRA saves.
    """
    if not has_lora(model):
        return model.state_dict()
    base, adapters = split_state(model)
    return {name: merge(tensor, adapters.get(name)).cpu() for name, tensor in base.items()}


def save_adapter(folder: Path, model: nn.Module) -> None:
    """Write the adapters in peft's format, which peft and vLLM load."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=_NAME)
    state = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
    model.peft_config[_NAME].save_pretrained(folder)  # type: ignore[index, union-attr, operator]


def load_adapter(folder: Path, model: nn.Module) -> None:
    """Load adapters that `save_adapter` wrote into a model with adapters of the same shape."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    state = load_file(folder / "adapter_model.safetensors")
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    set_peft_model_state_dict(model, state, adapter_name=_NAME)
