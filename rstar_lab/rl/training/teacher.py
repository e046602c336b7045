"""On-policy distillation: a teacher model on a vLLM server scores the tokens that the trained model generated.

Source: GKD (arXiv 2306.13649) with the reverse KL divergence. Its gradient is a policy gradient whose advantage at each token
is log p_teacher - log p_student, so it is added to the advantages of RL with the weight `rl.teacher_weight`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rstar_lab.errors import UserError
from rstar_lab.rl.algorithm.selection import Selection
from rstar_lab.rl.engine import EngineError
from rstar_lab.rl.engines.server import ServerEngine

PROBE = "<reason>\nLet x = 3.14, so 2x < 7.\n</reason> print(f'{x:>8}')\u00e9\u4e2d"


class Teacher:
    """A model on a server that scores rollouts. Made by `open_teacher`."""

    def __init__(self, server: ServerEngine):
        self.server = server

    async def score(self, selection: Selection) -> Selection:
        """Return the selection with `teacher_log_probs`. Raises UserError if the teacher cannot score a rollout."""
        try:
            scored = await asyncio.gather(
                *(self.server.score(t.prompt_ids, t.response_ids) for t in selection.trajectories)
            )
        except EngineError as error:
            raise UserError(f"engine.teacher_url: {error}; the run continues from its last checkpoint") from error
        return replace(selection, teacher_log_probs=[np.asarray(row, dtype=np.float32) for row in scored])


@asynccontextmanager
async def open_teacher(url: str, tokenizer: Any, max_tokens: int) -> AsyncIterator[Teacher]:
    """Connect to the teacher at a URL. max_tokens: maximum tokens of a prompt and its response.

    Raises UserError if the server cannot be used, has a shorter context, or has a tokenizer other than that of the trained
    model.
    """
    server = ServerEngine(url)
    try:
        await server.start()
        if server.context < max_tokens:
            raise UserError(
                f"engine.teacher_url: the teacher has a context of {server.context:,} tokens, rollouts have up to {max_tokens:,}"
            )
        if await server.tokenize(PROBE) != tokenizer.encode(PROBE, add_special_tokens=False):
            raise UserError("engine.teacher_url: the teacher has another tokenizer than the trained model")
        yield Teacher(server)
    finally:
        await server.aclose()
