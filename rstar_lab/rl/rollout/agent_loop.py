"""The agent loop: think, call, read, think again, answer. The only one; the local trainer, evaluation, chat and verl use it.

Token ids in, token ids out: what the model sampled is never decoded and encoded again. Its text is decoded to be read only.
Source: rStar2-Agent, section 2.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rstar_lab.outcomes import Outcome, count_errors
from rstar_lab.rl.algorithm.roc import format_penalty, tool_error_penalty
from rstar_lab.rl.chat_format.parser import ToolCall, parse_tool_calls
from rstar_lab.rl.chat_format.template import END_OF_TURN, SYSTEM_PROMPT, render_prompt, render_tool_responses
from rstar_lab.rl.engine import Engine, EngineError, FinishReason, Sampling
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools.base import Tool, ToolResult, argument_error
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Trajectory, Turn
from rstar_lab.verify import extract_answer

ANSWER_TAG = "<answer>"


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What ends a rollout. max_response_tokens counts the model's tokens and the tools' together."""

    max_response_tokens: int
    max_turns: int = 10
    max_tool_chars: int = 4096
    time_limit_s: float | None = None


class Codec:
    """Text to ids and back, for one tokenizer, tool set and system prompt."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], system: str = SYSTEM_PROMPT):
        self.tokenizer, self.system = tokenizer, system
        self.schemas = [tool.schema for tool in tools.values()]
        end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        if end is None or end == tokenizer.unk_token_id:
            raise ValueError(f"tokenizer: it has no {END_OF_TURN} token, which ends a turn")
        self.stop_token_ids = tuple(
            dict.fromkeys([end, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])])
        )
        self.end_id = end
        self._prompt = lru_cache(1024)(self._encode_prompt)  # a group asks the same question many times

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The model's words; the tokens that end a turn are not among them."""
        while ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, question: str) -> list[int]:
        return list(self._prompt(question))

    def _encode_prompt(self, question: str) -> tuple[int, ...]:
        return tuple(self.encode(render_prompt(question, tools=self.schemas, system=self.system)))

    def tool_response_ids(self, texts: list[str]) -> list[int]:
        return self.encode(render_tool_responses(texts))


def check_call(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult | None:
    """What is wrong with a call before any tool sees it; None where nothing is."""
    if call.error is not None or call.name is None or call.arguments is None:
        return ToolResult(Outcome.MALFORMED_CALL, f"The tool call could not be parsed: {call.error}")
    if call.name not in tools:
        return ToolResult(Outcome.UNKNOWN_TOOL, f"There is no tool '{call.name}'. Tools: {', '.join(tools)}.")
    if problem := argument_error(tools[call.name].schema, call.arguments):
        return ToolResult(Outcome.INVALID_ARGUMENTS, f"The arguments are not right: {problem}.")
    return None


def make_call_record(call: ToolCall, result: ToolResult, *, turn: int, index: int, position: int) -> ToolCallRecord:
    """position: of the answer in the response's tokens."""
    return ToolCallRecord(
        turn=turn,
        index=index,
        tool=call.name or "",
        code=result.code,
        outcome=result.outcome,
        response=result.text,
        queue_s=result.queue_s,
        run_s=result.run_s,
        position=position,
    )


async def execute_call(
    call: ToolCall, tools: Mapping[str, Tool], *, seed: int, traj_id: str, max_chars: int
) -> ToolResult:
    """Run one call, or say what is wrong with it."""
    if refusal := check_call(call, tools):
        return refusal
    assert call.name is not None and call.arguments is not None
    result = await tools[call.name](call.arguments, seed=seed, traj_id=traj_id)
    if len(result.text) <= max_chars:
        return result
    # The end of a traceback says what went wrong, the start of an output what it is.
    half = max_chars // 2
    text = f"{result.text[:half]}\n[{len(result.text) - 2 * half} characters left out]\n{result.text[-half:]}"
    return ToolResult(result.outcome, text, result.code, result.queue_s, result.run_s)


async def run_rollout(
    problem: Problem,
    *,
    engine: Engine,
    codec: Codec,
    tools: Mapping[str, Tool],
    reward: Callable[[str, str], float],
    limits: RolloutLimits,
    traj_id: str,
    group_id: str,
    sample: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    on_turn: Callable[[str, bool], None] | None = None,
    step_ended: asyncio.Event | None = None,
    carry_over: bool = False,
    partial: Trajectory | None = None,
) -> Trajectory:
    """Roll out one problem.

    on_turn: told the text of each turn of the model and whether it is the last, before its tools run. reward: (text of the
    model, true answer) -> reward; called in a thread. seed: of this trajectory; every turn and call draws its own from it.
    step_ended: once set, no further turn starts; what is there is the rollout, or with carry_over (StopReason.UNFINISHED,
    without a reward) what a later call goes on from as `partial`.
    A failure of the engine ends the rollout with StopReason.ENGINE_ERROR, it does not raise.
    """
    prompt_ids = partial.prompt_ids if partial else codec.prompt_ids(problem.question)
    ids = list(partial.response_ids) if partial else []
    mask = list(partial.loss_mask) if partial else []
    log_probs = list(partial.log_probs) if partial else []
    turns = list(partial.turns) if partial else []
    calls = list(partial.calls) if partial else []
    engine_name, version = (partial.engine, partial.policy_version) if partial else ("", 0)
    # A turn that the last step's end cut: nothing follows it yet.
    cut = turns.pop() if turns and turns[-1].end == len(ids) else None
    started = time.monotonic() - sum(turn.generate_s + turn.tool_s for turn in (*turns, *([cut] if cut else [])))
    over = StopReason.UNFINISHED if carry_over else StopReason.TIME_LIMIT
    stop = StopReason.MAX_TURNS

    while len(turns) < limits.max_turns:
        room = limits.max_response_tokens - len(ids)
        asked = time.monotonic()
        left_s = None if limits.time_limit_s is None else started + limits.time_limit_s - asked
        if step_ended and step_ended.is_set():
            stop = over
            break
        start = cut.start if cut else len(ids)
        draw = ("turn", len(turns), len(ids) - start) if cut else ("turn", len(turns))
        sampling = Sampling(room, temperature, top_p, derive_seed(seed, *draw), codec.stop_token_ids)
        try:
            async with asyncio.timeout(left_s) as limit:
                completion = await engine.generate(prompt_ids + ids, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            stop = StopReason.TIME_LIMIT
            break
        except EngineError:
            stop = StopReason.ENGINE_ERROR
            break
        generate_s = time.monotonic() - asked + (cut.generate_s if cut else 0.0)
        versions = cut.versions if cut else ()
        if completion.token_ids:
            engine_name, version = completion.engine, completion.policy_version
            versions = _and_then(versions, version, len(completion.token_ids))
        cut = None
        ids += completion.token_ids
        mask += [True] * len(completion.token_ids)
        log_probs += completion.log_probs
        text = codec.decode(ids[start:])

        # A turn that was cut has not ended, but a call it had finished before may stand in it: it was not answered.
        wanted = parse_tool_calls(text) if completion.finish_reason is FinishReason.STOP else []
        goes_on = bool(wanted) and len(turns) + 1 < limits.max_turns
        if on_turn:
            on_turn(text, not goes_on)
        answered = time.monotonic()
        results: list[ToolResult] = []
        if goes_on:
            results = await asyncio.gather(
                *(
                    execute_call(
                        call,
                        tools,
                        seed=derive_seed(seed, "call", len(turns), index),
                        traj_id=traj_id,
                        max_chars=limits.max_tool_chars,
                    )
                    for index, call in enumerate(wanted)
                )
            )
        if len(ids) > start or completion.finish_reason is not FinishReason.ABORTED:
            turns.append(
                Turn(
                    start=start,
                    end=len(ids),
                    text=text,
                    generate_s=generate_s,
                    tool_s=time.monotonic() - answered,
                    queue_s=max((result.queue_s for result in results), default=0.0),
                    versions=versions,
                )
            )
        calls += [
            make_call_record(call, result, turn=len(turns) - 1, index=index, position=len(ids))
            for index, (call, result) in enumerate(zip(wanted, results, strict=False))
        ]
        if completion.finish_reason is FinishReason.ABORTED:
            stop = over
            break
        if completion.finish_reason is FinishReason.LENGTH:
            stop = StopReason.LENGTH
            break
        if not wanted:
            stop = StopReason.ANSWERED
            break
        if not goes_on:
            break
        answer_ids = codec.tool_response_ids([result.text for result in results])
        if len(ids) + len(answer_ids) >= limits.max_response_tokens:
            stop = StopReason.LENGTH
            break
        ids += answer_ids
        mask += [False] * len(answer_ids)
        log_probs += [0.0] * len(answer_ids)

    if cut:
        turns.append(cut)
    own_text = "\n".join(turn.text for turn in turns)
    errors, counted = count_errors([call.outcome for call in calls])
    given = 0.0
    if stop is not StopReason.UNFINISHED:
        for tool in tools.values():
            await tool.close(traj_id)
        given = float(await asyncio.to_thread(reward, own_text, problem.answer))
    return Trajectory(
        traj_id=traj_id,
        problem_id=problem.problem_id,
        group_id=group_id,
        sample=sample,
        question=problem.question,
        truth=problem.answer,
        prompt_ids=prompt_ids,
        response_ids=ids,
        loss_mask=mask,
        log_probs=log_probs,
        turns=tuple(turns),
        calls=tuple(calls),
        stop_reason=stop,
        text=own_text,
        answer=extract_answer(own_text),
        reward=given,
        p_err=tool_error_penalty(errors, counted),
        p_format=format_penalty(own_text.count(ANSWER_TAG), len(turns)),
        engine=engine_name,
        policy_version=version,
    )


def _and_then(versions: tuple[tuple[int, int], ...], version: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """One more stretch; it joins the last where that has the same version."""
    if versions and versions[-1][0] == version:
        return (*versions[:-1], (version, versions[-1][1] + tokens))
    return (*versions, (version, tokens))
