"""Processes of one thread each that share a batch on a CPU: for small models two of them beat two threads by far."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rstar_lab.errors import UserError

_TIMEOUT = timedelta(minutes=10)  # generous: a busy machine is slow to start a process
_READY = b"ready\n"
_PR_SET_PDEATHSIG = 1


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise UserError("a helper process of the training died; start the same command again to go on") from error


class Ranks:
    """This process as one of `size`; all sums over ranks are the same bits on every rank."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with _lost():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        with _lost():
            dist.gather_object(value, values)
        return values or []

    def share_weights(self, model: nn.Module) -> None:
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def sum(self, tensors: list[Tensor]) -> None:
        """Add up each tensor over the ranks, in place."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _lost():
            dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


ALONE = Ranks()


class Helpers:
    """Rank 0's side, a context manager: starts `size - 1` processes that run `entry` ("module:function", given Ranks).

    They start while the block does other things; `join` waits for them. None outlives this process or the block.
    """

    def __init__(self, entry: str, size: int):
        self._processes: list[subprocess.Popen[bytes]] = []
        self._size, self._threads, self._joined = size, torch.get_num_threads(), False
        if size == 1:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="rstar-ranks-")
        module, function = entry.split(":")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        for rank in range(1, size):
            arguments = (self._address, rank, size, os.getpid(), module, function)
            code = f"from rstar_lab.rl.data_parallel import serve\nserve{arguments!r}"
            command = [sys.executable, "-c", code]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            )

    @property
    def _address(self) -> str:
        return (Path(self._folder.name) / "rendezvous").as_uri()

    def join(self) -> Ranks:
        if self._size > 1:
            for process in self._processes:
                assert process.stdout is not None
                if process.stdout.readline() != _READY:
                    raise RuntimeError(f"a helper process of the training ended at its start (exit {process.wait()})")
            torch.set_num_threads(1)
            _init(self._address, 0, self._size)
            self._joined = True
        return Ranks(0, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._size == 1:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self._threads)
        for process in self._processes:
            if kind is not None or not self._joined:
                process.kill()
            assert process.stdout is not None
            process.stdout.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def serve(address: str, rank: int, size: int, parent: int, module: str, function: str) -> None:
    """A helper's whole life: join the others, run the function, end. It dies with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends the helpers
    if os.getppid() != parent:
        return
    import importlib

    entry = getattr(importlib.import_module(module), function)
    torch.set_num_threads(1)
    os.write(1, _READY)
    _init(address, rank, size)
    entry(Ranks(rank, size))
    dist.destroy_process_group()


def _init(address: str, rank: int, size: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=_TIMEOUT)
