"""The engine slots of the rollouts of a step: each turn goes to the engine that the scheduler chooses."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from rstar_lab.rl.engine import Completion, Engine, EngineError, FinishReason, Interruptible, RequestRefused, Sampling
from rstar_lab.rl.scheduling.scheduler import Scheduler


class PlannedRollout(Protocol):
    """What a slot needs of a rollout. generated: tokens that the model generated in an earlier step."""

    @property
    def group_id(self) -> str: ...

    @property
    def problem_id(self) -> str: ...

    @property
    def generated(self) -> int: ...


class ScheduledSlots:
    """Sends the turns of all rollouts of a step to the engines of this process. An engine that fails gets no further turns.

    Args:
        scheduler: Has one server per engine, with the names of `engines`.
        engines: Engines by name.
    """

    def __init__(self, scheduler: Scheduler, engines: Mapping[str, Engine]):
        self.scheduler, self.engines = scheduler, engines
        self.interruptible = {name: engine for name, engine in engines.items() if isinstance(engine, Interruptible)}
        self.generating: set[ScheduledSlot] = set()
        self.interrupted = False

    def slot(self, index: int, rollout: PlannedRollout) -> "ScheduledSlot":
        """Return the slot of a rollout. index: unique in the step."""
        return ScheduledSlot(self, str(index), rollout.problem_id, rollout.generated)

    def interrupt(self) -> None:
        """End every turn with the tokens generated so far. Requests to engines that are not Interruptible are cancelled,
        and their turns have no tokens."""
        if self.interrupted:
            return
        self.interrupted = True
        for slot in list(self.generating):
            slot.cut()
        for engine in self.interruptible.values():
            engine.interrupt()


class ScheduledSlot:
    """The engine slot of one rollout."""

    def __init__(self, slots: ScheduledSlots, rollout: str, problem_id: str, generated: int):
        self.slots, self.rollout, self.problem_id, self.generated = slots, rollout, problem_id, generated
        self.new_tokens = 0  # tokens of the last turn, until they are reported to the scheduler
        self._engine: str | None = None  # of the turn in flight
        self._request: asyncio.Task[Completion] | None = None  # in flight on an engine that is not Interruptible

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion on the engine that the scheduler chooses; after its failure, on another one.

        Raises RequestRefused if the request is invalid, EngineError if no engine is left.
        """
        self.new_tokens = 0
        self.slots.generating.add(self)
        try:
            completion = await self._send(prompt_ids, sampling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.slots.interrupted or task is None or task.cancelling():
                raise
            return Completion([], [], FinishReason.ABORTED)  # `cut` ended the turn
        finally:
            self.slots.generating.discard(self)
            self._engine = self._request = None
        if completion.finish_reason is not FinishReason.ABORTED:
            self.new_tokens = len(completion.token_ids)
        return completion

    async def _send(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        scheduler = self.slots.scheduler
        while True:
            self._engine = None
            name = await scheduler.admit(self.rollout, self.problem_id, len(prompt_ids), generated=self.generated)
            self._engine, engine = name, self.slots.engines[name]
            try:
                if name in self.slots.interruptible:
                    return await engine.generate(prompt_ids, sampling)
                self._request = asyncio.ensure_future(engine.generate(prompt_ids, sampling))
                return await self._request
            except RequestRefused:
                raise
            except EngineError as error:
                scheduler.server_failed(name, error)

    def cut(self) -> None:
        """End a turn that waits for an engine or runs on one that cannot return unfinished requests."""
        if self._engine is None:
            self.slots.scheduler.abandon(self.rollout)  # cancels the waiting `admit`
        elif self._request is not None:
            self._request.cancel()

    def on_turn(self, text: str, last: bool) -> None:
        """Report the end of a turn, before its tools run. `leave` reports a turn that was cut off."""
        if self.new_tokens:
            self.slots.scheduler.finish(self.rollout, self.new_tokens, done=last)
            self.generated += self.new_tokens
            self.new_tokens = 0

    def leave(self) -> None:
        """Report the end of the rollout, also after an error."""
        self.slots.scheduler.abandon(self.rollout)

    def interrupt(self) -> None:
        """End the turns of all rollouts of the step."""
        self.slots.interrupt()
