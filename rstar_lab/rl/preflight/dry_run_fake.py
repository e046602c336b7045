"""Run real training code on fake tensors: tensors with shape and dtype, but without values.

The device "cpu" of a fake tensor stands for the GPU, because torch cannot create fake tensors of a GPU that does not exist. A fake
process group answers every collective at once, so one process plays one rank of any number.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.optim.optimizer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rstar_lab.rl.preflight.dry_run_meter import Meter


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the block."""
    missing = object()
    before = owner.__dict__.get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def modules_stay() -> contextlib.AbstractContextManager[None]:
    """Ignore `Module.to` in the block: fake parameters cannot be moved, and have the dtype that they need."""
    return replaced(torch.nn.Module, "to", lambda module, *_, **__: module)


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Join a fake process group as rank 0 of `ranks`."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 (collectives of fake tensors)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors(meter: Meter) -> Iterator[FakeTensorMode]:
    """Run the block on fake tensors, followed by `meter`."""
    import transformers.masking_utils as masking

    optimizers = sys.modules["torch.optim.optimizer"]  # `del`eted from the package
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage, size)
        return result

    backward = torch.Tensor.backward

    def labelled(*args: Any, **kwargs: Any) -> None:
        meter.phase = "backward"
        backward(*args, **kwargs)
        meter.phase = "optimizer"  # only gradient clipping and the step follow

    def stepping(*_: Any) -> None:
        meter.phase = "optimizer"

    def stepped(*_: Any) -> None:
        meter.phase = "idle"

    supported = optimizers._get_foreach_kernels_supported_devices()
    hooks = [
        optimizers.register_optimizer_step_pre_hook(stepping),
        optimizers.register_optimizer_step_post_hook(stepped),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [hook.remove() for hook in hooks])
        for owner, name, value in (
            (torch.UntypedStorage, "resize_", resized),
            (torch.Tensor, "backward", labelled),
            # Values of fake tensors that the code reads: a loss, a norm, a count.
            (FakeTensor, "item", lambda tensor: 1.0 if tensor.is_floating_point() else 1),
            (FakeTensor, "tolist", lambda tensor: [1] * tensor.numel() if tensor.dim() else 1),
            (FakeTensor, "__bool__", lambda _: True),
            (FakeTensor, "__float__", lambda _: 1.0),
            (FakeTensor, "__int__", lambda _: 1),
            (masking, "is_tracing", lambda *_: False),  # else transformers builds dense masks
            # As on a GPU, optimizers and gradient clipping process lists of tensors.
            (optimizers, "_get_foreach_kernels_supported_devices", lambda: [*supported, "cpu"]),
            (optimizers, "_foreach_supported_types", [*optimizers._foreach_supported_types, FakeTensor]),
        ):
            stack.enter_context(replaced(owner, name, value))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        yield mode
