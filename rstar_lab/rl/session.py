"""Shared resources of a recipe's run: sandbox, engines, tools, reward, problems and run folders."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.profiles import EXPECTED_GPUS
from rstar_lab.rl.engines.devices import VARIABLES
from rstar_lab.rl.engines.group import AnyEngine, EngineGroup, open_engines, spawn_engines
from rstar_lab.rl.environments.mixture import RunEnvironment, make_environments
from rstar_lab.rl.models.config_facts import context_length
from rstar_lab.rl.models.sources import get_model, is_named, origin_entry
from rstar_lab.rl.plugins import source_hash
from rstar_lab.rl.recipe import CODE_TOOLS, Recipe, RecipeError, RlSection, SandboxSection
from rstar_lab.rl.resolved import ResolvedRecipe
from rstar_lab.rl.reward.hidden_tests import Runner
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.section import TESTS
from rstar_lab.rl.tools.base import Tool
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.untrusted.files import read_json
from rstar_lab.untrusted.recipes import ForeignRecipe

REWIND = "; `rstar-lab rewind` continues from one of its steps with another recipe"
PROBE = "What is 3 + 4?"  # question of the prompt on which engines and trainer are compared


class RunSession:
    """Sandbox, engines, held-out problems and reward of a recipe. Sandbox and engines start when they are first needed."""

    def __init__(self, resolved: ResolvedRecipe, reporter: Reporter):
        recipe = resolved.recipe
        self.resolved, self.recipe, self.reporter = resolved, recipe, reporter
        self.runs_dir = recipe.runs
        self.work_dir = self.runs_dir / ".engines" / recipe.name
        self._stack = AsyncExitStack()
        self._sandbox: Any = None
        self._helpers: HelperProcesses | None = None
        self._environments: dict[str, RunEnvironment] | None = None
        self._starting: asyncio.Task[EngineGroup] | None = None
        self.spawned: list[AnyEngine] | None = None  # engine processes that are started before they have a model
        self.held_out = resolved.held_out
        self.run_programs = program_runner(recipe, self.sandbox)
        self.reward = resolved.reward(self.run_programs)

    @classmethod
    @asynccontextmanager
    async def open(cls, resolved: ResolvedRecipe, reporter: Reporter) -> AsyncIterator["RunSession"]:
        session = cls(resolved, reporter)
        async with session._stack:
            yield session

    def run_id(self, suffix: str) -> str:
        """Return the id of a run of this recipe, such as `tiny-sft` for the suffix `sft`."""
        return f"{self.recipe.name}-{suffix}"

    async def sandbox(self) -> Any:
        """Return the sandbox of the recipe; start or connect to it at the first call."""
        if self._sandbox is None:
            self._sandbox = await self._stack.enter_async_context(make_sandbox(self.recipe.sandbox))
        return self._sandbox

    async def tools(self) -> dict[str, Tool]:
        return (await self._tool_maker())(self.recipe.rl.tools)

    async def environments(self) -> dict[str, RunEnvironment]:
        """Return the entries of `rl.environments`, ready to run. All contexts share them."""
        if self._environments is None:
            tools = await self._tool_maker()
            loaded = dict(self.resolved.environments)
            self._environments = make_environments(self.recipe.rl, loaded, tools, self.run_programs)
        return self._environments

    async def context(
        self, tokenizer: Any, rl: RlSection | None = None, *, in_training: bool = False
    ) -> RolloutContext:
        """Return the context of training rollouts with the keys `rl`; None: of evaluation rollouts, of those `in_training` or of
        the others."""
        tools = await self.tools()
        codec = Codec(tokenizer, tools, (rl or self.recipe.rl).prompt_style)
        if self._starting is not None:
            (await asyncio.shield(self._starting)).probe = codec.prompt_ids(PROBE)
        if rl is None:
            evaluate = self.recipe.evaluate
            settings = evaluate.in_training() if in_training else evaluate
            context = RolloutContext.for_evaluation(codec, tools, self.reward, self.recipe.rl, settings)
        else:
            context = RolloutContext.for_training(codec, tools, self.reward, rl)
        return context.with_environments(await self.environments())

    async def _tool_maker(self) -> Callable[[Sequence[str]], dict[str, Tool]]:
        """Return a function that makes tools by their names in a recipe. Starts the sandbox if a tool of the run needs it."""
        return tool_maker(self.recipe, await self.sandbox() if needs_sandbox(self.recipe) else None)

    def helpers(self) -> HelperProcesses:
        """Return the processes that share each update on a CPU; start them at the first call."""
        if self._helpers is None:
            self._helpers = self._stack.enter_context(
                HelperProcesses(self.recipe.processes if device().type == "cpu" else 1)
            )
        return self._helpers

    def spawn_processes(self) -> None:
        """Start all processes now, so that they import torch and vLLM while the model is prepared."""
        self.helpers()
        self.spawned = spawn_engines(self.recipe.engine, self.work_dir)
        for engine in self.spawned:
            self._stack.push_async_callback(engine.aclose)

    def start_engines(self, model_dir: Path) -> None:
        """Start engines for models with the shape of `model_dir` in the background; `engines` waits for them."""
        if self._starting is None:
            context = open_engines(
                self.recipe.engine,
                model_dir,
                self.work_dir,
                self.max_sequence_tokens(model_dir),
                self.recipe.seed,
                self.spawned,
            )
            self._starting = asyncio.ensure_future(self._stack.enter_async_context(context))
            self._stack.push_async_callback(_end, self._starting)

    async def engines(self, model_dir: Path) -> EngineGroup:
        """Return engines for models with the shape of `model_dir`; the caller loads the weights."""
        self.start_engines(model_dir)
        assert self._starting is not None
        return await asyncio.shield(self._starting)

    def max_sequence_tokens(self, model_dir: Path) -> int:
        """Return the maximum tokens of prompt and response together in any stage or evaluation; at most the model's context."""
        responses = [self.recipe.settings(stage).limits.max_response_tokens for stage in self.recipe.stages]
        evaluate = self.recipe.evaluate
        responses += [evaluate.max_response_tokens, evaluate.in_training().max_response_tokens]
        path = model_dir / "config.json"  # for a served model, the folder may contain only the tokenizer
        config = read_json(path, dict) if path.exists() else {}
        return min(context_length(config) or 2**20, max(responses) + 2048)


def make_sandbox(section: SandboxSection) -> LocalSandbox | SandboxClient:
    """Return the sandbox of a recipe: embedded, or a client of a service. It is not started."""
    if section.url != "local":
        return SandboxClient(section.url)
    limits = Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb)
    return LocalSandbox(limits, section.workers, isolation=section.isolation)


def needs_sandbox(recipe: Recipe) -> bool:
    """Return whether a tool or the reward of the recipe runs code in the sandbox."""
    entries = recipe.rl.environments
    named = {*recipe.rl.tools, *(tool for entry in entries for tool in entry.tools)}
    return bool(named & set(CODE_TOOLS)) or TESTS in (recipe.rl.reward, *(entry.reward for entry in entries))


def program_runner(recipe: Recipe, open_sandbox: Callable[[], Awaitable[Any]]) -> Runner:
    """Return a function that runs the programs which the reward `tests` checks, with the limits of the recipe's sandbox."""
    section = recipe.sandbox
    limits: dict[str, Any] = {"timeout_s": section.timeout_s, "memory_mb": section.memory_mb}

    async def run(calls: Sequence[Call]) -> list[CallResult]:
        sandbox = await open_sandbox()
        return await sandbox.run_many([call if call.timeout_s else replace(call, **limits) for call in calls])

    return run


def tool_maker(recipe: Recipe, sandbox: Any) -> Callable[[Sequence[str]], dict[str, Tool]]:
    """Return a function that makes tools by their names in a recipe. sandbox: None if `needs_sandbox` is False."""
    section, rl = recipe.sandbox, recipe.rl
    return lambda names: make_tools(
        names,
        sandbox,
        section.timeout_s,
        section.memory_mb,
        user_timeout_s=rl.limits.tool_timeout_s,
        prompt_format=rl.prompt.format,
        fault_share=section.fault_share,
    )


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):  # the error is raised where the task is awaited
        await task


def open_run(session: RunSession, suffix: str, kind: str, same_keys: Sequence[str], **details: Any) -> RunWriter:
    """Return the writer of the run `<recipe>-<suffix>`; an existing run is continued.

    same_keys: recipe keys that must be the same as in the existing run. details: further arguments of `RunWriter.open`.
    Raises RecipeError if one of these keys, the revision of a model by name, or the source code of a function that the
    recipe names differs.
    """
    recipe = session.recipe.model_dump(mode="json")
    sources = {key: f"{name}@{source_hash(name, key)}" for key, name in session.recipe.functions.items()}
    model, run_id = session.recipe.model, session.run_id(suffix)
    extra = origin_entry(get_model(model)) if kind == "train" and (is_named(model) or Path(model).is_dir()) else {}
    extra |= (details.pop("extra", None) or {}) | ({"functions": sources} if sources else {})
    folder = session.runs_dir / run_id
    if (folder / "run.json").exists():
        _check_same_run(session, RunReader(folder), recipe, same_keys, extra)
    seed = session.recipe.seed
    return RunWriter.open(session.runs_dir, run_id, kind=kind, recipe=recipe, seed=seed, extra=extra, **details)


def _check_same_run(
    session: RunSession, run: RunReader, recipe: dict[str, Any], same_keys: Sequence[str], extra: dict[str, Any]
) -> None:
    """Raise RecipeError if a run was made with other values of `same_keys`, or another model or function of the same name."""
    info, model = run.info, session.recipe.model
    stored = info.get("extra") or {}

    def check(key: str, before: Any, now: Any, what: str, remedy: str = "") -> None:
        if differ := _difference(before, now, key):
            raise RecipeError(
                f"run {run.run_dir} was made with {what} ({differ}): choose --set name=..., or another --runs-dir{remedy}"
            )

    try:  # validation fills in the defaults of keys that are newer than the run
        old = Recipe.model_validate(info["recipe"].for_display()).model_dump(mode="json")
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        version = (info.get("versions") or {}).get("rstar_lab", "an older version")
        raise RecipeError(
            f"run {run.run_dir} was made by another version of rstar_lab ({version}), whose recipe does not fit this one"
            f" (key {key}): choose --set name=..., or another --runs-dir"
        ) from None
    for key in same_keys:
        if not _only_more_steps(old, recipe, key):
            check(key, ForeignRecipe(old).get(key), ForeignRecipe(recipe).get(key), "another recipe", REWIND)
    # The identity of an evaluation contains the hash of its model.
    if info["kind"] == "train" and is_named(model) and (before := stored.get("model_origin")) is not None:
        what = f"another version of model {model}"
        check("model", before, extra.get("model_origin"), what, ", or model=ORG/NAME@REVISION")
    for key, source in extra.get("functions", {}).items():
        what = f"another version of the source file of {source.partition('@')[0]}"
        check(key, (stored.get("functions") or {}).get(key, source), source, what)


def _only_more_steps(old: dict[str, Any], new: dict[str, Any], key: str) -> bool:
    """Return whether the stages differ only in more steps of the last one, with which a run continues."""
    if key != "stages" or not old["stages"] or not new["stages"]:
        return False
    before, after = old["stages"][-1], new["stages"][-1]
    same = [*old["stages"][:-1], before | {"steps": after["steps"]}] == new["stages"]
    return same and after["steps"] > before["steps"]


def _difference(old: Any, new: Any, key: str) -> str | None:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        parts = (_difference(old.get(name), new.get(name), f"{key}.{name}") for name in {**old, **new})
        return next((part for part in parts if part), None)
    return None if old == new else f"{key}: {old} then, {new} now"


GPU_NODES = (Path("/dev/nvidia0"), Path("/dev/kfd"))  # of NVIDIA's and AMD's drivers


def device() -> torch.device:
    """Return the device of the trainer. Raises UserError if the machine or the job's profile has GPUs that torch cannot use."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if expected := os.environ.get(EXPECTED_GPUS):
        raise UserError(
            f"no GPU: the profile of this job has {expected} per node, but torch {torch.__version__} finds none; check the driver, "
            "the build of torch and CUDA_VISIBLE_DEVICES, or use a profile without GPUs"
        )
    hidden = any(os.environ.get(variable) == "" for variable in VARIABLES)
    if (torch.version.cuda or torch.version.hip) and not hidden and any(node.exists() for node in GPU_NODES):
        needed = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        raise UserError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: its driver is missing or too old for "
            f"{needed} (CUDA 13 needs driver 580 or newer); update it, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return torch.device("cpu")


def vocabulary(tokenizer: Any) -> list[str]:
    """Return the text of every token id."""
    return tokenizer.batch_decode([[i] for i in range(len(tokenizer))], clean_up_tokenization_spaces=False)
