"""Evaluates an environment as `rstar-lab evaluate --environment` does, with a tiny model that has learned one conversation of it."""

from pathlib import Path
from typing import Any

from helpers.memorized_model import make_memorized_model
from rstar_lab.analysis import Inspector, open_runs
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.environments.loading import load_environment
from rstar_lab.rl.evaluate_command import evaluate_command
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question
from rstar_lab.runs.reader import RunReader


async def evaluate_environment(
    folder: Path, environment: str, problem: Problem, question: str, conversation: list[tuple[str, str]]
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Evaluate one problem; return (row of the trajectory, rows of the calls, text of the inspector's page).

    question: first user message of the environment. conversation: (role, content) of the messages after it.
    """
    tools = load_environment("e", environment, 20.0).tools.values()
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": format_question(question)}]
    messages += [{"role": role, "content": content} for role, content in conversation]
    make_memorized_model(folder / "model", messages, [tool.schema for tool in tools], max_length=2048, target=3e-4)
    write_problems(folder / "problems.jsonl", [problem])
    settings = {
        "runs": str(folder / "runs"), "engine.kind": "transformers", "engine.dtype": "float32", "evaluate.samples": 1,
        "evaluate.max_response_tokens": 400, "evaluate.temperature": 0.01, "rl.tools": [],
    }  # fmt: skip
    result = await evaluate_command(
        [str(folder / "model")], str(folder / "problems.jsonl"), load_recipe("evaluate", settings), Reporter(True),
        environment=environment,
    )  # fmt: skip
    reader = RunReader(result["run"])
    (row,) = reader.read("trajectories").to_pylist()
    page = Inspector(open_runs(folder / "runs")).markdown(row["traj_id"])
    return row, reader.read("calls").to_pylist(), page
