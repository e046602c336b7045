"""`rstar-lab evaluate` on a model folder: repeated, with a changed setting, under another name, and interrupted."""

import asyncio
import json
from pathlib import Path

import pytest
from helpers.memorized_model import ANSWER, QUESTION

from rstar_lab.analysis import Inspector, open_runs, results_table
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl import evaluation
from rstar_lab.rl.evaluate_command import evaluate_command
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.rescore import rescore
from rstar_lab.runs.reader import RunReader

SETTINGS = {
    "engine.kind": "transformers",
    "engine.dtype": "float32",
    "evaluate.samples": 2,
    "evaluate.max_turns": 3,
    "evaluate.max_response_tokens": 60,
    "rl.schedule.lockstep": True,
}


@pytest.fixture
def evaluate(memorized_model, tmp_path):
    questions = (QUESTION, QUESTION.replace("six", "two"), QUESTION.replace("seven", "one"))
    rows = (json.dumps({"question": question, "answer": ANSWER}) for question in questions)
    (tmp_path / "three.jsonl").write_text("\n".join(rows))

    def start(runs: str = "runs", name: str | None = None, **settings):
        recipe = load_recipe("evaluate", SETTINGS | {"runs": str(tmp_path / runs)} | settings)
        source = str(tmp_path / "three.jsonl")
        return evaluate_command([str(memorized_model[0])], source, recipe, Reporter(as_json=True), name=name)

    return start


def rewards(run: str | Path) -> list[tuple[str, int, float, str]]:
    columns = ["problem_id", "sample", "reward", "answer"]
    return [tuple(row.values()) for row in RunReader(run).read("trajectories", columns).to_pylist()]


@pytest.mark.slow
async def test_a_repeated_evaluation_is_not_sampled_again_unless_settings_differ(evaluate):
    first = await evaluate()
    metrics = Path(first["run"], "metrics.jsonl")
    written = metrics.stat().st_mtime_ns
    second = await evaluate()
    assert first.pop("generate_gb") > 0  # nothing is generated the second time
    assert second == first and metrics.stat().st_mtime_ns == written

    changed = await evaluate(**{"rl.limits.max_tool_chars": 1000})
    assert changed["run"] != first["run"] and len(rewards(changed["run"])) == 6

    again = await evaluate(name="again")
    assert Path(again["run"]).name.startswith("again-")
    assert rewards(again["run"]) == rewards(first["run"])  # lockstep rollouts are deterministic


@pytest.mark.slow
async def test_an_interrupted_evaluation_continues_after_its_last_chunk(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK", 2)  # one problem per commit
    task = asyncio.create_task(evaluate())
    while not [path for path in tmp_path.glob("runs/*/metrics.jsonl") if path.stat().st_size]:
        assert not task.done()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (run,) = (path.parent for path in tmp_path.glob("runs/*/run.json"))
    reader = RunReader(run)
    assert reader.status == "stopped" and 0 < len(reader.steps()) < 3
    kept = rewards(run)

    result = await evaluate()
    assert Path(result["run"]) == run and RunReader(run).status == "finished"
    assert rewards(run)[: len(kept)] == kept
    uninterrupted = await evaluate("other")
    assert rewards(run) == rewards(uninterrupted["run"])
    assert result["pass1"] == uninterrupted["pass1"]


ENVIRONMENT = """
from rstar_lab.rl.environments.base import Environment


class Quiz(Environment):
    def reset(self, problem, seed):
        self.bonus = float(problem.info["bonus"])
        return problem.question

    def score(self, trajectory):
        return {"bonus": self.bonus}

    def score_group(self, trajectories):
        return [{"rank": float(index)} for index, _ in enumerate(trajectories)]
"""


@pytest.mark.slow
async def test_an_environment_is_evaluated_and_shown_in_the_inspector(memorized_model, tmp_path, monkeypatch):
    (tmp_path / "my_quiz.py").write_text(ENVIRONMENT)
    rows = [{"problem_id": f"q{n}", "question": QUESTION, "info": {"bonus": n}} for n in range(2)]  # without answers
    (tmp_path / "quiz.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = SETTINGS | {"evaluate.max_response_tokens": 4, "rl.tools": [], "rl.schedule.lockstep": False}

    def start(environment):
        recipe = load_recipe("evaluate", settings)
        return evaluate_command(
            [str(memorized_model[0])], "quiz.jsonl", recipe, Reporter(True), environment=environment
        )

    result = await start("my_quiz:Quiz")
    assert result["n"] == 4 and "environment_failures" not in result
    found = RunReader(result["run"]).read("trajectories").to_pylist()
    assert [(row["environment"], row["reward"]) for row in found] == [("Quiz", r) for r in (0.0, 1.0, 1.0, 2.0)]
    assert [dict(row["metrics"]) for row in found[2:]] == [{"bonus": 1.0, "rank": 0.0}, {"bonus": 1.0, "rank": 1.0}]
    assert result["pass1"][0] == 0.75
    widget = Inspector(open_runs(Path(result["run"]).parent), filters={"environment": "Quiz", "rewarded": True})
    assert len(widget.rows()) == 3 and "Quiz" in widget.html(found[3]["traj_id"])
    with pytest.raises(UserError, match="belongs to environment Quiz, whose state at a turn cannot be restored"):
        widget.fork(found[3]["traj_id"])
    with pytest.raises(UserError, match="--environment Quizz: give module:name or an entry"):
        await start("Quizz")

    (tmp_path / "quiz.jsonl").write_text(
        "\n".join(map(json.dumps, [*rows, rows[0] | {"problem_id": "q2", "info": {}}]))
    )
    result = await start("my_quiz:Quiz")  # q2 has no bonus: its environment fails
    assert (result["n"], result["problems"], result["environment_failures"]) == (4, 2, 2) and result["pass1"][0] == 0.75
    (tmp_path / "quiz.jsonl").write_text(json.dumps(rows[0] | {"info": {}}))
    with pytest.raises(UserError, match="every rollout failed in its environment"):
        await start("my_quiz:Quiz")


@pytest.mark.slow
async def test_several_sets_are_one_run_and_overlong_prompts_are_counted(memorized_model, tmp_path):
    rows = [{"question": QUESTION, "answer": ANSWER, "id": 1}, {"question": "no " * 4000, "answer": "1", "id": 2}]
    for name, part in (("aime24", rows), ("aime25", rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    recipe = load_recipe("evaluate", SETTINGS | {"runs": str(tmp_path / "runs")})
    sources = [f"{tmp_path / name}.jsonl" for name in ("aime24", "aime25")]

    async def start(sources):
        arguments = {"fields": "problem_id=id"}
        return await evaluate_command([str(memorized_model[0])], sources, recipe, Reporter(as_json=True), **arguments)

    result = await start(sources)
    assert (result["problems"], result["overlong_prompts"]) == (2, 1) and Path(result["run"]).is_dir()
    assert {name: own["problems"] for name, own in result["sets"].items()} == {"aime24": 1, "aime25": 1}
    assert {row[0] for row in rewards(result["run"])} == {"1", "aime25/1"}
    assert result.pop("generate_gb") > 0
    assert await start(sources) == result, "the finished run is read"
    assert RunReader(result["run"]).info["result"]["sets"] == result["sets"]
    (row,) = results_table(open_runs(tmp_path / "runs")).to_dict("records")[-1:]
    assert [row["aime24"], row["aime25"]] == [own["pass1"][0] for own in result["sets"].values()]
    again = rescore(result["run"], answer="boxed")
    assert set(again.result["sets"]) == {"aime24", "aime25"}
    with pytest.raises(UserError, match="another set is called aime24 too"):
        await start([sources[0], sources[0]])
