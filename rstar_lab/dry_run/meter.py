"""Follow the memory, kernels and collectives of code that runs on fake tensors.

Memory is counted by storage, as the allocator of a GPU does: a storage counts from the operation that creates it until its last
reference is gone, in blocks of 512 bytes. The time of a kernel is the larger of its FLOPs over the GPU's peak rate and its bytes
over the memory bandwidth (roofline).
"""

import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Kind = Literal["parameters", "gradients", "moments", "activations", "logits", "buffers"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "moments", "activations", "logits", "buffers")
Phase = Literal["idle", "forward", "backward", "optimizer"]
BLOCK = 512
FP32_SHARE = 1 / 15  # rate of fp32 matrix products over bf16 (H100: 67 of 989 TFLOP/s)
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
_CLASSES = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear", "linear_backward", "_grouped_mm"),
    "attention": ("scaled_dot_product",),
    "optimizer": ("_foreach", "_fused"),
    "copies and casts": ("_to_copy", "copy_", "clone", "cat", "stack", "fill_", "zeros_like", "zeros", "zero_"),
    "softmax and loss": ("_log_softmax", "_softmax", "logsumexp", "nll_loss", "gather", "exp", "scatter"),
}
OTHER_CLASS = "elementwise"


class Allocation(NamedTuple):
    """A live storage. created: the phase of the operation that created it."""

    storage: Any
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    created: Phase
    is_collective: bool


class Collective(NamedTuple):
    """A kind of collective. ranks: size of its group. inside: whether all ranks of the group are on one node."""

    phase: Phase
    name: str
    ranks: int
    inside: bool

    def moved(self, size: float) -> float:
        """Return the bytes that a ring moves through each GPU for a buffer of `size` bytes."""
        return size * (self.ranks - 1) / self.ranks * (2 if "reduce" in self.name and "scatter" not in self.name else 1)


@dataclass
class PhasePeak:
    """The largest memory of a phase in bytes, by kind, and the largest storage at that moment."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    largest: str = ""
    largest_bytes: int = 0


class Meter(TorchDispatchMode):
    """Counts everything that runs inside its block. `phase` labels what follows.

    rates: peak rates of a GPU: bf16 FLOP/s and bytes/s of its memory.
    """

    def __init__(self, rates: tuple[float, float], vocabulary: int, gpus_per_node: int = 1):
        super().__init__()
        (self.peak_flops, self.bandwidth), self.vocabulary, self.gpus_per_node = rates, vocabulary, gpus_per_node
        self.phase: Phase = "idle"
        self.live: dict[int, Allocation] = {}
        self.now = 0
        self.kinds: dict[int, Kind] = {}  # of the storages of the training state
        self.parameter_shapes: set[tuple[int, ...]] = set()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the live storages."""
        self.peaks: dict[Phase, PhasePeak] = defaultdict(PhasePeak)
        self.flops = self.kernels = 0
        self.seconds: dict[str, float] = defaultdict(float)  # by class of kernel
        self.phase_seconds: dict[str, float] = defaultdict(float)
        self.phase_kernels: Counter[str] = Counter()
        self.collectives: Counter[Collective] = Counter()
        self.collective_bytes: Counter[Collective] = Counter()

    def track(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count the parameters and buffers of a model, and recognise its gradients and the state of its optimizer."""
        for buffer in model.buffers():
            self._add(buffer, is_collective=False)
        for parameter in model.parameters():
            self._add(parameter, is_collective=False)
            self.parameter_shapes.add(tuple(parameter.shape))
            self.kinds[_key(parameter)] = "parameters"
            if parameter.grad is not None:
                self.kinds[_key(parameter.grad)] = "gradients"
        for entry in optimizer.state.values() if optimizer else ():
            for value in entry.values():
                if isinstance(value, Tensor):
                    self.kinds[_key(value)] = "moments"

    # Memory

    def _add(self, tensor: Tensor, is_collective: bool) -> None:
        tensor = _local(tensor)
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size = _blocks(storage.nbytes())
        reference = weakref.ref(storage, partial(self._free, key))
        self.live[key] = Allocation(reference, size, tuple(tensor.shape), tensor.dtype, self.phase, is_collective)
        self.now += size
        self._note_peak()

    def _free(self, key: int, _: Any) -> None:
        if (entry := self.live.pop(key, None)) is not None:
            self.now -= entry.bytes

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record a change of the size of a storage (FSDP2 frees unsharded parameters so)."""
        entry = self.live.get(storage._cdata)
        if entry is not None:
            self.live[storage._cdata] = entry._replace(bytes=_blocks(size))
            self.now += _blocks(size) - entry.bytes
            self._note_peak()

    def _note_peak(self) -> None:
        peak = self.peaks[self.phase]
        if self.now <= peak.total:
            return
        if self.now > 1.005 * sum(peak.by_kind.values()):  # the composition is read again after a change of 0.5%
            self._compose(peak)
        peak.total = self.now

    def _compose(self, peak: PhasePeak) -> None:
        totals: Counter[str] = Counter()
        largest, entry = "", None
        for key, allocation in self.live.items():
            kind = self.kinds.get(key) or self._kind_of(allocation)
            totals[kind] += allocation.bytes
            if entry is None or allocation.bytes > entry.bytes:
                largest, entry = kind, allocation
        peak.by_kind = dict(totals)
        if entry is not None:
            dtype = str(entry.dtype).removeprefix("torch.")
            peak.largest, peak.largest_bytes = f"{largest} {list(entry.shape)} {dtype}", entry.bytes

    def _kind_of(self, allocation: Allocation) -> Kind:
        if allocation.is_collective or allocation.created in ("idle", "optimizer"):
            return "buffers"
        if allocation.shape[-1:] == (self.vocabulary,):
            return "logits"
        if allocation.created == "backward" and allocation.shape in self.parameter_shapes:
            return "gradients"
        return "activations"

    # Work

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        is_collective = function.namespace in _COLLECTIVES
        outputs = _tensors(result)
        for tensor in outputs:
            self._add(tensor, is_collective)
        self._note_peak()  # of a phase that allocates nothing
        name = function._overloadpacket.__name__
        if is_collective:
            self._count_collective(name, args, kwargs)
        elif not function.is_view and name not in _FREE and function.namespace != "prim":
            self._count_kernel(function, name, args, kwargs, outputs, result)
        return result

    def _count_kernel(
        self, function: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor], result: Any
    ) -> None:
        inputs = _tensors((args, kwargs))
        if not inputs and not outputs:
            return
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        flops = _flops(function, name, args, kwargs, result)
        dtype = inputs[0].dtype if inputs else torch.float32
        rate = self.peak_flops * (1.0 if dtype in (torch.bfloat16, torch.float16) else FP32_SHARE)
        seconds = max(flops / rate, moved / self.bandwidth)
        self.flops += flops
        self.kernels += 1
        self.seconds[_class_of(name)] += seconds
        self.phase_seconds[self.phase] += seconds
        self.phase_kernels[self.phase] += 1

    def _count_collective(self, name: str, args: Any, kwargs: Any) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors((args, kwargs))]
        if not sizes or name in ("barrier", "wait_tensor", "monitored_barrier_") or "copy" in name or "chunk" in name:
            return
        ranks = next(
            (_ranks(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.ScriptObject)), [0]
        )
        inside = len({rank // self.gpus_per_node for rank in ranks}) == 1
        key = Collective(self.phase, name.strip("_").removesuffix("_base"), len(ranks), inside)
        self.collectives[key] += 1
        self.collective_bytes[key] += max(sizes)


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))


def _flops(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name
        shapes = [tensor.shape for tensor in _tensors(args)]
        count = sdpa_backward_flop_count(*shapes[:4]) if backward else sdpa_flop_count(*shapes[:3])
        is_causal = any(leaf is True for leaf in tree_leaves((args, kwargs)))
        return count // 2 if is_causal else count  # a causal kernel computes half of the pairs
    counter = flop_registry.get(function._overloadpacket)
    return counter(*args, **kwargs, out_val=result) if counter else 0


def _class_of(name: str) -> str:
    for label, names in _CLASSES.items():
        if any(name == one or (one in name and len(one) > 8) or name.startswith(f"{one}_") for one in names):
            return label
    return OTHER_CLASS


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
