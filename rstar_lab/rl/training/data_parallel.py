"""Data parallelism on a CPU: single-threaded processes share a batch. Faster than threads for small models."""

import importlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import SHARED_MEMORY, LockedFolder
from rstar_lab.hardware.processes import GONE, exit_with_parent, wait_or_kill

_TIMEOUT = timedelta(days=7)  # helpers wait during rollouts; a dead helper closes its connection at once
STOPPED_S = 20.0
LOG = logging.getLogger(__name__)
_READY = b"ready\n"
# Ctrl-C in a terminal also reaches the helpers, perhaps during their imports: rank 0 ends them.
_BOOT = """import gc, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
gc.set_threshold(50_000)
from rstar_lab.rl.training.data_parallel import serve
"""


class RankDied(UserError):
    """Another process of the training has died."""


@contextmanager
def _helper_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankDied("a helper process of the training died; run the same command to continue") from error


class Ranks:
    """This process as one of `size` ranks. Sums over ranks are bitwise equal on every rank."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self._board: Tensor | None = None
        self._turn = 0

    def share(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with _helper_errors():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        with _helper_errors():
            dist.gather_object(value, values)
        return values or []

    def share_weights(self, model: nn.Module) -> None:
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def sum(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, in float32. Uses shared memory, because gloo's sockets copy every gradient
        several times."""
        if self.size == 1:
            return
        numel = sum(tensor.numel() for tensor in tensors)
        with _helper_errors():
            board = self._next_board(numel)
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=board[self.rank])
            dist.barrier()
        for tensor, part in zip(tensors, board.sum(0).split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def sum_gradients(self, parameters: Iterable[Tensor], *others: Tensor) -> None:
        """Sum the gradients of parameters, which are 0 if this rank has computed none, and other tensors over the ranks."""
        gradients = []
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        self.sum([*gradients, *others])

    def _next_board(self, numel: int) -> Tensor:
        """Return shared memory (ranks, numel). Two buffers alternate, so that no rank writes one that another still reads."""
        if self._board is None or self._board.shape[-1] < numel:
            self._board = self._new_board(numel)
        self._turn = 1 - self._turn
        return self._board[self._turn, :, :numel]

    def _new_board(self, numel: int) -> Tensor:
        """Allocate shared memory (2 buffers, ranks, numel). Its file is deleted once all ranks have mapped it."""
        shape = (2, self.size, numel)
        if self.rank == 0:
            room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * 4 * math.prod(shape)
            with LockedFolder("ranks", SHARED_MEMORY if room else None) as folder:
                return self._map(self.share(str(folder.path / "board")), shape)
        return self._map(self.share(None), shape)

    def _map(self, path: str, shape: tuple[int, ...]) -> Tensor:
        board = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.float32).view(shape)
        dist.barrier()
        return board


SINGLE_RANK = Ranks()


class HelperProcesses:
    """Starts `size - 1` helper processes, which wait for work; `lead` gives them an entry point. A context manager.

    The processes start in the background. They end with the block or with this process.
    """

    def __init__(self, size: int):
        self._processes: list[subprocess.Popen[bytes]] = []
        self.size, self._threads = size, torch.get_num_threads()
        self._ranks = SINGLE_RANK if size == 1 else None
        if size == 1:
            return
        torch.set_num_threads(1)
        self._folder = LockedFolder("ranks")
        self._address = (self._folder.path / "rendezvous").as_uri()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        for rank in range(1, size):
            arguments = (self._address, rank, size, os.getpid())
            code = f"{_BOOT}serve{arguments!r}"
            command = [sys.executable, "-c", code]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            )
        threading.Thread(target=self._end_stopped, daemon=True).start()

    def _end_stopped(self) -> None:
        """Kill a helper that is stopped by a signal: the other ranks would wait for it for ever."""
        stopped: set[int] = set()
        while any(process.poll() is None for process in self._processes):
            time.sleep(STOPPED_S)
            with suppress(*GONE):
                now = {p.pid for p in self._processes if psutil.Process(p.pid).status() == psutil.STATUS_STOPPED}
                for pid in now & stopped:
                    LOG.warning("helper process %d of the training is stopped; it is ended", pid)
                    psutil.Process(pid).kill()
                stopped = now

    def lead(self, entry: str) -> Ranks:
        """Run `entry` ("module:function", called with its Ranks) in every helper and return the ranks of this process."""
        if self._ranks is None:
            for process in self._processes:
                assert process.stdout is not None
                if process.stdout.readline() != _READY:
                    raise RuntimeError(f"a helper process of the training ended at its start (exit {process.wait()})")
            _init(self._address, 0, self.size)
            self._ranks = Ranks(0, self.size)
        self._ranks.share(entry)
        return self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.size == 1:
            return
        if self._ranks is None or kind is not None:
            for process in self._processes:
                process.kill()
        else:
            with suppress(UserError):  # it died after its work was done
                self._ranks.share(None)
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self._threads)
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
            wait_or_kill(process, 30)
        self._folder.cleanup()


def serve(address: str, rank: int, size: int, parent: int) -> None:
    """Main function of a helper process: join the ranks and run the entry points that rank 0 sends. Ends with its parent."""
    exit_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    from transformers import PreTrainedModel  # noqa: F401  (imported early, while rank 0 prepares)

    torch.set_num_threads(1)
    os.write(1, _READY)
    _init(address, rank, size)
    ranks = Ranks(rank, size)
    try:
        while (entry := ranks.share(None)) is not None:
            module, function = entry.split(":")
            getattr(importlib.import_module(module), function)(ranks)
    except RankDied:
        os._exit(1)  # rank 0 names the helper that died; if rank 0 died, the process that started it reports this
    dist.destroy_process_group()


def _init(address: str, rank: int, size: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=_TIMEOUT)
