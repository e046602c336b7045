"""SFT conversations about synthetic problems. Every tool call is executed in the sandbox.

The conversations teach the chat format and the use of the tool. They contain deliberate faults (errors that are corrected, wrong
programs, guesses, repeated answers), so that RL can improve the model.
"""

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers import released
from rstar_lab.rl.renderers.base import PromptStyle, Renderer
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.synthetic import families
from rstar_lab.runs.errors import RunStoreError
from rstar_lab.runs.files import atomic_write
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.interface import Sandbox
from rstar_lab.tool_calls import parse_tool_calls

Segments = list[tuple[str, bool]]

_BATCH = 512
_COMPUTE = ("Let me compute this.", "Python can do this.")
_CORRECT = ("That failed. Let me fix the code.", "An error. I correct the program.")
_CHECK = ("But before I answer, let me double-check.",)
_FINISH = ("The output is the answer.", "So this is the result.")
_GUESS = ("I can guess this one.",)
_GIVE_UP = ("That failed. I will guess.",)


class TraceMix(BaseModel):
    """Weights of the kinds of traces; they need not add up to 1.

    The first four kinds end with the correct answer, the other three almost never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    clean: float = Field(default=0.10, ge=0)
    error_then_fix: float = Field(default=0.30, ge=0)
    malformed_then_fix: float = Field(
        default=0.03, ge=0, description="a tool call that is not JSON, then a correct one"
    )
    double_check: float = Field(default=0.06, ge=0)
    wrong_code: float = Field(default=0.26, ge=0)
    guess: float = Field(default=0.17, ge=0)
    error_then_guess: float = Field(default=0.08, ge=0)
    hardness: float = Field(
        default=0.5, ge=0, le=1, description="share of correct traces that become wrong_code at the highest level"
    )
    duplicate_answers: float = Field(default=0.25, ge=0, le=1, description="share of traces that repeat their answer")

    @model_validator(mode="after")
    def _check_weights(self) -> "TraceMix":
        if not any(self.weights(level=1).values()):
            raise ValueError("every kind of trace has weight 0")
        return self

    def weights(self, level: float | None) -> dict[str, float]:
        """Return the weight of each kind for problems of one level."""
        correct = {
            kind: getattr(self, kind) for kind in ("clean", "error_then_fix", "malformed_then_fix", "double_check")
        }
        moved = self.hardness * ((level or 1) - families.LEVELS[0]) / (families.LEVELS[-1] - families.LEVELS[0])
        return {kind: weight * (1 - moved) for kind, weight in correct.items()} | {
            "wrong_code": self.wrong_code + moved * sum(correct.values()),
            "guess": self.guess,
            "error_then_guess": self.error_then_guess,
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """An executed conversation. outcomes: outcomes of its tool calls, in order. correct: whether its answer is the true one."""

    problem_id: str
    kind: str
    messages: list[dict[str, Any]]
    outcomes: list[str]
    correct: bool

    def segments(self, renderer: type[Renderer] = PaperRenderer) -> Segments:
        """Return segments (text, whether it is trained on), which must be tokenized one by one. renderer: as for `make_traces`."""
        return renderer.segments(self.messages, [renderer.code_tool("python")])


async def make_traces(
    problems: Sequence[Problem],
    sandbox: Sandbox,
    *,
    seed: int,
    mix: TraceMix = TraceMix(),
    renderer: type[Renderer] = PaperRenderer,
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trace]:
    """Return one executed trace per problem, in order. The same arguments give the same traces.

    renderer: format of prompts, calls and tool responses. Execution times in responses of the released format are
    derived from the code, because measured times would differ in each run. cache: folder for finished traces; the file
    name contains a hash of everything that determines them. progress: called with the number of different programs that
    have run and their total.
    Raises UserError if a problem is not synthetic, RuntimeError if the sandbox fails.
    """
    path = cache / f"traces-{_content_key(problems, seed, mix, renderer)}.jsonl" if cache else None
    if path and path.is_file():
        return [Trace(**json.loads(line)) for line in path.read_text().splitlines()]
    scripts = [_script(problem, mix, random.Random(f"{seed}/{problem.problem_id}")) for problem in problems]
    codes = list(dict.fromkeys(code for script in scripts for code in script.codes))
    results: dict[str, CallResult] = {}
    for start in range(0, len(codes), _BATCH):
        batch = codes[start : start + _BATCH]
        results.update(zip(batch, await sandbox.run_many([Call(code, seed=seed) for code in batch]), strict=True))
        if progress:
            progress(len(results), len(codes))
    if failed := [result for result in results.values() if result.outcome in INFRASTRUCTURE_FAILURES]:
        raise RuntimeError(f"the sandbox could not run {len(failed)} of {len(codes)} programs: {failed[0].stderr}")
    traces = [
        await _execute(problem, script, results, renderer) for problem, script in zip(problems, scripts, strict=True)
    ]
    if path:
        # In a shared runs folder, the cache can belong to another user.
        with contextlib.suppress(PermissionError, RunStoreError), atomic_write(path) as file:
            file.write("".join(json.dumps(asdict(trace)) + "\n" for trace in traces).encode())
    return traces


def _content_key(problems: Sequence[Problem], seed: int, mix: TraceMix, renderer: type[Renderer]) -> str:
    digest = hashlib.sha256()
    for file in (families.__file__, chat.__file__, released.__file__, __file__):
        digest.update(Path(str(file)).read_bytes())
    digest.update(f"{seed} {mix.model_dump_json()} {renderer.name}".encode())
    for problem in problems:
        digest.update(problem.model_dump_json().encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Script:
    """A trace before its calls are executed. steps: (reason, code, well formed). answer: None: the last tool output."""

    kind: str
    steps: list[tuple[str, str, bool]]
    finish: str
    answer: str | None
    answer_tags: int

    @property
    def codes(self) -> Iterator[str]:
        return (code for _, code, well_formed in self.steps if well_formed)


def _script(problem: Problem, mix: TraceMix, rng: random.Random) -> _Script:
    weights = mix.weights(problem.difficulty)
    kind = rng.choices(list(weights), list(weights.values()))[0]
    programs = families.programs(problem)
    solve = (rng.choice(_COMPUTE), programs.good, True)
    error = (rng.choice(_COMPUTE), _broken(programs.good, rng), True)
    correction = (rng.choice(_CORRECT), programs.good, True)
    steps = {
        "clean": [solve],
        "error_then_fix": [error, correction],
        "malformed_then_fix": [(rng.choice(_COMPUTE), programs.good, False), correction],
        "double_check": [solve, (rng.choice(_CHECK), programs.good, True)],
        "wrong_code": [(rng.choice(_COMPUTE), rng.choice(programs.wrong), True)],
        "guess": [],
        "error_then_guess": [error],
    }[kind]
    guess = str(rng.randrange(10 ** (len(problem.answer) - 1), 10 ** len(problem.answer)))
    ends = {"guess": (_GUESS, guess), "error_then_guess": (_GIVE_UP, guess)}
    finish, answer = ends.get(kind, (_FINISH, None))
    tags = rng.choice((2, 2, 3)) if rng.random() < mix.duplicate_answers else 1
    return _Script(kind, steps, rng.choice(finish), answer, tags)


def _broken(good: str, rng: random.Random) -> str:
    """Return the program with one mistake that makes it fail."""
    head, _, expression = good.rpartition("print(")
    mistakes = [
        good[:-1],
        f'{head}print("x = " + {expression}',
        f"{head}prints({expression}",
        good.removeprefix("import math\n") if good.startswith("import math\n") else f"import maths\n{good}",
    ]
    return rng.choice(mistakes)


async def _execute(
    problem: Problem, script: _Script, results: dict[str, CallResult], renderer: type[Renderer]
) -> Trace:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": renderer.system_prompt},
        {"role": "user", "content": renderer.sft_question(problem.question)},
    ]
    outcomes, text, output = [], "", ""
    name = renderer.code_tool("python")["function"]["name"]
    for reason, code, well_formed in script.steps:
        content = f"<reason>{reason}</reason>"
        arguments = {"code": code, "input": ""}
        if well_formed:
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            # Measured times would differ in each run.
            timed = replace(results[code], duration_s=random.Random(code).uniform(0.01, 0.2))
            output, text = PaperRenderer.result_text(results[code]), renderer.result_text(timed)
            outcomes.append(results[code].outcome.value)
        else:
            malformed = chat.render_tool_call(name, arguments).replace('"}}', '"}')
            messages.append({"role": "assistant", "content": f"{content}\n{malformed}"})
            (call_text,) = parse_tool_calls(malformed)
            result = await execute_call(call_text, {}, renderer(PromptStyle()), seed=0, traj_id="", max_chars=4096)
            output = text = result.text
            outcomes.append(result.outcome.value)
        messages.append({"role": "tool", "content": text})
    answer = script.answer or output
    tags = "\n".join([f"<answer>\\boxed{{{answer}}}</answer>"] * script.answer_tags)
    messages.append({"role": "assistant", "content": f"<reason>{script.finish}</reason>\n{tags}"})
    return Trace(problem.problem_id, script.kind, messages, outcomes, answer == problem.answer)
