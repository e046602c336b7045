"""Sends new weights from the trainer to the engines.

`choose_transport` selects one of three transports:

- `cuda-ipc`: the engine's process maps the trainer's GPU tensors. For one vLLM engine on the trainer's GPU; nothing is copied
  to the host. With LoRA it maps the base weights and the adapters, and merges one tensor at a time while it loads them.
- `shared-memory`: a safetensors file in /dev/shm, which engines on this machine map.
- `file`: a safetensors file in the run's folder. For servers, which may run on another machine, and if /dev/shm is too small.

Whole weights are sent in the engine's dtype. Tensors with several names (a tied head) are sent once: the file's metadata and the IPC
message name the aliases.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rstar_lab.common.temporary import SHARED_MEMORY, LockedFolder
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.files import name_disk_errors, space_of
from rstar_lab.untrusted.files import parse_json

Transport = Literal["cuda-ipc", "shared-memory", "file"]
LOG = logging.getLogger(__name__)
ALIASES = "rstar_lab.aliases"  # metadata key: JSON object {alias: name of the stored tensor}


def choose_transport(
    weights_bytes: int, *, servers: bool, trainer_gpu: str | None = None, engine_gpus: tuple[str | None, ...] = ()
) -> Transport:
    """Return the fastest transport that reaches all engines.

    servers: whether an engine is a server. trainer_gpu: name of the GPU that holds the trainer's weights; None on a CPU.
    engine_gpus: for each engine process its GPU, None on a CPU.
    """
    if servers:
        return "file"
    if trainer_gpu is not None and engine_gpus == (trainer_gpu,):
        return "cuda-ipc"
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(SHARED_MEMORY).free > 2.2 * weights_bytes + 2**26:  # the old file and the new one
        return "shared-memory"
    return "file"


@torch.no_grad()
def tensors_to_send(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state dict in `dtype` without duplicates, and the aliases {duplicate: name of its tensor}.

    dtype: None for that of each tensor. A contiguous tensor that has the dtype is not copied.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in owners:
            aliases[name] = owners[key]
            continue
        owners[key] = name
        tensors[name] = tensor.detach().to(dtype if tensor.is_floating_point() else None).contiguous()
    return tensors, aliases


def resolve_aliases(tensors: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors under all their names."""
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


class WeightsFile:
    """A safetensors file in its own temporary folder, which `close` removes. Each group of engines has its own file.

    transport: `shared-memory` or `file`. folder: folder of the run, used by the transport `file`.
    """

    def __init__(self, transport: Transport, folder: Path):
        self._run_folder = folder
        self._open(SHARED_MEMORY if transport == "shared-memory" else folder)

    def _open(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self._locked = LockedFolder("weights", parent)
        self.folder = self._locked.path
        self.path = self.folder / "weights.safetensors"

    def write(self, tensors: dict[str, Tensor], aliases: Mapping[str, str]) -> None:
        """Replace the file. Engines that have mapped the old file can still read it.

        If the shared memory is full, this file and the later ones are in the folder of the run. Raises RunStoreError if the disk is
        full too.
        """
        new = self.folder / "weights.new"  # servers load every *.safetensors of the folder
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            with name_disk_errors(new, needed):
                save_file(tensors, new, {"format": "pt", ALIASES: json.dumps(dict(aliases))})
        except RunStoreError:
            new.unlink(missing_ok=True)
            if self.folder.parent != SHARED_MEMORY:
                raise
            LOG.warning(
                "%s is full%s; weights are sent through files in %s from now on",
                SHARED_MEMORY, space_of(new, needed), self._run_folder,
            )  # fmt: skip
            self.close()
            self._open(self._run_folder)
            self.write(tensors, aliases)
            return
        new.replace(self.path)

    def close(self) -> None:
        self._locked.cleanup()


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a safetensors file of a whole model, tied ones under all their names."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return resolve_aliases(tensors, parse_json(metadata.get(ALIASES, "{}"), path, dict[str, str]))
