"""Tasks of the real Inspect library as environments (examples/inspect_task.py): their problems, and the values of their scorers."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripted_engine import ScriptedEngine

pytest.importorskip("inspect_ai")

from helpers.inspect_tasks import sums
from inspect_ai import eval
from inspect_ai.model import ModelOutput, get_model

from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.environments.loading import EnvironmentClass
from rstar_lab.rl.environments.mixture import RunEnvironment
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.trajectory import StopReason

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from inspect_task import InspectTask

TOKENIZER = train_tokenizer(["what is the sum of these two numbers"], 300)


def roll(turn, sample):
    """Return the rollout of one turn on a sample of `sums`."""
    task = InspectTask("helpers.inspect_tasks:sums")
    environment = EnvironmentClass("sums", task, time_limit_s=30)
    problem = next(p for p in task.problems() if p.info["sample"] == sample)
    own = RunEnvironment(environment.tools, lambda text, answer: 0.0, environment, {})
    context = RolloutContext(
        Codec(TOKENIZER, {}), {}, lambda text, answer: 0.0, LimitsSection(max_response_tokens=4000)
    )
    engine = ScriptedEngine(TOKENIZER, lambda prompt, index: turn)
    rollout_task = RolloutTask(problem.model_copy(update={"environment": "sums"}), "t-0", "g", 0, seed=1)
    trajectory = asyncio.run(run_rollout(rollout_task, engine, context.with_environments({"sums": own})))
    return trajectory, TOKENIZER.decode(engine.prompts[0])


def scores_of_inspect(completion, index, folder):
    """Return the first value of each scorer for a completion, as Inspect's own `eval` computes it."""
    made = sums()
    made.dataset = made.dataset[index : index + 1]
    model = get_model("mockllm/model", custom_outputs=[ModelOutput.from_content("mockllm", completion)])
    (log,) = eval(made, model=model, display="none", log_format="json", log_dir=str(folder), log_samples=True)
    return {
        name: score.as_float() for name, score in log.samples[0].scores.items() if not isinstance(score.value, dict)
    }


@pytest.mark.parametrize(
    ("turn", "sample", "expected"),
    [
        ("one and one</reason>\n<answer>\\boxed{2}</answer>", "two", 1.0),
        ("one and one</reason>\n<answer>\\boxed{3}</answer>", "two", 0.0),
        ("I do not know", "two", 0.0),
        ("three and four</reason>\n<answer>\\boxed{7}</answer>", "3", 1.0),
    ],
)
@pytest.mark.slow
def test_the_reward_and_metrics_are_those_of_inspects_eval(turn, sample, expected, tmp_path):
    trajectory, _ = roll(turn, sample)
    assert trajectory.stop_reason is StopReason.ANSWERED, trajectory.error
    assert trajectory.reward == expected, "of the first scorer, match"
    number = trajectory.answer
    completion = f"{turn.split('</reason>')[0]}</reason>\n\nANSWER: {number}" if number else turn
    expected_scores = scores_of_inspect(completion, {"two": 0, "3": 2}[sample], tmp_path)
    assert {name: trajectory.metrics[name] for name in expected_scores} == expected_scores
    assert trajectory.metrics["style/short"] in (0.0, 1.0) and trajectory.metrics["style/polite"] == 0.0


def test_a_sample_is_a_question_with_its_choices_and_messages():
    first, second, third = InspectTask("helpers.inspect_tasks:sums").problems()
    assert (first.problem_id, first.question, first.answer) == ("sums-two", "What is 1 + 1?", "2")
    assert second.question == "please: Which is even?\nA) 1\nB) 2" and second.answer == "B | 2"
    assert third.question == "Be brief.\n\nWhat is 3 + 4?"
    _, prompt = roll("B", "2")
    assert "Which is even?\nA) 1\nB) 2" in prompt


@pytest.mark.parametrize(("made", "message"), [("boxed", "sandbox of Inspect"), ("unscored", "has no scorer")])
def test_a_task_that_cannot_run_here_is_refused(made, message):
    with pytest.raises(UserError, match=message):
        InspectTask(f"helpers.inspect_tasks:{made}")


@pytest.mark.slow
def test_the_command_writes_the_problems(tmp_path):
    source = (
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import MemoryDataset, Sample\n"
        "from inspect_ai.scorer import match\n\n@task\ndef sums():\n"
        "    return Task(dataset=MemoryDataset([Sample(input='1+1?', target='2')]), scorer=match())\n"
    )
    (tmp_path / "my_tasks.py").write_text(source)
    command = [
        sys.executable,
        Path(__file__).parents[3] / "examples" / "inspect_task.py",
        "my_tasks:sums",
        "sums.jsonl",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [p.question for p in load_problems(tmp_path / "sums.jsonl")] == ["1+1?"]
