"""Many short runs of the recipe tiny_fast one after the other in one process, with one vLLM engine, for measurements.

A run starts in a second, because its engine, its sandbox and its SFT model are ready.
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planted import unchecked
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.engine import Completion, Sampling
from rstar_lab.rl.engines.group import EngineGroup, open_engines
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import fine_tune, train
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.session import RunSession
from rstar_lab.sandbox import CallResult, Limits, LocalSandbox
from rstar_lab.sandbox.call import Call

RECIPE = "tiny_fast"
LIMITS = Limits(timeout_s=2.0, memory_mb=256)


class RememberingSandbox(LocalSandbox):
    """A sandbox that runs a program once: the runs of one seed repeat many programs."""

    async def run_many(self, calls: Iterable[Call]) -> list[CallResult]:
        calls = list(calls)
        known: dict[tuple[str, str], CallResult] = self.__dict__.setdefault("known", {})
        new = [call for call in calls if (call.code, call.stdin) not in known]
        results = await super().run_many(new) if new else []
        known |= {(call.code, call.stdin): result for call, result in zip(new, results, strict=True)}
        return [known[call.code, call.stdin] for call in calls]


class Port:
    """One of several names of an engine."""

    def __init__(self, engine: VllmEngine, number: int):
        self.engine, self.number, self.name, self.kv_tokens = engine, number, f"vllm-{number}", engine.kv_tokens

    def submit(self, requests: Sequence[tuple[list[int], Sampling]]) -> list["asyncio.Future[Completion]"]:
        return [asyncio.ensure_future(self._renamed(future)) for future in self.engine.submit(requests)]

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        return replace(await self.engine.generate(prompt_ids, sampling), engine=self.name)

    async def _renamed(self, future: "asyncio.Future[Completion]") -> Completion:
        return replace(await future, engine=self.name)

    async def load_weights(self, path: Path | str, version: int) -> None:
        if self.number == 0:
            await self.engine.load_weights(path, version)

    async def aclose(self) -> None: ...


async def sft_model(folder: Path) -> Path:
    """Return the model from which all runs in `folder` start. The first call trains it."""
    recipe = load_recipe(RECIPE, {"runs": str(folder), "name": "start", "processes": 1, "sft.epochs": 2})
    async with RunSession.open(resolve(recipe), Reporter()) as opened:
        return (await fine_tune(opened))[1].resolve()


@contextlib.asynccontextmanager
async def open_engine(folder: Path, model: Path, keys: Mapping[str, Any]) -> AsyncIterator[VllmEngine]:
    """Start the engine of the runs in `folder`. keys: recipe keys of the engine."""
    recipe = load_recipe(RECIPE, {**keys, "engine.count": 1, "runs": str(folder)})
    async with open_engines(recipe.engine, model, _engine_folder(folder), 1024) as group:
        (engine,) = group.engines
        assert isinstance(engine, VllmEngine)
        yield engine


async def train_one(
    folder: Path,
    name: str,
    keys: Mapping[str, Any],
    model: Path | None,
    engine: VllmEngine | None,
    sandbox: LocalSandbox,
    broken: AbstractContextManager[Any],
) -> str:
    """Make the run `name` without the checks of the trainer and mark it as done. Returns the error that ended it, or "".

    model: starting point of RL; None: the run is its SFT. broken: is open during the run.
    """
    runs = folder / "runs" / name
    shutil.rmtree(runs, ignore_errors=True)
    recipe = load_recipe(RECIPE, {**keys, "runs": str(runs)})
    error = ""
    with unchecked(), broken:
        try:
            async with RunSession.open(resolve(recipe), Reporter()) as opened:
                opened._sandbox = sandbox
                if model is None:
                    await fine_tune(opened)
                else:
                    assert engine is not None
                    opened._starting = _ready(engine, recipe, folder)
                    await train(opened, model)
        except (UserError, RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:200]
    for heavy in (*runs.glob("*/checkpoints"), *runs.glob("*/stages"), *runs.glob("*/base"), *runs.glob("*/sft")):
        shutil.rmtree(heavy, ignore_errors=True)
    done_file(folder, name).parent.mkdir(exist_ok=True)
    done_file(folder, name).write_text(json.dumps({"error": error}))
    return error


def done_file(folder: Path, name: str) -> Path:
    """Return the file that marks a run as done."""
    return folder / "done" / f"{name}.json"


def _engine_folder(folder: Path) -> Path:
    return folder / f".engine-{os.getpid()}"  # several processes can make runs of one folder


def _ready(engine: VllmEngine, recipe: Recipe, folder: Path) -> "asyncio.Task[EngineGroup]":
    ports: Any = [Port(engine, number) for number in range(2)]
    group = EngineGroup(ports, _engine_folder(folder), recipe.engine.max_num_seqs, 1e9, max_tokens=1024)

    async def ready() -> EngineGroup:
        return group

    return asyncio.ensure_future(ready())
