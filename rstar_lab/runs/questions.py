"""Beginnings of the questions of a run. A copy of a run stores them if its transcripts stay on the host, for lists of rollouts."""

from functools import lru_cache
from pathlib import Path

from rstar_lab.runs.reader import RunReader, read_steps
from rstar_lab.untrusted.files import read_json

QUESTION_LENGTH = 160  # maximum characters
QUESTIONS_FILE = "questions.json"


def question_beginnings(run: RunReader, after: int) -> dict[str, str]:
    """Return {problem id: beginning of its question} for the problems of the steps after step `after`, from the transcripts."""
    steps = {step: stage for step, stage in run.steps().items() if step > after}
    problems: dict[str, str] = {}  # of every trajectory
    for file in run.scan("trajectories", steps):
        rows = read_steps(file, ["traj_id", "problem_id"]).to_pydict()
        problems |= dict(zip(rows["traj_id"], rows["problem_id"], strict=True))
    beginnings = {}
    for file in run.scan("transcripts", steps):
        rows = read_steps(file, ["traj_id", "question"]).to_pydict()
        for traj_id, question in zip(rows["traj_id"], rows["question"], strict=True):
            if question and problems.get(traj_id):
                beginnings[problems[traj_id]] = question[:QUESTION_LENGTH]
    return beginnings


def copied_questions(run_dir: Path) -> dict[str, str]:
    """Return the questions that a copy of a run stores: {problem id: beginning}."""
    path = run_dir / QUESTIONS_FILE
    return _read(path, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=32)
def _read(path: Path, _mtime_ns: int) -> dict[str, str]:
    return read_json(path, dict[str, str])
