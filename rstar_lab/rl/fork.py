"""Sample continuations of a stored rollout from one or all of its turns, and store them as a run of kind `fork`.

Before the continuation starts, the earlier tool calls are executed again in order, so that tools with state have the
state of that turn. The `python` tool keeps no state between calls.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.overrides import parse_stored_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import CODE_TOOLS, EngineSection, Recipe
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import has_tokens, read_trajectories, step_rows
from rstar_lab.rl.rollout.run import run_rollouts
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.session import make_sandbox, tool_maker
from rstar_lab.rl.step import rollout_metrics
from rstar_lab.rl.tools.base import CURRENT_PROBLEM
from rstar_lab.rl.tools.code import CodeTool
from rstar_lab.rl.trajectory import StopReason, Trajectory, Turn
from rstar_lab.runs import RunStoreError
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.untrusted.files import check_type


@dataclass(frozen=True)
class ForkedRun:
    """Result of `fork`.

    run: folder of the new run, with one step per forked turn: step = turn + 1. turns: the forked turns. state: how the
    state of the tools was restored: `replay`, or `stateless` if there is none to restore. replayed: number of calls that
    were executed again. differing: how many of them returned another response than the stored one. weights: model folder
    or URL from which the continuations were sampled.
    """

    run: Path
    turns: tuple[int, ...]
    state: str
    replayed: int
    differing: int
    weights: str


def fork(
    run_dir: Path,
    traj_id: str,
    step: int,
    *,
    turn: int | None = None,
    k: int = 16,
    edit: str = "",
    model: Path | None = None,
    url: str = "",
    seed: int = 0,
    functions: Collection[str] = (),
) -> ForkedRun:
    """Sample `k` continuations of a stored rollout from the start of a turn, and store them as a run beside its run.

    turn: from 0; None: every turn. edit: text with which the model's turn starts; the loss mask excludes it. model:
    model folder to sample from with transformers in this process; default: the run's checkpoint nearest to the weights
    of the rollout. url: server to sample from instead; the tokenizer is still read from `model` or the checkpoint.
    functions: your functions, tools and MCP servers that the run's recipe names; others are not imported or contacted, because
    the run folder may come from somebody else. Code tools run in a sandbox on this machine.
    Raises UserError if the rollout has no token arrays or belongs to an environment, if the run has no checkpoint, or if
    the tokens of the rollout have other texts in the model's tokenizer, or if the recipe names functions that are not in `functions`.
    """
    job = _Fork(run_dir, traj_id, step, turn, k, edit, model, url, seed, functions)
    # In a notebook, this thread already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(job.run())).result()


class _Fork:
    def __init__(
        self, run_dir: Path, traj_id: str, step: int, turn: int | None, k: int, edit: str, model: Path | None, url: str,
        seed: int, functions: Collection[str],
    ):  # fmt: skip
        self.reader, self.step, self.k, self.edit, self.url, self.seed = RunReader(run_dir), step, k, edit, url, seed
        if k < 1:
            raise UserError(f"k must be at least 1, got {k}")
        trajectories, _ = read_trajectories(self.reader, step)
        trajectory = next((t for t in trajectories if t.traj_id == traj_id), None)
        if trajectory is None:
            raise RunStoreError(f"run {self.reader.run_id} has no trajectory {traj_id!r} at step {step}")
        if not has_tokens(trajectory):
            raise UserError(
                f"trajectory {traj_id} has no token arrays, which a fork requires: train with --set rl.token_arrays=all"
            )
        if trajectory.environment:
            raise UserError(
                f"trajectory {traj_id} belongs to environment {trajectory.environment}, whose state at a turn cannot be restored"
            )
        self.original: Trajectory = trajectory
        if turn is not None and not 0 <= turn < len(trajectory.turns):
            raise UserError(f"turn {turn}: trajectory {traj_id} has the turns 0 to {len(trajectory.turns) - 1}")
        self.turns = tuple(range(len(trajectory.turns))) if turn is None else (turn,)
        if edit and turn is None:
            raise UserError("edit requires a turn")
        self.model = model or self.reader.nearest_checkpoint(step)
        self.recipe = self._recipe(functions)
        self.replayed = self.differing = 0

    def _recipe(self, functions: Collection[str]) -> Recipe:
        """Return the run's recipe with the engine and the sandbox of the fork."""
        names = ("name", "model", "seed", "rl", "stages", "evaluate", "sandbox")
        where = f"run {self.reader.run_id}"
        recipe = parse_stored_recipe(self.reader.info["recipe"], where, names, functions, rollouts=True)
        keys = {"kind": "server", "urls": [self.url]} if self.url else {"kind": "transformers", "dtype": "float32"}
        engine = check_type(keys, EngineSection, "fork: url")
        # Not sandbox.url: the run folder may come from somebody else.
        sandbox = recipe.sandbox.model_copy(update={"url": "local", "workers": None, "fault_share": 0.0})
        return recipe.model_copy(update={"engine": engine, "sandbox": sandbox})

    async def run(self) -> ForkedRun:
        recipe, original = self.recipe, self.original
        async with AsyncExitStack() as stack:
            sandbox: Any = None
            if set(recipe.rl.tools) & set(CODE_TOOLS):
                sandbox = await stack.enter_async_context(make_sandbox(recipe.sandbox))
            tools = tool_maker(recipe, sandbox)(recipe.rl.tools)
            tokenizer = load_tokenizer(self.model)
            self._compare_tokens(tokenizer)
            codec = Codec(tokenizer, tools, recipe.rl.prompt_style)
            context = self._context(codec, tools)
            longest = len(original.prompt_ids) + context.limits.max_response_tokens
            engines = await stack.enter_async_context(
                open_engines(recipe.engine, self.model, self.reader.run_dir.parent / ".engines" / "fork", longest)
            )
            stateful = not all(isinstance(tool, CodeTool) and tool.sessions is None for tool in tools.values())
            steps = []
            for turn in self.turns:
                tasks = [self._task(turn, sample, codec) for sample in range(self.k)]
                if stateful and turn:
                    await asyncio.gather(*(self._replay(task, context) for task in tasks))
                slots = engines.slots(tasks, "async", context.limits.max_response_tokens)
                steps.append(await run_rollouts(tasks, context, slots=slots))
            if all(t.stop_reason is StopReason.ENGINE_ERROR for rollouts in steps for t in rollouts):
                raise UserError(f"no continuation could be sampled from {self.url or self.model}")
        state = "replay" if stateful and self.turns != (0,) else "stateless"
        return self._store(steps, state)

    def _compare_tokens(self, tokenizer: Any) -> None:
        """Raise UserError if a token of the rollout has another text in this tokenizer than in the run's vocabulary."""
        vocabulary = self.reader.vocabulary() or []
        for token in {*self.original.prompt_ids, *self.original.response_ids}:
            if token >= len(vocabulary):
                continue
            text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
            if text != vocabulary[token]:
                raise UserError(
                    f"{self.model} has another tokenizer than run {self.reader.run_id}: token {token} is {text!r}, not "
                    f"{vocabulary[token]!r}; name a model with the run's tokenizer"
                )

    def _context(self, codec: Codec, tools: Mapping[str, Any]) -> RolloutContext:
        """Return the limits and the sampling that the rollout had."""
        recipe, name = self.recipe, self.reader.steps()[self.step]
        reward = make_reward(recipe.rl.reward, recipe.rl.answer, recipe.rl.reward_timeout_s)
        stage = next((stage for stage in recipe.stages if stage.name == name), None)
        if stage is None or self.reader.info["kind"] == "evaluate":
            return RolloutContext.for_evaluation(codec, tools, reward, recipe.rl, recipe.evaluate)
        return RolloutContext.for_training(codec, tools, reward, recipe.settings(stage))

    def _task(self, turn: int, sample: int, codec: Codec) -> RolloutTask:
        original = self.original
        start = original.turns[turn].start
        turns: Sequence[Turn] = original.turns[:turn]
        edited = codec.encode(self.edit) if self.edit else []
        if edited:  # the next completion continues this turn, as it continues a turn that was cut off
            turns = [*turns, Turn(start, start + len(edited), self.edit, 0.0, 0.0, 0.0)]
        partial = replace(
            original,
            response_ids=original.response_ids[:start] + edited,
            loss_mask=original.loss_mask[:start] + [False] * len(edited),
            log_probs=original.log_probs[:start] + [0.0] * len(edited),
            turns=tuple(turns),
            calls=tuple(call for call in original.calls if call.turn < turn),
            stop_reason=StopReason.UNFINISHED,
        )
        problem = Problem(problem_id=original.problem_id, question=original.question, answer=original.truth)
        group = f"{original.traj_id}@{turn}"
        name = f"{group}-{hashlib.sha256(self.edit.encode()).hexdigest()[:4]}-{sample:03d}"
        return RolloutTask(problem, name, group, sample, derive_seed(self.seed, "fork", turn, sample), partial)

    async def _replay(self, task: RolloutTask, context: RolloutContext) -> None:
        """Execute the calls before the fork again to restore the state of the tools for this continuation."""
        CURRENT_PROBLEM.set(task.problem)
        assert task.partial is not None
        stored = iter(task.partial.calls)
        for turn in task.partial.turns:
            for call in context.codec.calls(turn.text)[: context.limits.max_calls_per_turn]:
                record = next(stored, None)
                if record is None:
                    return
                result = await execute_call(
                    call, context.tools, context.codec.renderer,
                    seed=derive_seed(task.seed, "replay", record.turn, record.index),
                    traj_id=task.traj_id, max_chars=context.limits.max_tool_chars,
                )  # fmt: skip
                self.replayed += 1
                self.differing += result.text != record.response

    def _store(self, steps: Sequence[Sequence[Trajectory]], state: str) -> ForkedRun:
        source, weights = self.reader, self.url or str(self.model)
        settings = {
            "traj_id": self.original.traj_id, "turns": list(self.turns), "k": self.k, "edit": self.edit, "state": state,
            "replayed": self.replayed, "differing": self.differing, "weights": weights, "seed": self.seed,
        }  # fmt: skip
        digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]
        with RunWriter.open(
            source.run_dir.parent, f"{source.run_id}-fork-{digest}", kind="fork", recipe=source.info["recipe"].for_display(),
            seed=self.seed, parent={"run": source.run_id, "step": self.step}, extra={"fork": settings},
        ) as writer:  # fmt: skip
            writer.cut(0)
            if (vocabulary := source.vocabulary()) is not None:
                writer.write_vocabulary(vocabulary)
            for turn, rollouts in zip(self.turns, steps, strict=True):
                rows = step_rows(rollouts, {}, "all")
                writer.write_step("fork", turn + 1, **rows, metrics=rollout_metrics(rollouts))
            writer.finish("finished")
            return ForkedRun(writer.run_dir, self.turns, state, self.replayed, self.differing, weights)
