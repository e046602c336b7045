"""The maths task generates the stored tokens, seeds and tool calls: tests/golden/maths_rollouts.json.

To write the file again after an intended change: `python tests/rl/rollout/test_golden_rollouts.py`.
"""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_engine import ScriptedEngine

from rstar_lab.rl.engine import Completion, Sampling
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.rollout.plan import rollout_task
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.sandbox import LocalSandbox

GOLDEN = Path(__file__).parents[2] / "golden" / "maths_rollouts.json"
TOOL = "execute_python_code_with_standard_io"
TOKENIZER = train_tokenizer(["print(42) the answer of a test"], 300)
PROBLEMS = [
    Problem(problem_id=f"p{number}", question=f"What is 6 times {number}?", answer=str(6 * number)) for number in (7, 8)
]


def python(code: str) -> str:
    return f" Compute.</reason>\n{render_tool_call(TOOL, {'code': code, 'input': ''})}"


DRAW = python("import random\nprint(random.randrange(10**6))")
CELL = f"</reason>\n{render_tool_call('jupyter_code', {'code': 'x = 41'})}"
ANSWER = "</reason>\n<answer>\\boxed{42}</answer>"
# The turns of each sample of a group: a call and an answer; failed calls; a session; no room; too many turns; no answer.
SCRIPTS = [
    [DRAW, ANSWER],
    [
        python("print(1").replace("</tool_call>", "") + render_tool_call("none", {}) + render_tool_call(TOOL, {"code": 1}),
        DRAW + DRAW,
        ANSWER,
    ],
    [CELL, CELL.replace("x = 41", "x + 1"), ANSWER],
    [python("print('y' * 3000)"), "y" * 3000],
    [DRAW, DRAW, DRAW, DRAW],
    [" No idea.</reason>"],
]  # fmt: skip


class RecordingEngine(ScriptedEngine):
    """A scripted engine that keeps the sampling options of every request."""

    def __init__(self, turns: list[str]):
        super().__init__(TOKENIZER, lambda prompt, turn: turns[turn])
        self.sampling: list[dict[str, Any]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.sampling.append(asdict(sampling))
        return await super().generate(prompt_ids, sampling)


async def rollouts() -> list[dict[str, Any]]:
    """Return what the agent loop generates for every problem and script."""
    rl = RlSection(
        tools=("python", "jupyter"), limits={"max_response_tokens": 2500, "max_turns": 4, "max_tool_chars": 1000}
    )
    found = []
    async with LocalSandbox(workers=1) as sandbox:
        tools = make_tools(rl.tools, sandbox, timeout_s=20.0, memory_mb=256)
        context = RolloutContext.for_training(Codec(TOKENIZER, tools), tools, make_reward("verify"), rl)
        for group, problem in enumerate(PROBLEMS):
            for sample, turns in enumerate(SCRIPTS):
                task = rollout_task(problem, run="golden", seed=3, step=5, group=group, sample=sample)
                engine = RecordingEngine(turns)
                t = await run_rollout(task, engine, context)
                found.append(
                    {
                        "traj_id": t.traj_id,
                        "seed": task.seed,
                        "prompt_ids": t.prompt_ids,
                        "response_ids": t.response_ids,
                        "model_spans": [[turn.start, turn.end] for turn in t.turns],
                        "requests": engine.sampling,
                        "calls": [[c.turn, c.index, c.tool, c.code, str(c.outcome), c.response, c.position] for c in t.calls],
                        "ended": [str(t.stop_reason), t.answer, t.reward, t.p_err, t.p_format],
                    }
                )  # fmt: skip
    return found


@pytest.mark.slow
async def test_the_maths_task_generates_the_stored_rollouts():
    stored = json.loads(GOLDEN.read_text())
    generated = json.loads(json.dumps(await rollouts()))
    for old, new in zip(stored, generated, strict=True):
        assert new == old, old["traj_id"]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(rollout) for rollout in asyncio.run(rollouts()))
    GOLDEN.write_text(f"[\n{lines}\n]\n")
