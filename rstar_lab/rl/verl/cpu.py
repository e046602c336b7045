"""A verl platform for machines without an accelerator, with the device functions that verl requires.

For tests and for trying a cluster's configuration on a laptop: one training rank, gloo, FSDP2. Selected by the environment
variables that `train.environment` sets.
"""

import functools
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "rstar_cpu"


class _CpuDevice(ModuleType):
    """`torch.cpu` with no-op versions of the `torch.cuda` functions that verl calls."""

    def __getattr__(self, name: str) -> Any:
        if name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            return lambda *_: 0
        if name == "get_device_name":
            return lambda *_: "cpu"
        if name == "mem_get_info":
            return lambda *_: (0, 1)
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
            return lambda *_: None
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return getattr(torch.cpu, name)


@PlatformRegistry.register(NAME)
class CpuPlatform(PlatformBase):
    """One CPU that Ray counts as a GPU, because verl places its workers by GPUs."""

    device_name = "cpu"  # type: ignore[assignment]
    vendor_name = "cpu"  # type: ignore[assignment]
    device_module = _CpuDevice("torch.cpu")  # type: ignore[assignment]

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing: a CPU has no such setting."""

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _ignore

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # by name only, never detected

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):  # type: ignore[no-untyped-def]
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def use_gloo() -> None:
    """Use gloo alone: verl combines `cpu:gloo` with the backend of the device, which on a CPU names one device twice."""
    from verl.utils import distributed

    distributed.initialize_global_process_group_ray = functools.partial(
        distributed.initialize_global_process_group_ray, backend="gloo"
    )


def disable_cpu_offload() -> None:
    """Disable CPU offload: verl keeps a reference model in pinned host memory, which requires an accelerator driver."""
    from torch.distributed.fsdp import OffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.CPUOffloadPolicy = lambda pin_memory: OffloadPolicy()  # type: ignore
