"""An engine without a model that returns scripted text as token ids."""

import asyncio
from collections.abc import Callable, Sequence

from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.renderers.paper import END_OF_TURN


class ScriptedEngine:
    """An engine whose turns come from `script(text of the prompt, index of the turn)`."""

    name = "scripted"
    kv_tokens = 10**6

    def __init__(self, tokenizer, script: Callable[[str, int], str], delay_s: float = 0.0):
        self.tokenizer, self.script, self.delay_s = tokenizer, script, delay_s
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.prompts.append(prompt_ids)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        prompt = self.tokenizer.decode(prompt_ids)
        text = self.script(prompt, prompt.count("<|im_start|>assistant") - 1)
        ids = self.tokenizer.encode(text + END_OF_TURN, add_special_tokens=False)
        reason = FinishReason.STOP
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], FinishReason.LENGTH
        return Completion(ids, [-0.5] * len(ids), reason, self.name)

    def submit(self, requests: Sequence[tuple[list[int], Sampling]]) -> list[asyncio.Future[Completion]]:
        return [asyncio.ensure_future(self.generate(*request)) for request in requests]
