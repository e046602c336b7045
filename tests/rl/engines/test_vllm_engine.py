"""Tests of the vLLM engine with real vLLM: reproducible tokens, parity with transformers, new weights, restarts."""

import asyncio
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from helpers.tiny_models import make_model, prompts, worst_gap
from safetensors.torch import load_file

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engine import Completion, EngineError, FinishReason, Sampling
from rstar_lab.rl.engines.devices import end_of_log
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.recipe.sft import Lora

pytestmark = pytest.mark.slow
SHARED = pytest.mark.asyncio(loop_scope="module")
SECTION = EngineSection(dtype="float32", count=1, kv_cache_gb=0.1, max_num_seqs=32)


async def sample(engine, temperature: float = 0.8, max_tokens: int = 24):
    requests = [(prompt, Sampling(max_tokens, temperature, seed=i)) for i, prompt in enumerate(prompts())]
    return await asyncio.gather(*engine.submit(requests))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    """(group of one engine, the model whose weights it has first, its completions), shared by the tests that kill nothing."""
    folder = tmp_path_factory.mktemp("engine")
    model = make_model(folder / "model", tied=True)
    async with open_engines(SECTION, folder / "model", folder / "work", 1024) as group:
        await group.load(model, 0)
        yield group, model, await sample(group.engines[0])


@pytest_asyncio.fixture(loop_scope="module")
async def shared(started):
    """The shared group. After the test it gets its first weights, and must give the completions that it gave first."""
    group, model, first = started
    yield group
    group._ipc_failed = False
    await group.load(model, 0)
    assert values(await sample(group.engines[0])) == values(first), "the test left something behind"


def values(completions) -> list:
    return [(c.token_ids, c.log_probs, c.policy_version, c.parts) for c in completions]


@SHARED
async def test_engine_samples_and_loads_weights(shared, started, tmp_path):
    (engine,), model = shared.engines, started[1]
    await shared.load(model, 7)
    first, again = await sample(engine), await sample(engine)
    assert values(first) == values(again)
    assert {c.policy_version for c in first} == {7}
    assert all((c.finish_reason is FinishReason.LENGTH) == (len(c.token_ids) == 24) for c in first)
    # Log-probs refer to the distribution after temperature.
    assert max(worst_gap(model, p, c, 0.8) for p, c in zip(prompts(), first, strict=True)) < 2e-5

    # New weights reach all parameters, including the tied head, and the prefix cache is reset.
    other = make_model(tmp_path / "other", seed=1, tied=True)
    await shared.load(other, 8)
    changed = await sample(engine)
    assert max(worst_gap(other, p, c, 0.8) for p, c in zip(prompts(), changed, strict=True)) < 2e-5

    # A completion ends with its stop token.
    token = changed[0].token_ids[3]
    (stopped,) = await asyncio.gather(
        *engine.submit([(prompts()[0], Sampling(24, 0.8, seed=0, stop_token_ids=(token,)))])
    )
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == changed[0].token_ids[: changed[0].token_ids.index(token) + 1]

    # Interrupted requests return the tokens generated so far.
    requests = [asyncio.create_task(engine.generate(prompts()[i], Sampling(900, 0.8, seed=i))) for i in range(24)]
    await asyncio.sleep(0.02)
    engine.interrupt()
    cut = await asyncio.gather(*requests)
    assert FinishReason.ABORTED in {c.finish_reason for c in cut}
    assert all(len(c.token_ids) == len(c.log_probs) < 900 for c in cut if c.finish_reason is FinishReason.ABORTED)
    assert max(worst_gap(other, p, c, 0.8) for p, c in zip(prompts(), cut, strict=True) if c.token_ids) < 2e-5
    assert [c.token_ids for c in await sample(engine)] == [c.token_ids for c in changed]

    # A request that is too long fails without affecting others.
    with pytest.raises(EngineError, match="rejected a request"):
        await engine.generate([1] * 1100, Sampling(8))


async def test_a_killed_or_stopped_engine_recovers_with_the_newest_weights(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", seed=1)  # before tempdir changes: torch creates a cache folder there
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    make_model(tmp_path / "old")
    async with open_engines(SECTION, tmp_path / "old", tmp_path / "work", 256) as group:
        (engine,) = group.engines
        await group.load(model, 8)
        changed = await sample(engine)
        assert max(worst_gap(model, p, c, 0.8) for p, c in zip(prompts(), changed, strict=True)) < 2e-5

        # A process killed in the middle of a batch returns the same tokens.
        held = engine.submit([(p, Sampling(200, 0.8, seed=i)) for i, p in enumerate(prompts())])
        await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGKILL)
        revived = await asyncio.gather(*held)
        assert [c.token_ids[:24] for c in revived] == [c.token_ids for c in changed]
        assert [c.log_probs[:24] for c in revived] == [c.log_probs for c in changed]

        # A stopped process sends no heartbeat and is replaced.
        engine.stall_s = 12.0  # heartbeats are sent every 5 s
        os.kill(engine.pid, signal.SIGSTOP)
        restarted = await sample(engine)
        assert [c.token_ids for c in restarted] == [c.token_ids for c in changed]
        pid = engine.pid
    assert not Path(f"/proc/{pid}").exists()
    assert not list(sockets.iterdir())
    assert not list((tmp_path / "work").glob("rstar-weights-*"))
    assert len(load_file(tmp_path / "old" / "model.safetensors")) > 0


class NotOpened:
    """Stands in for a GPU tensor whose handle another process cannot open."""

    def __reduce__(self):
        return operator.truediv, (1, 0)


@SHARED
async def test_weights_that_the_engine_cannot_open_go_through_a_file(shared, tmp_path, monkeypatch):
    model, (engine,) = make_model(tmp_path / "model", seed=1, tied=True), shared.engines
    pid, load = engine.pid, engine.load_tensors
    monkeypatch.setattr(shared, "transport", lambda model: "shared-memory" if shared._ipc_failed else "cuda-ipc")
    monkeypatch.setattr(engine, "load_tensors", lambda _, version: load(lambda: ({"a": NotOpened()}, {}, {}), version))
    await shared.load(model, 1)
    assert shared._ipc_failed and engine.pid == pid, "the process was not restarted"
    completions = await sample(engine)
    assert max(worst_gap(model, p, c, 0.8) for p, c in zip(prompts(), completions, strict=True)) < 2e-5


@SHARED
async def test_an_engine_merges_shared_adapters_as_the_trainer_does(shared, started, tmp_path, monkeypatch):
    """The tensors pass through shared memory of the CPU in place of CUDA IPC; nothing is written to a file."""
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")
    model = make_model(tmp_path / "model", tied=True)
    attach_lora(model, Lora(rank=4), seed=0)
    monkeypatch.setattr(shared, "transport", lambda model: "cuda-ipc")
    monkeypatch.setattr(shared, "_file", None)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        await shared.load(model, version)
        completions = await sample(shared.engines[0])
        assert {completion.policy_version for completion in completions} == {version}
        gaps = [worst_gap(model, p, c, 0.8) for p, c in zip(prompts(), completions, strict=True)]
        assert max(gaps) < 2e-5
    assert not shared._ipc_failed and shared._file is None


@SHARED
async def test_requests_in_flight_continue_and_every_token_has_its_version(shared, started, tmp_path):
    models = [started[1], *(make_model(tmp_path / f"model{i}", seed=i, tied=True) for i in (1, 2))]
    (engine,) = shared.engines
    held = [asyncio.create_task(engine.generate(p, Sampling(900, 0.8, seed=i))) for i, p in enumerate(prompts())]
    for version, pause_s in ((1, 0.1), (2, 0.02)):  # long enough for a token, and short against 900 tokens
        await asyncio.sleep(pause_s)
        await shared.load(models[version], version)
    done = await asyncio.gather(*held)
    assert {version for c in done for version, _ in c.parts} == {0, 1, 2}
    for prompt, c in zip(prompts(), done, strict=True):
        assert len(c.token_ids) == len(c.log_probs) == sum(tokens for _, tokens in c.parts)
        assert c.policy_version == c.parts[-1][0]
        start = 0
        for version, tokens in c.parts:
            end = start + tokens
            part = Completion(c.token_ids[start:end], c.log_probs[start:end], c.finish_reason)
            assert worst_gap(models[version], prompt + c.token_ids[:start], part, 0.8) < 2e-5
            start = end


@pytest.mark.soak
async def test_forked_engines_restart_independently(tmp_path):
    make_model(tmp_path / "model")
    section = SECTION.model_copy(update={"count": 2})
    async with open_engines(section, tmp_path / "model", tmp_path / "work", 256) as group:
        wanted = [await sample(engine) for engine in group.engines]
        assert [c.token_ids for c in wanted[0]] == [c.token_ids for c in wanted[1]]
        pids = [engine.pid for engine in group.engines]
        assert len({*pids, os.getpid()}) == 3
        for i, engine in enumerate(group.engines):  # engine 0 forked engine 1
            os.kill(pids[i], signal.SIGKILL)
            again = await asyncio.gather(*(sample(engine) for engine in group.engines))
            assert [[(c.token_ids, c.log_probs) for c in some] for some in again] == [
                [(c.token_ids, c.log_probs) for c in some] for some in wanted
            ]
            assert engine.pid != pids[i]
            assert group.engines[1].pid == pids[1] or i == 1
        pids = [engine.pid for engine in group.engines]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_model_that_cannot_be_loaded_is_an_error_with_its_path(tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"could not load .*model") as caught:
        async with open_engines(SECTION, tmp_path / "model", tmp_path / "work", 256):
            pass
    log = tmp_path / "work" / "vllm-0.log"
    shown = str(caught.value).partition(f"end of the log {log}:\n")[2].splitlines()
    assert shown and all(line.strip() in log.read_text() for line in shown), "the last lines of the process's output"


@pytest.mark.parametrize(
    ("text", "shown"), [("", "  (empty)"), ("a\n\nb \n", "  a\n  b"), ("x\n" * 50, "  x\n" * 9 + "  x")]
)
def test_the_end_of_a_log_has_its_file_and_last_lines(text, shown, tmp_path):
    log = tmp_path / "server.log"
    assert end_of_log(log) == end_of_log(None) == ""
    log.write_text(text)
    assert end_of_log(log) == f"\nend of the log {log}:\n{shown}"


def test_no_engine_outlives_a_killed_parent(tmp_path):
    make_model(tmp_path / "model")
    script = f"""
import asyncio
from pathlib import Path
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.recipe import EngineSection
from rstar_lab.rl.recipe.sft import Lora
async def main():
    section = EngineSection(dtype="float32", count=1, kv_cache_gb=0.1)
    async with open_engines(section, Path({str(tmp_path / "model")!r}), Path({str(tmp_path)!r}), 256) as group:
        print(group.engines[0].pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    environment = os.environ | {"TMPDIR": str(sockets)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
    assert not list(sockets.glob("rstar-vllm-*"))
