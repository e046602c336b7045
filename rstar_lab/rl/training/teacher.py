"""Servers of other models that methods need, such as the teacher of on-policy distillation, and the passes that use them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rstar_lab.common.errors import UserError
from rstar_lab.rl.algorithm.hooks import TokenStatistics
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.recipe import EngineSection, RlSection
from rstar_lab.rl.trajectory import Trajectory

PROBE = "<reason>\nLet x = 3.14, so 2x < 7.\n</reason> print(f'{x:>8}')\u00e9\u4e2d"


class NeedsPolicy(UserError):
    """Raised if a method requests a forward pass of the policy that the trainer does not have."""


class TeacherPasses:
    """The part of `hooks.ForwardPasses` that needs no policy. verl supports only this part: its workers score the rows of the
    batch, with the prompts that the rollouts had, and return no sums over the vocabulary."""

    max_tokens = 0

    def __init__(self, teacher: ServerEngine | None):
        self.teacher = teacher

    async def teacher_log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return the log-probs of the responses, (response length,) float32 each, NaN where the teacher returned none.

        Raises UserError if the teacher cannot score a rollout.
        """
        if (teacher := self.teacher) is None:
            raise UserError("engine.teacher_url: the method requires a teacher; set its address")
        try:
            scored = await asyncio.gather(*(teacher.score(t.prompt_ids, t.response_ids) for t in rollouts))
        except EngineError as error:
            raise UserError(
                f"engine.teacher_url: {error}; the same command continues the run from its last checkpoint"
            ) from error
        return [np.asarray(row, dtype=np.float32) for row in scored]

    async def statistics(self, rollouts: Sequence[Trajectory]) -> TokenStatistics:
        raise NeedsPolicy("verl does not support methods that need forward passes of the policy; use the local trainer")

    async def log_probs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        return (await self.statistics(rollouts)).log_probs

    def prompt_ids(self, rollout: Trajectory, question: str) -> list[int]:
        raise NeedsPolicy("verl does not support methods that change a prompt; use the local trainer")


@asynccontextmanager
async def open_servers(
    settings: Sequence[RlSection], engine: EngineSection, tokenizer: Any, max_tokens: int
) -> AsyncIterator[dict[str, ServerEngine]]:
    """Connect to the servers that the methods of the stages need, and yield them by their names.

    settings: of each stage. engine: section of the recipe. max_tokens: maximum tokens of a prompt and its response.

    Raises UserError if a server cannot be used, has a shorter context, or has a tokenizer other than that of the trained
    model.
    """
    parts = [method for rl in settings for method in rl.method.parts]
    servers: dict[str, ServerEngine] = {}
    try:
        for key, name, url in dict.fromkeys((s.key, s.name, s.url) for method in parts for s in method.servers(engine)):
            if name in servers:
                raise UserError(f"{key}: all stages must have the same {name}")
            server = servers[name] = ServerEngine(url)
            await server.start()
            if server.context < max_tokens:
                raise UserError(
                    f"{key}: the {name} has a context of {server.context:,} tokens, rollouts have up to {max_tokens:,}"
                )
            if await server.tokenize(PROBE) != tokenizer.encode(PROBE, add_special_tokens=False):
                raise UserError(f"{key}: the {name} has another tokenizer than the trained model")
        yield servers
    finally:
        for server in servers.values():
            await server.aclose()
