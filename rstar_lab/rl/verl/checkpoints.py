"""Checkpoints of verl's FSDP engine that hold each shard once, also with several replicas of the shards (HSDP).

Ranks of different replicas hold equal shards, and verl writes the model and optimizer of every rank. Importing this module
replaces verl's checkpoint manager.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed.tensor import DTensor
from verl.utils import fs
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.engine.fsdp import transformer_impl

from rstar_lab.runs.files import atomic_write
from rstar_lab.untrusted.files import read_json

_SHARDED = ("model", "optimizer")
# All ranks wait while rank 0 exports the model in fp32: 59 GB of a 14B model.
_EXPORT_TIMEOUT = timedelta(hours=2)


class OneReplicaCheckpoints(FSDPCheckpointManager):
    """Writes model and optimizer on the ranks of the first replica. The others read the file of the rank with their shard."""

    rank: int
    checkpoint_save_contents: list[str]
    checkpoint_load_contents: list[str]

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        with suppress(RuntimeError):  # a backend without timeouts
            torch.distributed.distributed_c10d._set_pg_timeout(_EXPORT_TIMEOUT)

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """Save as verl does, but each shard once. Every rank saves its RNG state."""
        contents = list(self.checkpoint_save_contents)
        if self._rank_of_shard() != self.rank:
            contents = [part for part in contents if part not in _SHARDED]
        with self._as(self.rank, save=contents):
            super().save_checkpoint(*arguments, **keywords)

    def load_checkpoint(self, local_path: str, *arguments: Any, **keywords: Any) -> None:
        """Load the shard of this rank, and its own RNG state."""
        contents = list(self.checkpoint_load_contents)
        with self._as(self._rank_of_shard(), load=[part for part in contents if part in _SHARDED]):
            super().load_checkpoint(local_path, *arguments, **keywords)
        with self._as(self.rank, load=[part for part in contents if part not in _SHARDED]):
            super().load_checkpoint(local_path, *arguments, **keywords)

    def _rank_of_shard(self) -> int:
        """Return the rank of the first replica that holds the same shard as this rank."""
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                replicas = "ddp" in (mesh.mesh_dim_names or ())
                return int(mesh.mesh[0, mesh.get_local_rank("fsdp")]) if replicas else self.rank
        return self.rank

    @contextmanager
    def _as(self, rank: int, *, save: Sequence[str] | None = None, load: Sequence[str] | None = None) -> Iterator[None]:
        saved = (self.rank, self.checkpoint_save_contents, self.checkpoint_load_contents)
        self.rank = rank
        self.checkpoint_save_contents = saved[1] if save is None else list(save)
        self.checkpoint_load_contents = saved[2] if load is None else list(load)
        try:
            yield
        finally:
            self.rank, self.checkpoint_save_contents, self.checkpoint_load_contents = saved


transformer_impl.FSDPCheckpointManager = OneReplicaCheckpoints  # type: ignore[misc]
# verl's own leaves a lock file in the temporary folder if the process is killed.
fs.local_mkdir_safe = lambda path: Path(path).mkdir(parents=True, exist_ok=True)


_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write_stored_dtype(model: Path) -> None:
    """Set `dtype` in config.json to the widest dtype of the stored weights: verl writes bfloat16 beside any weights."""
    from safetensors import safe_open

    stored = set()
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    dtype = next((name for short, name in _DTYPES.items() if short in stored), None)
    config = read_json(model / "config.json", dict)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if dtype is not None and config.get(key) != dtype:
        with atomic_write(model / "config.json") as file:
            file.write((json.dumps(config | {key: dtype}, indent=2) + "\n").encode())
