"""Environments under verl: the same steps as under the local trainer, and groups that are scored in one worker."""

import json

import pytest

from benchmarks.verl_parity import compare, prepare, train_locally, train_with_verl
from rstar_lab.runs.reader import RunReader

MODULE = '''
from rstar_lab.rl.environments.base import Environment, Observation


class Exam(Environment):
    """Ask once more after the first answer. Some problems break it. The shortest rollout of a group gets a bonus."""

    async def reset(self, problem, seed):
        if problem.info.get("broken"):
            raise KeyError("no such exam")
        self.asked, self.wanted = 0, problem.info["wanted"]
        return f"{problem.question} Mind the seed {seed % 7}."

    def step(self, message):
        if message.calls:
            return Observation(reward=-0.25 if message.calls[0].outcome != "ok" else None)
        self.asked += 1
        return None if self.asked > 1 else "Are you sure?"

    def score(self, trajectory):
        return {"right": float(trajectory.answer == self.wanted)}

    def score_group(self, trajectories):
        shortest = min(len(t.response_ids) for t in trajectories)
        return [{"shortest": float(len(t.response_ids) == shortest)} for t in trajectories]


class execute_python_code_with_standard_io:
    def __init__(self):
        self.calls = 0

    def __call__(self, code: str, input: str) -> str:
        """Run code.

        Args:
            code: The code.
            input: The standard input.
        """
        self.calls += 1
        return "42"


def few_calls(text, answer, *, tools):
    state = tools["execute_python_code_with_standard_io"]
    return 1.0 if state is None or state.calls < 2 else 0.0, {"calls": 0.0 if state is None else float(state.calls)}


def wordy(trajectory):
    return len(trajectory.text) / 1000
'''


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_mixture_of_environments_equals_the_local_trainers(tmp_path, monkeypatch):
    (tmp_path / "exams.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("exam", "tool"):
        info = [{"wanted": "42"}, {"wanted": "41"}, {"wanted": "42", "broken": name == "exam"}]
        rows = [{"problem_id": f"{name}{i}", "question": "6 x 7?", "answer": "42", "info": info[i]} for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environments = [
        {"name": "exam", "environment": "exams:Exam", "tools": ["python"], "limits": {"max_turns": 4},
         "problems": {"file": str(tmp_path / "exam.jsonl")}, "roc_penalties": ["errors", "exams:wordy"], "weight": 2.0},
        {"name": "tool", "reward": "exams:few_calls", "tools": ["exams:execute_python_code_with_standard_io"],
         "problems": {"file": str(tmp_path / "tool.jsonl")}},
    ]  # fmt: skip
    held_out = [
        {"problem_id": f"held{i}", "question": f"6 x {i}?", "answer": "42", "info": {"wanted": "42"}} for i in (8, 9)
    ]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    sets = {"held": {"file": str(tmp_path / "held.jsonl"), "environment": "exam"}}
    evaluate = {"sets": sets, "samples": 4, "max_response_tokens": 512, "max_turns": 3}
    recipe = prepare(tmp_path, steps=2, problems_per_step=6, evaluate=evaluate, environments=environments)
    ours = train_locally(recipe, tmp_path / "local")
    theirs = train_with_verl(recipe, tmp_path / "verl")
    assert compare(ours, theirs).differences == []
    tables = [
        {row["traj_id"]: row for row in RunReader(run).read("trajectories").to_pylist()} for run in (ours, theirs)
    ]
    for column in ("environment", "metrics", "stop_reason", "turns"):
        assert {k: row[column] for k, row in tables[0].items()} == {k: row[column] for k, row in tables[1].items()}
    rows = [*tables[1].values()]
    assert {row["environment"] or "" for row in rows} == {"exam", "tool", ""}
    failed = [row for row in rows if row["stop_reason"] == "environment_error"]
    assert {row["problem_id"] for row in failed} == {"exam2"} and not any(row["kept"] for row in failed)
    names = {name for row in rows for name, _ in dict(row["metrics"] or ()).items()}
    assert names == {"right", "shortest", "turns", "calls"}
    for mine, verls in zip(RunReader(ours).metrics(), RunReader(theirs).metrics(), strict=True):
        assert verls["env/exam/reward"] == pytest.approx(mine["env/exam/reward"])
        assert verls["environment_failures"] == mine["environment_failures"] > 0
    (held,) = (tmp_path / "verl").glob("parity-held-rl*")
    groups = {}
    for row in RunReader(held).read("trajectories").to_pylist():
        groups.setdefault(row["problem_id"], []).append(row)
    assert groups.keys() == {"held8", "held9"}
    for rows in groups.values():  # `score_group` has scored the whole group
        shortest = min(row["response_tokens"] for row in rows)
        assert [dict(row["metrics"])["shortest"] for row in rows] == [
            float(row["response_tokens"] == shortest) for row in rows
        ]
        assert len(rows) == 4 and all(row["reward"] >= dict(row["metrics"])["shortest"] - 0.5 for row in rows)
