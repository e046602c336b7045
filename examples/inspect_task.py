"""Tasks of Inspect (inspect_ai) as environments: samples become problems, scorers become parts of the reward.

Copy this file beside your tasks, and write a module that a recipe names (docs/environments.md):

    from inspect_task import InspectTask

    gsm8k = InspectTask("my_tasks:gsm8k")

This command writes the problems to a file:

    python inspect_task.py my_tasks:gsm8k problems.jsonl

The task's solvers are not used: the model is prompted and sampled by the agent loop, with the tools of the recipe.
"""

from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.environments.base import Environment, RewardPart, Scores
from rstar_lab.rl.plugins import load_named
from rstar_lab.rl.problems import Problem, write_problem_file
from rstar_lab.rl.reward.foreign import as_messages, scored_state, scored_values, with_answer_line
from rstar_lab.rl.trajectory import Trajectory

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class InspectTask:
    """A task, loaded once. Calling it creates the environment of one rollout.

    name: `module:name` of the `@task` function. Raises UserError if the task has no scorer or needs a sandbox of Inspect.
    """

    def __init__(self, name: str):
        task = load_named(name, "task")()
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
        state = scored_state(self.sample, completion_of(trajectory))
        parts: dict[str, RewardPart] = {}
        for scorer in self.task.scorers:
            for name, value in (await scored_values(scorer, state)).items():
                parts[name] = RewardPart(value, weight=0.0 if parts else 1.0)
        return parts

    async def close(self) -> None:
        """Do nothing: this environment has no resources."""


def completion_of(trajectory: Trajectory) -> str:
    """Return the last turn in the format that Inspect's scorers read."""
    return with_answer_line(trajectory.turns[-1].text if trajectory.turns else "", trajectory.answer)


def question_of(sample: Any) -> str:
    """Return the input of a sample as one text, followed by its choices as `A) ...`, `B) ...`."""
    text = "\n\n".join(message.text for message in as_messages(sample))
    choices = zip(LETTERS, sample.choices or (), strict=False)
    return "\n".join([text, *(f"{letter}) {choice}" for letter, choice in choices)])


if __name__ == "__main__":
    write_problem_file("inspect_task", lambda target: InspectTask(target).problems())
