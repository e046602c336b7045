"""The agent loop: the model generates a turn, its tool calls are executed, and their responses are appended, until the
model answers. Used by the local trainer, evaluation, chat and verl.

Token ids in, token ids out: generated tokens are never decoded and encoded again; text is decoded for parsing only.
Source: rStar2-Agent, section 2.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome, count_errors
from rstar_lab.rl.algorithm.roc import format_penalty, tool_error_penalty
from rstar_lab.rl.engine import Completion, Engine, EngineError, FinishReason, Sampling, WrittenTurn
from rstar_lab.rl.environments.base import NO_OBSERVATION, EnvironmentFailure, ModelMessage, Observation
from rstar_lab.rl.environments.episode import Episode
from rstar_lab.rl.renderers.base import Renderer, is_void_turn
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import CURRENT_PROBLEM, Tool, ToolResult, argument_error
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.tool_calls import ToolCall
from rstar_lab.verify import AnswerFormat, Undecided, extract_answer

ANSWER_TAG = "<answer>"

log = logging.getLogger(__name__)


def make_trajectory(
    turns: Sequence[Turn], calls: Sequence[ToolCallRecord], answer_format: AnswerFormat = "tagged", **fields: Any
) -> Trajectory:
    """Return the trajectory of these turns and calls: its text, answer and penalties follow from them. fields: all others."""
    text = "\n".join(turn.text for turn in turns)
    return Trajectory(
        turns=tuple(turns), calls=tuple(calls), text=text, answer=extract_answer(text, answer_format),
        p_err=tool_error_penalty(*count_errors([call.outcome for call in calls])),
        p_format=format_penalty(text.count(ANSWER_TAG), len(turns)), **fields,
    )  # fmt: skip


async def run_rollout(
    task: RolloutTask,
    engine: Engine,
    context: RolloutContext,
    *,
    on_turn: Callable[[str, bool], None] | None = None,
    on_written: Callable[[WrittenTurn], Awaitable[None]] | None = None,
) -> Trajectory:
    """Generate the rollout of `task`, or continue `task.partial`, and return its trajectory.

    on_turn: called with the text of each turn and whether it is the last, before the tools of the turn run.
    on_written: called after each turn but the first, before its tools run.

    A failure of the engine or the environment does not raise: it ends the rollout with StopReason.ENGINE_ERROR or
    ENVIRONMENT_ERROR. So does a reward without a result: StopReason.UNDECIDED.
    """
    CURRENT_PROBLEM.set(task.problem)
    context = context.of(task.problem)
    rollout = _Rollout(task, engine, context, on_turn, on_written)
    try:
        episode = rollout.episode = context.open(task)
        if task.partial is None:
            rollout.question = await episode.reset(task.seed)
            rollout.prompt_ids = context.codec.prompt_ids(rollout.question)
        stop = await rollout.run()
        trajectory = rollout.trajectory(stop)
        if stop is StopReason.ENVIRONMENT_ERROR:
            return trajectory
        try:
            reward, metrics = await episode.score(trajectory)
        except Undecided as undecided:
            log.warning("rollout %s: %s", task.traj_id, undecided)
            return replace(trajectory, stop_reason=StopReason.UNDECIDED, error=str(undecided))
        return replace(trajectory, reward=reward, metrics=metrics)
    except EnvironmentFailure as failure:
        log.warning("%s", failure)
        return rollout.trajectory(StopReason.ENVIRONMENT_ERROR, str(failure))
    finally:
        await context.close(task.traj_id)


@dataclass(frozen=True, slots=True)
class _Generated:
    """A turn that the model has written. Its tokens start at `start` of the response."""

    start: int
    text: str
    finish_reason: FinishReason
    generate_s: float
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Acted:
    """What followed a turn. continues: whether another turn may follow."""

    calls: list[ToolCall]
    results: list[ToolResult]
    observation: Observation
    continues: bool


@dataclass
class _Rollout:
    """A rollout in progress, new or the continuation of `task.partial`. Arguments: those of `run_rollout`.

    ids, mask, log_probs: arrays of the response so far. open_turn: the start of a turn, at the end of `task.partial`; the
    next completion continues it. question: the first user message. error: why the environment failed.
    """

    task: RolloutTask
    server: Engine
    context: RolloutContext
    on_turn: Callable[[str, bool], None] | None
    on_written: Callable[[WrittenTurn], Awaitable[None]] | None
    episode: Episode | None = None
    error: str = ""
    open_turn: Turn | None = None

    def __post_init__(self) -> None:
        self.question, self.engine, self.policy_version = self.task.problem.question, "", 0
        self.ids, self.mask, self.log_probs = list[int](), list[bool](), list[float]()
        self.turns, self.calls = list[Turn](), list[ToolCallRecord]()
        if (partial := self.task.partial) is None:
            self.prompt_ids = self.context.codec.prompt_ids(self.question)
            return
        self.prompt_ids, self.question = partial.prompt_ids, partial.question
        self.engine, self.policy_version = partial.engine, partial.policy_version
        self.ids, self.mask, self.log_probs = [*partial.response_ids], [*partial.loss_mask], [*partial.log_probs]
        self.turns, self.calls = [*partial.turns], [*partial.calls]
        # A turn at the end of the response, without tool responses after it, is not finished.
        if self.turns and self.turns[-1].end == len(self.ids):
            self.open_turn = self.turns.pop()

    @property
    def all_turns(self) -> list[Turn]:
        return self.turns if self.open_turn is None else [*self.turns, self.open_turn]

    def trajectory(self, stop: StopReason, error: str = "") -> Trajectory:
        """Return the trajectory so far, without a reward."""
        task, problem = self.task, self.task.problem
        return make_trajectory(
            self.all_turns, self.calls, self.context.answer_format,
            traj_id=task.traj_id, problem_id=problem.problem_id, group_id=task.group_id, sample=task.sample,
            question=self.question, truth=problem.answer, environment=problem.environment,
            prompt_ids=self.prompt_ids, response_ids=self.ids, loss_mask=self.mask, log_probs=self.log_probs,
            engine=self.engine, policy_version=self.policy_version,
            stop_reason=stop, reward=0.0, error=error or self.error,
        )  # fmt: skip

    def prefix(self, end: int) -> Trajectory:
        """Return the trajectory before the current turn, which starts at token `end` of the response."""
        trajectory = self.trajectory(StopReason.UNFINISHED)
        ids, mask, log_probs = self.ids[:end], self.mask[:end], self.log_probs[:end]
        return replace(trajectory, response_ids=ids, loss_mask=mask, log_probs=log_probs)

    async def run(self) -> StopReason:
        """Generate turns until the rollout ends; return why it ended."""
        limits, spent_s = self.context.limits, sum(turn.generate_s + turn.tool_s for turn in self.all_turns)
        deadline = None if limits.time_limit_s is None else time.monotonic() - spent_s + limits.time_limit_s
        while len(self.turns) < limits.max_turns:
            generated = await self._generate(deadline)
            if isinstance(generated, StopReason):
                return generated
            acted = await self._act(generated)
            if stop := self._observe(generated, acted):
                return stop
        return StopReason.MAX_TURNS

    async def _generate(self, deadline: float | None) -> "_Generated | StopReason":
        """Let the model write a turn, or the rest of an open one. Returns why the rollout ends if it does not."""
        start = self.open_turn.start if self.open_turn else len(self.ids)
        requested = time.monotonic()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - requested) as timeout:
                completion = await self.server.generate(self.prompt_ids + self.ids, self._sampling(start))
        except TimeoutError:
            if not timeout.expired():
                raise
            return StopReason.TIME_LIMIT
        except EngineError:
            return StopReason.ENGINE_ERROR
        generate_s = time.monotonic() - requested
        versions: tuple[tuple[int, int], ...] = ()
        if self.open_turn:
            generate_s, versions = generate_s + self.open_turn.generate_s, self.open_turn.versions
        versions = self._append(completion, versions)
        self.open_turn = None
        if self.on_written and self.turns:
            first = self.log_probs[: self.turns[0].end]
            await self.on_written(WrittenTurn(self.log_probs[start:], first, lambda: self.prefix(start), self.context))
        text = self.context.codec.decode(self.ids[start:])
        return _Generated(start, text, completion.finish_reason, generate_s, versions)

    async def _act(self, generated: _Generated) -> _Acted:
        """Execute the calls of a turn, let the environment react, and append the turn."""
        context, codec, text = self.context, self.context.codec, generated.text
        parsed = codec.calls(text)
        # A turn that was cut off may contain complete calls; they are not executed.
        ended = generated.finish_reason is FinishReason.STOP
        calls = parsed if ended else []
        tools_started = time.monotonic()
        observation = await self._step(text, ()) if ended and not calls else NO_OBSERVATION
        may_continue = len(self.turns) + 1 < context.limits.max_turns and not observation.done
        continues = may_continue and bool(calls or observation.text)
        if self.on_turn:
            self.on_turn(text, not continues)
        results = await self._execute(calls) if continues else []
        self.turns.append(
            Turn(
                start=generated.start,
                end=len(self.ids),
                text=text,
                generate_s=generated.generate_s,
                tool_s=time.monotonic() - tools_started,
                queue_s=max((result.queue_s for result in results), default=0.0),
                versions=generated.versions,
                void=is_void_turn(text, parsed, context.answer_format),
                control_token=codec.has_misplaced_control_token(text),
                observation=observation.text,
                reward=observation.reward,
            )
        )
        # `position` is where the tool responses of this turn start.
        records = [
            ToolCallRecord(
                len(self.turns) - 1, index, call.name or "", result.code, result.outcome, result.text, result.queue_s,
                result.run_s, position=len(self.ids),
            )
            for index, (call, result) in enumerate(zip(calls, results, strict=False))
        ]  # fmt: skip
        self.calls += records
        if records:
            observation = await self._step(text, tuple(records))
            if observation.text or observation.reward is not None:
                self.turns[-1] = replace(self.turns[-1], observation=observation.text, reward=observation.reward)
        return _Acted(calls, results, observation, continues)

    def _observe(self, generated: _Generated, acted: _Acted) -> StopReason | None:
        """Append what the model sees next. Returns why the rollout ends, or None if it continues."""
        context, observation = self.context, acted.observation
        if generated.finish_reason is FinishReason.LENGTH:
            return StopReason.LENGTH
        if observation.done:
            return StopReason.ENVIRONMENT_ERROR if self.error else StopReason.DONE
        if not acted.calls and not observation.text:
            return StopReason.ANSWERED
        if not acted.continues:
            return StopReason.MAX_TURNS
        texts, names = [result.text for result in acted.results], [call.name or "" for call in acted.calls]
        last_id = self.ids[-1] if self.ids else None
        response_ids = context.codec.tool_response_ids(texts, names, last_id, observation.text or None)
        start = len(self.ids)
        if start + len(response_ids) >= context.limits.max_response_tokens:
            return StopReason.LENGTH
        self.ids += response_ids
        self.mask += [False] * len(response_ids)
        self.log_probs += [0.0] * len(response_ids)
        if context.marks_outputs:
            shown = [result.text for result in acted.results if result.outcome not in INFRASTRUCTURE_FAILURES]
            spans = context.codec.output_spans(response_ids, [*shown, observation.text], start)
            self.turns[-1] = replace(self.turns[-1], outputs=spans)
        return None

    async def _step(self, text: str, calls: tuple[ToolCallRecord, ...]) -> Observation:
        """Return the observation of the environment after a turn. If it fails, set `error` and end the rollout."""
        assert self.episode is not None
        if not self.episode.has_step:
            return NO_OBSERVATION
        # A turn with calls is in self.turns already; a turn without calls is not.
        turn = len(self.turns) - 1 if calls else len(self.turns)
        try:
            return await self.episode.step(ModelMessage(text, calls, turn))
        except EnvironmentFailure as failure:
            log.warning("%s", failure)
            self.error = str(failure)
            return Observation(done=True)

    def _sampling(self, start: int) -> Sampling:
        context = self.context
        key: tuple[object, ...] = ("turn", len(self.turns))
        if self.open_turn:
            key += (len(self.ids) - start,)
        return Sampling(
            context.limits.max_response_tokens - len(self.ids),
            context.temperature,
            context.top_p,
            derive_seed(self.task.seed, *key),
            context.codec.stop_token_ids,
        )

    def _append(self, completion: Completion, versions: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Append the tokens of a completion; return `versions`, the (policy version, tokens) of the turn, extended."""
        tokens = len(completion.token_ids)
        self.ids += completion.token_ids
        self.mask += [True] * tokens
        self.log_probs += completion.log_probs
        if not tokens:
            return versions
        self.engine, self.policy_version = completion.engine, completion.policy_version
        by_version = groupby([*versions, *completion.parts], key=itemgetter(0))
        return tuple((version, sum(count for _, count in parts)) for version, parts in by_version)

    async def _execute(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Execute the calls of a turn concurrently and return their results. Calls beyond the limit get an error result, or
        none if the prompt format ignores them."""
        task, context = self.task, self.context
        limit, renderer = context.limits.max_calls_per_turn, context.codec.renderer
        executed = (
            execute_call(
                call, context.tools, renderer,
                seed=derive_seed(task.seed, "call", len(self.turns), index),
                traj_id=task.traj_id, max_chars=context.limits.max_tool_chars,
            )
            for index, call in enumerate(calls[:limit])
        )  # fmt: skip
        results = await asyncio.gather(*executed)
        refusal = f"A turn may contain at most {limit} tool calls; this one was not run."
        refused = calls[limit:] if renderer.rejects_extra_calls else []
        return [*results, *(ToolResult(Outcome.MALFORMED_CALL, refusal) for _ in refused)]


def check_call(call: ToolCall, tools: Mapping[str, Tool], renderer: Renderer) -> ToolResult | None:
    """Return the error result of a call that cannot be executed; None for a valid call. renderer: whose texts to use."""
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, renderer.malformed_call_text(call))
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, renderer.unknown_tool_text(call.name, list(tools)))
    schema = tools[call.name].schema
    if problem := argument_error(schema, renderer.arguments(schema, call.arguments)):
        return ToolResult(Outcome.INVALID_ARGUMENTS, renderer.invalid_arguments_text(problem))
    return None


async def execute_call(
    call: ToolCall, tools: Mapping[str, Tool], renderer: Renderer, *, seed: int, traj_id: str, max_chars: int
) -> ToolResult:
    """Execute one call and return its result, or the error result of an invalid call.

    renderer: of the prompt format, which decides about the texts of errors and the truncation. max_chars: longest response; a
    longer one is truncated.
    """
    result = check_call(call, tools, renderer)
    if result is None:
        assert call.name is not None and call.arguments is not None
        tool = tools[call.name]
        result = await tool(renderer.arguments(tool.schema, call.arguments), seed=seed, traj_id=traj_id)
    return replace(result, text=renderer.shortened(result.text, max_chars))
