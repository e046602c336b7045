"""LoRA under verl: verl trains the adapters with peft; this module merges them where whole weights are needed.

vLLM receives the adapters alone (verl's own weight sync). The engines of the CPU platform and the exported checkpoints have
merged weights: W + alpha / rank * B A, computed in float32 and rounded to the dtype of W.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rstar_lab.rl.models.lora import PREFIX, merge, peft_config
from rstar_lab.rl.recipe.sft import Lora

_WEIGHTS, _INDEX = "*.safetensors", "model.safetensors.index.json"


def base_name(name: str) -> str:
    """Return the name that a weight has in the model without adapters."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def adapter_name(name: str) -> str:
    """Return the name of a weight of an adapter in peft's files: without the name of the adapter, `default`."""
    return PREFIX + name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def merged(name: str, weight: Tensor, adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return a weight of the base model with its adapter added. name: see `base_name`. adapters: by `adapter_name`."""
    layer = PREFIX + name.removesuffix(".weight")
    a, b = (adapters.get(f"{layer}.lora_{part}.weight") for part in "AB")
    return merge(weight, None if a is None or b is None else (a, b, scale))


def export_merged(source: Path, target: Path, lora: Lora) -> None:
    """Write the model of a verl checkpoint with its adapters merged, and the adapters alone to `target/adapter`.

    source: verl's `huggingface` folder, whose weights have peft's names. The result has the same files, of which one is in memory
    at a time. Does nothing if `target` exists.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    if target.exists():
        return
    hidden = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.copytree(source, hidden, ignore=shutil.ignore_patterns(_WEIGHTS, _INDEX))
    with ExitStack() as stack:
        files = {path.name: stack.enter_context(safe_open(path, "pt")) for path in sorted(source.glob(_WEIGHTS))}
        place = {name: file for file, content in files.items() for name in content.keys()}  # noqa: SIM118
        adapters = {
            adapter_name(name): files[file].get_tensor(name) for name, file in place.items() if ".lora_" in name
        }
        scale, index = lora.resolved_alpha / lora.rank, dict[str, str]()
        for file, content in files.items():
            names = {base_name(name): name for name, own in place.items() if own == file and ".lora_" not in name}
            index |= dict.fromkeys(names, file)
            weights = {name: merged(name, content.get_tensor(key), adapters, scale) for name, key in names.items()}
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, hidden / file, {"format": "pt"})
    if len(files) > 1:
        (hidden / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (hidden / "adapter").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in adapters.items()},
        hidden / "adapter" / "adapter_model.safetensors",
        {"format": "pt"},
    )
    peft_config(lora, task_type="CAUSAL_LM").save_pretrained(str(hidden / "adapter"))
    hidden.replace(target)


class AdapterSync:
    """Merges the adapters that verl sends after the base weights, for engines that load whole weights."""

    def __init__(self) -> None:
        self.base: dict[str, Tensor] = {}

    def receive(
        self, weights: Mapping[str, Tensor], peft_config: Mapping[str, Any] | None, base_sync_done: bool
    ) -> dict[str, Tensor] | None:
        """Return the weights to load; None for the base weights, which are kept until the adapters follow.

        The arguments are those of verl's `update_weights`. Without `peft_config` there are no adapters to merge.
        """
        if peft_config is None:
            return dict(weights)
        if not base_sync_done:
            self.base = {base_name(name): tensor for name, tensor in weights.items()}
            return None
        adapters = {adapter_name(name): tensor for name, tensor in weights.items()}
        scale = peft_config["lora_alpha"] / peft_config["r"]
        with torch.no_grad():
            return {name: merged(name, tensor, adapters, scale) for name, tensor in self.base.items()}
