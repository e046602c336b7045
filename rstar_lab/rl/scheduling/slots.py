"""The engine slots of the rollouts of a step: by the scheduler, or in fixed batches, so that results are reproducible bit for bit."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from rstar_lab.rl.engine import Completion, Engine, EngineError, RequestRefused, Sampling
from rstar_lab.rl.scheduling.scheduler import Scheduler


class PlannedRollout(Protocol):
    """What a slot needs of a rollout. generated: tokens of the model with which it starts."""

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

    def slot(self, index: int, rollout: PlannedRollout) -> "ScheduledSlot":
        """Return the slot of a rollout. index: unique in the step."""
        return ScheduledSlot(self, str(index), rollout.problem_id, rollout.generated)


class ScheduledSlot:
    """The engine slot of one rollout."""

    def __init__(self, slots: ScheduledSlots, rollout: str, problem_id: str, generated: int):
        self.slots, self.rollout, self.problem_id, self.generated = slots, rollout, problem_id, generated
        self.new_tokens = 0  # tokens of the last turn, until they are reported to the scheduler

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Sample one completion on the engine that the scheduler chooses; after its failure, on another one.

        Raises RequestRefused if the request is invalid, EngineError if no engine is left.
        """
        self.new_tokens, scheduler = 0, self.slots.scheduler
        while True:
            name = await scheduler.admit(self.rollout, self.problem_id, len(prompt_ids), generated=self.generated)
            try:
                completion = await self.slots.engines[name].generate(prompt_ids, sampling)
                self.new_tokens = len(completion.token_ids)
                return completion
            except EngineError as error:
                if isinstance(error, RequestRefused):
                    raise
                scheduler.server_failed(name, error)

    def on_turn(self, text: str, last: bool) -> None:
        """Report the end of a turn, before its tools run. `leave` reports a turn that was cut off."""
        if self.new_tokens:
            self.slots.scheduler.finish(self.rollout, self.new_tokens, done=last)
            self.generated += self.new_tokens
            self.new_tokens = 0

    def leave(self) -> None:
        """Report the end of the rollout, also after an error."""
        self.slots.scheduler.abandon(self.rollout)


class BatchEngine(Engine, Protocol):
    """An engine that accepts several requests at once."""

    def submit(self, requests: Sequence[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        """Add several requests to the batch of the engine at once."""
        ...


class Lockstep:
    """Waits until every active rollout of an engine has requested its next turn, then submits the turns as one batch, in
    the order of the slots.

    Each engine has its own batches. The rollouts of a group share an engine, and with it the cached prefix of their
    prompt.
    """

    def __init__(self, engines: Sequence[BatchEngine], groups: Sequence[str]):
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        self.engines = engines
        self.engine_of = [order[group] % len(engines) for group in groups]
        self.live = [{i for i, number in enumerate(self.engine_of) if number == own} for own in range(len(engines))]
        # Index of a slot -> its request, and the future that receives the future of its completion.
        self.waiting: list[dict[int, tuple[list[int], Sampling, asyncio.Future[asyncio.Future[Completion]]]]]
        self.waiting = [{} for _ in engines]

    def slot(self, index: int, rollout: object = None) -> "LockstepSlot":
        """Return the slot of the rollout at `index` of the groups."""
        return LockstepSlot(self, index)

    def flush_if_complete(self, number: int) -> None:
        if self.waiting[number] and len(self.waiting[number]) == len(self.live[number]):
            asyncio.get_running_loop().create_task(self._flush(number))

    async def _flush(self, number: int) -> None:
        batch, self.waiting[number] = self.waiting[number], {}
        slots = sorted(index for index, (*_, submitted) in batch.items() if not submitted.cancelled())
        futures = self.engines[number].submit([batch[i][:2] for i in slots]) if slots else []
        for index, future in zip(slots, futures, strict=True):
            batch[index][2].set_result(future)


class LockstepSlot:
    """The slot of one rollout in lockstep mode."""

    def __init__(self, lockstep: Lockstep, index: int):
        self.lockstep, self.index, self.number = lockstep, index, lockstep.engine_of[index]

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        submitted: asyncio.Future[asyncio.Future[Completion]] = asyncio.get_running_loop().create_future()
        self.lockstep.waiting[self.number][self.index] = (prompt_ids, sampling, submitted)
        self.lockstep.flush_if_complete(self.number)
        try:
            return await (await submitted)
        finally:
            self.lockstep.waiting[self.number].pop(self.index, None)
            if submitted.done() and not submitted.cancelled():
                submitted.result().cancel()  # without effect if it has ended

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None:
        self.lockstep.live[self.number].discard(self.index)
        self.lockstep.flush_if_complete(self.number)
