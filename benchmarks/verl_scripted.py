"""A scripted engine for parity checks and tests: the same request gives the same tokens, independent of the weights.

The seed of a rollout selects one of four behaviours: correct at once, correct after a failed call, wrong after a successful
call, wrong at once with two answers. Groups therefore contain both rewards and every penalty of RoC.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rstar_lab.rl.engine import Completion, FinishReason, Sampling
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.renderers.paper import CODE_TOOL, END_OF_TURN, render_tool_call
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.scheduling.scheduler import BusyClock

LOG_PROB = -0.5


class ScriptedEngine:
    """An engine with the tokenizer in `model`; it ignores weights."""

    name = "scripted"
    kv_tokens = 2**20

    def __init__(self, model: Path | str):
        self.tokenizer = load_tokenizer(model)
        self.version = 0

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load_weights(self, path: Path | str, version: int) -> None:
        self.version = version

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        conversation = str(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        ids = self.tokenizer.encode(self.text(conversation, sampling.seed or 0) + END_OF_TURN, add_special_tokens=False)
        ids, reason = (
            ids[: sampling.max_tokens],
            FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH,
        )
        return Completion(ids, [LOG_PROB] * len(ids), reason, self.name, self.version)

    def text(self, conversation: str, seed: int) -> str:
        """Return the next turn. A rollout that called the tool may know the answer; one that did not guesses."""
        result = (
            conversation.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
            if "<tool_response>" in conversation
            else None
        )
        rng = random.Random(seed)
        if result is None:
            if rng.random() < 0.3:
                return self._guess(rng)
            code = rng.choice(["print(undefined)", "print(6 * 7)", "1 / 0", "6 * 7"])
            call = render_tool_call(CODE_TOOL["function"]["name"], {"code": code, "input": ""})
            return f"I compute it.{' Let me see.' * rng.randrange(3)}</reason>\n{call}"
        return self._guess(rng) if rng.random() < 0.5 else self._answer("42")

    def _guess(self, rng: random.Random) -> str:
        return self._answer(str(rng.choice([41, 42]))) + (self._answer("41") if rng.random() < 0.3 else "")

    def _answer(self, answer: str) -> str:
        return f"It is {answer}.</reason>\n<answer>\\boxed{{{answer}}}</answer>"


def serve(model: str, options: dict[str, Any]) -> ScriptedEngine:
    """Create the engine for `engine.Replica`."""
    return ScriptedEngine(model)


class ScriptedEngines:
    """The scripted engine as the engine group of the local trainer."""

    context = 2**20  # accepts prompts of any length

    def __init__(self, model: Path | str):
        self.engine = ScriptedEngine(model)
        self.engines, self.clock = [self.engine], BusyClock()

    async def load(self, model: Any, version: int) -> None:
        self.engine.version = version

    def slots(
        self, tasks: Sequence[RolloutTask], mode: str, max_response_tokens: int | None = None
    ) -> Callable[[int, RolloutTask], Any]:
        return lambda index, task: _EngineSlot(self.engine)


class _EngineSlot:
    def __init__(self, engine: ScriptedEngine):
        self.generate = engine.generate

    def on_turn(self, text: str, last: bool) -> None: ...

    def leave(self) -> None: ...
