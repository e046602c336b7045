"""Tasks of the Inspect library."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Target, answer, includes, match, mean, scorer
from inspect_ai.solver import TaskState


@scorer(metrics={"short": [mean()], "polite": [mean()]})
def style():
    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        return Score(value={"short": float(len(text) < 40), "polite": float("please" in state.input_text)})

    return score


@task
def sums():
    samples = [
        Sample(id="two", input="What is 1 + 1?", target="2"),
        Sample(input="please: Which is even?", target=["B", "2"], choices=["1", "2"]),
        Sample(input=[ChatMessageSystem(content="Be brief."), ChatMessageUser(content="What is 3 + 4?")], target="7"),
    ]
    return Task(dataset=MemoryDataset(samples), scorer=[match(numeric=True), includes(), answer("word"), style()])


@task
def boxed():
    return Task(dataset=MemoryDataset([Sample(input="?", target="1", sandbox="docker")]), scorer=includes())


@task
def unscored():
    return Task(dataset=MemoryDataset([Sample(input="?", target="1")]))
