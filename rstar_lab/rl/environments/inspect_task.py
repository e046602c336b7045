"""Tasks of Inspect (inspect_ai) as environments: samples become problems, scorers become parts of the reward.

The recipe names the `@task` function, `environment: my_tasks:gsm8k`. This command writes its problems to a file:

    python -m rstar_lab.rl.environments.inspect_task my_tasks:gsm8k problems.jsonl

The task's solvers are not used: the model is prompted and sampled by the agent loop, with the tools of the recipe.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.rl.environments.base import Environment, RewardPart, Scores
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.problems import Problem, write_problem_file
from rstar_lab.rl.trajectory import Trajectory

ANSWER_BLOCK = re.compile(r"<answer>.*", re.DOTALL)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_task(target: Any) -> bool:
    """Return whether an object is a `@task` function of Inspect."""
    if "inspect_ai" not in sys.modules:  # if inspect_ai was not imported, the object cannot be a task of it
        return False
    from inspect_ai.util import registry_info

    try:
        return registry_info(target).type == "task"
    except ValueError:
        return False


class InspectTask:
    """A task, loaded once. Calling it creates the environment of one rollout.

    Raises UserError if the task has no scorer or needs a sandbox of Inspect.
    """

    def __init__(self, name: str, function: Any):
        task = function()
        self.name, self.scorers = name, task.scorer or []
        if not self.scorers:
            raise UserError(f"Inspect task {name} has no scorer")
        if task.sandbox is not None or any(sample.sandbox or sample.files or sample.setup for sample in task.dataset):
            raise UserError(f"Inspect task {name} runs in a sandbox of Inspect, which is not supported")
        numbered = enumerate(task.dataset, 1)
        self.samples: dict[str, Any] = {
            str(sample.id if sample.id is not None else n): sample for n, sample in numbered
        }

    def __call__(self) -> "InspectEnvironment":
        return InspectEnvironment(self)

    def problems(self) -> list[Problem]:
        """Return one problem per sample. Its `info` names the sample."""
        return [
            Problem(
                problem_id=f"{self.name.partition(':')[2]}-{key}", question=question_of(sample),
                answer=" | ".join([sample.target] if isinstance(sample.target, str) else sample.target),
                info={"sample": key},
            )
            for key, sample in self.samples.items()
        ]  # fmt: skip


class InspectEnvironment(Environment):
    """One sample of a task. The reward is the value of the first scorer; the others are metrics."""

    def __init__(self, task: InspectTask):
        self.task = task

    async def reset(self, problem: Problem, seed: int) -> str:
        key = problem.info.get("sample")
        if key not in self.task.samples:
            raise UserError(f"problem {problem.problem_id}: Inspect task {self.task.name} has no sample {key!r}")
        self.sample = self.task.samples[key]
        return question_of(self.sample)

    async def score(self, trajectory: Trajectory) -> Scores:
        from inspect_ai.model import ChatMessageAssistant, ModelName, ModelOutput
        from inspect_ai.scorer import Target, value_to_float
        from inspect_ai.solver import TaskState
        from inspect_ai.util import registry_info

        completion = completion_of(trajectory)
        messages = as_messages(self.sample)
        state = TaskState(
            model=ModelName("rstar_lab/policy"), sample_id=self.sample.id or 0, epoch=1, input=self.sample.input,
            messages=[*messages, ChatMessageAssistant(content=completion)], target=Target(self.sample.target),
            choices=self.sample.choices, output=ModelOutput.from_content("policy", completion), completed=True,
            metadata=dict(self.sample.metadata or {}),
        )  # fmt: skip
        parts: dict[str, RewardPart] = {}
        for scorer in self.task.scorers:
            score = await scorer(state, state.target)
            value = 0.0 if score is None else score.value
            name = registry_info(scorer).name.rpartition("/")[2]
            named = (
                {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            for key, part in named.items():
                parts[key] = RewardPart(value_to_float()(part), weight=0.0 if parts else 1.0)
        return parts

    async def close(self) -> None:
        """Do nothing: this environment has no resources."""


def completion_of(trajectory: Trajectory) -> str:
    """Return the last turn in the format that Inspect's scorers read: `ANSWER: x` at the end replaces our answer block."""
    text = trajectory.turns[-1].text if trajectory.turns else ""
    if trajectory.answer is None:
        return text
    return f"{ANSWER_BLOCK.sub('', text).rstrip()}\n\nANSWER: {trajectory.answer}"


def as_messages(sample: Any) -> list[Any]:
    """Return the input of a sample as chat messages of Inspect."""
    from inspect_ai.model import ChatMessageUser

    return [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)


def question_of(sample: Any) -> str:
    """Return the input of a sample as one text, followed by its choices as `A) ...`, `B) ...`."""
    text = "\n\n".join(message.text for message in as_messages(sample))
    choices = zip(LETTERS, sample.choices or (), strict=False)
    return "\n".join([text, *(f"{letter}) {choice}" for letter, choice in choices)])


if __name__ == "__main__":
    write_problem_file(
        "rstar_lab.rl.environments.inspect_task",
        lambda target: InspectTask(target, load_named(target, "task")).problems(),
    )
