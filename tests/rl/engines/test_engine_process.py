"""Tests of the engine's parent side with a scripted process, of weight transports, and of GPU selection."""

import asyncio
import contextlib
import json
import os
import re
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch
from helpers.small_disk import SmallDisk
from helpers.tiny_models import make_model
from safetensors import safe_open

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import LockedFolder
from rstar_lab.rl.engine import EngineError, FinishReason, Sampling
from rstar_lab.rl.engines import group as group_module
from rstar_lab.rl.engines import vllm, weights
from rstar_lab.rl.engines.devices import environment_for, visible_gpus
from rstar_lab.rl.engines.group import EngineGroup, engine_count, spawn_engines
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.engines.weights import WeightsFile, choose_transport, read_weights, tensors_to_send
from rstar_lab.rl.recipe import EngineSection


class ScriptedProcess:
    """Stands in for the engine process. `kill` shuts down its connection."""

    def __init__(self, connection: socket.socket):
        self.connection, self.pid, self.kills = connection, 0, 0

    def kill(self) -> None:
        self.kills += 1
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        pass


class ScriptedVllm(VllmEngine):
    """An engine whose process is a thread. reasons: finish reasons of the first requests; later requests end with `stop`."""

    answer_s = 0.0
    reasons: tuple[str, ...] = ()
    weights_answer: tuple[object, ...] = ("weights", 1)
    ready: tuple[object, ...] = ("ready", 1000)

    def spawn(self, others=()):
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        os.close(life)
        self._process = self.process = ScriptedProcess(ours.dup())
        self._connection, self.theirs = Connection(ours.detach()), Connection(theirs.detach())
        self._sockets = LockedFolder("test")
        self.requests = 0
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        self.theirs.recv()
        self.theirs.send(self.ready)
        try:
            while True:
                kind, *arguments = self.theirs.recv()
                if kind == "generate":
                    time.sleep(self.answer_s)
                    for request_id, _, _ in arguments[0]:
                        reason = dict(enumerate(self.reasons)).get(self.requests, "stop")
                        self.requests += 1
                        self.theirs.send(("done", [(request_id, [5], [-0.5], reason, 0, ())]))
                elif kind == "weights":
                    self.theirs.send(self.weights_answer)
        except (EOFError, OSError):
            pass


@contextlib.asynccontextmanager
async def started(answers=(), **options):
    """Yield an engine with a scripted process. answers: attributes of ScriptedVllm. options: those of VllmEngine."""
    engine = ScriptedVllm(**options)
    vars(engine).update(answers)
    await engine.start("model", {})
    yield engine
    await engine.aclose()


@pytest.mark.slow
async def test_blocked_event_loop_does_not_count_as_a_hang():
    async with started({"answer_s": 2.0}, stall_s=1.0) as engine:
        process = engine.process
        request = asyncio.create_task(engine.generate([1], Sampling(1)))
        await asyncio.sleep(0.1)
        time.sleep(1.6)  # an update or a checkpoint  # noqa: ASYNC251
        assert (await request).token_ids == [5]
        assert process.kills == 0 and engine.process is process  # a restart would replace the process


async def test_silent_process_is_named_and_killed_after_stall_s(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "NAMED_S", 0.1)
    async with started({"answer_s": 5.0, "restarts_left": 0}, stall_s=0.3) as engine:
        process = engine.process
        for request in (  # after the first, later requests and weight updates fail at once, too
            lambda: engine.generate([1], Sampling(1)),
            lambda: engine.generate([1], Sampling(1)),
            lambda: engine.submit([([1], Sampling(1))])[0],
            lambda: engine.load_weights("weights.safetensors", 1),
        ):
            with pytest.raises(EngineError, match="died too often"):
                await asyncio.wait_for(request(), 4)
        assert process.kills >= 1 and "vllm-0, process 0, is silent" in caplog.text


async def test_a_restart_that_cannot_load_the_model_is_reported_with_its_reason():
    async with started({"answer_s": 5.0}) as engine:
        request = asyncio.create_task(engine.generate([1], Sampling(1)))
        await asyncio.sleep(0.05)
        engine.ready = ("failed", "OutOfMemoryError")
        engine.process.kill()
        with pytest.raises(EngineError, match="OutOfMemoryError"):
            await asyncio.wait_for(request, 4)


async def test_a_request_that_ends_with_an_internal_error_is_sent_once_more():
    async with started({"reasons": ("error", "stop", "error", "error")}) as engine:
        assert (await engine.generate([1], Sampling(1))).finish_reason is FinishReason.STOP
        assert engine.requests == 2
        with pytest.raises(EngineError, match="internal error"):
            await asyncio.wait_for(engine.generate([1], Sampling(1)), 4)


async def test_failed_weight_load_raises_instead_of_serving_old_weights():
    failed = ("weights_failed", "RuntimeError: vLLM did not reset its prefix cache")
    async with started({"weights_answer": failed}) as engine:
        with pytest.raises(EngineError, match="prefix cache"):
            await asyncio.wait_for(engine.load_weights("weights.safetensors", 1), 4)


def test_engines_use_the_gpus_that_the_caller_may_use(tmp_path, monkeypatch):
    spawned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(VllmEngine, "spawn", lambda self, others=(): spawned.append(self))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a2b")
    engines = spawn_engines(EngineSection(), tmp_path)
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in engines] == ["3", "GPU-8a2b"]
    assert [engine.gpu for engine in spawned] == ["3", "GPU-8a2b"]
    with pytest.raises(UserError, match=r"engine\.count: 4 engines, but only 2 GPUs"):
        engine_count(EngineSection(count=4))


def test_gpus_are_counted_without_nvidia_smi(monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == ["0", "1"]


def test_gpus_of_amd_machines_are_restricted_by_their_own_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4, 5")
    assert visible_gpus() == ["4", "5"]
    assert environment_for(["5"]) == {"HIP_VISIBLE_DEVICES": "5"}


def test_transport_is_chosen_by_where_trainer_and_engines_are(monkeypatch, tmp_path):
    assert choose_transport(10, servers=False, trainer_gpu="3", engine_gpus=("3",)) == "cuda-ipc"
    assert choose_transport(10, servers=False, trainer_gpu="3", engine_gpus=("3", "4")) == "shared-memory"
    assert choose_transport(10, servers=False, trainer_gpu=None, engine_gpus=(None,)) == "shared-memory"
    assert choose_transport(10, servers=True, trainer_gpu="3", engine_gpus=("3",)) == "file"
    assert choose_transport(10**15, servers=False) == "file"


def test_weights_that_no_longer_fit_into_shared_memory_are_sent_through_a_file(tmp_path, monkeypatch, caplog):
    disk = SmallDisk(tmp_path, "size")
    monkeypatch.setattr(weights, "SHARED_MEMORY", disk.folder)
    try:
        file = WeightsFile("shared-memory", tmp_path / "run")
        file.write({"a": torch.zeros(100)}, {})
        assert file.path.is_relative_to(disk.folder)
        file.write({"a": torch.ones(200_000)}, {})
        assert file.path.is_relative_to(tmp_path / "run") and read_weights(file.path)["a"].sum() == 200_000
        assert re.search(
            r"far is full \(800,000 bytes are needed, [\d,]+ bytes are free\); weights are sent through files",
            caplog.text,
        )
        assert list(disk.folder.iterdir()) == []
        file.close()
    finally:
        disk.unmount()


def test_weights_are_sent_in_the_engines_dtype_and_tied_ones_once(tmp_path):
    model = make_model(tmp_path / "model", tied=True)
    tensors, aliases = tensors_to_send(model.state_dict(), torch.bfloat16)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    file = WeightsFile("file", tmp_path)
    file.write(tensors, aliases)
    with safe_open(file.path, framework="pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118
        assert "lm_head.weight" in json.loads(stored.metadata()["rstar_lab.aliases"])
    read = read_weights(file.path)
    assert set(read) == set(model.state_dict())
    assert read["lm_head.weight"].data_ptr() == read["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
    file.close()
    assert not file.folder.exists()


async def test_groups_that_share_a_folder_do_not_share_weights(tmp_path):
    received = {}

    class Receiver:
        def __init__(self, name):
            self.name = name

        async def load_weights(self, path, version):
            await asyncio.sleep(0.05)  # the other group writes meanwhile
            received[self.name] = read_weights(path)

        async def aclose(self):
            pass

    models = {name: make_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    groups = {name: EngineGroup([Receiver(name)], tmp_path / "work", 1) for name in models}
    await asyncio.gather(*(groups[name].load(model, 0) for name, model in models.items()))
    for name, model in models.items():
        assert all(torch.equal(received[name][key], tensor) for key, tensor in model.state_dict().items())
        await groups[name].aclose()


class NotShared:
    """Stands in for a GPU tensor of a machine without CUDA IPC."""

    def __reduce__(self):
        raise RuntimeError("CUDA error: operation not supported")


async def test_weights_that_cannot_be_shared_go_through_a_file(tmp_path, monkeypatch):
    engine = ScriptedVllm(gpu="0")
    await engine.start("model", {})
    group = EngineGroup([engine], tmp_path / "work", 1, parity_limit=1e9)
    monkeypatch.setattr(group, "transport", lambda model: "shared-memory" if group._ipc_failed else "cuda-ipc")
    monkeypatch.setattr(group_module, "assert_parity", lambda *_: asyncio.sleep(0))
    with pytest.raises(EngineError, match="cannot be shared: CUDA error"):
        await engine.load_tensors(lambda: ({"a": NotShared()}, {}, {}), 1)
    load = engine.load_tensors
    monkeypatch.setattr(engine, "load_tensors", lambda _, version: load(lambda: ({"a": NotShared()}, {}, {}), version))
    await group.load(make_model(tmp_path / "model"), 1)
    assert group._ipc_failed and not engine.lost and engine.process.kills == 0
    await group.aclose()
