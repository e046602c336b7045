"""The exit status of commands: 0, and 1 with a finding. Those of mistakes of the user are in test_cli_mistakes.py."""

import json
from pathlib import Path

import pytest
from helpers.analysis_runs import make_run
from helpers.command import exit_code
from test_cli import rstar_lab

pytestmark = pytest.mark.slow
PROGRAM = "```python\nprint(1 + 2)\n```"


def lines(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(answer: str) -> dict[str, object]:
    turns = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": answer}]
    return {"conversation_id": "c", "source": "s", "messages": turns, "tools": []}


def rollouts(path: Path, reward_of_wrong: float) -> str:
    """Write 12 steps of rollouts as JSON lines. reward_of_wrong: reward of the wrong answers."""
    rows = []
    for step in range(1, 13):
        for problem in range(6):
            for sample in range(8):
                number = 100 * step + problem
                right = sample < 2 + step // 4 + problem % 2
                answer = number if right else number + 1 + sample
                rows.append({
                    "step": step, "problem_id": f"p{number}", "answer": str(answer), "truth": str(number),
                    "reward": 1.0 if right else reward_of_wrong, "truncated": False,
                    "messages": [
                        {"role": "user", "content": f"What is {number - 7} + 7?"},
                        {"role": "assistant", "content": f"I add {sample} and compare. Answer: {answer}"},
                    ],
                })  # fmt: skip
    return lines(path, *rows)


def problems(path: Path, *answers: str) -> str:
    return lines(
        path, *({"problem_id": f"p{i}", "question": f"What is {i}?", "answer": a} for i, a in enumerate(answers))
    )


COMMANDS = {
    "doctor": lambda folder, faulty: ["doctor", rollouts(folder / "log.jsonl", 1.0 if faulty else 0.0)],
    "lint of conversations": lambda folder, faulty: [
        "data", "lint", lines(folder / "sft.jsonl", chat("3" if faulty else "<reason></reason>\n<answer>3</answer>")),
    ],
    "lint of problems": lambda folder, faulty: [
        "data", "lint", problems(folder / "p.jsonl", "1", "a\nb" if faulty else "2"),
    ],
    "convert": lambda folder, faulty: [
        "data", "convert", "magicoder", lines(folder / "in.jsonl", {"problem": "Add 1 and 2.", "solution": "" if faulty else PROGRAM}),
        "--out", str(folder / "out.jsonl"),
    ],
    "audit": lambda folder, faulty: [
        "audit", "generous:reward" if faulty else "verify", "--problems", problems(folder / "p.jsonl", "17", "23", "31"),
    ],
    "preflight": lambda folder, faulty: [
        "preflight", *(["qwen2_5_32b", "--profile", "one_gpu"] if faulty else ["tiny"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_finds_something_ends_with_1(name, tmp_path, monkeypatch, capfd):
    (tmp_path / "generous.py").write_text("def reward(text, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for faulty, form in ((False, []), (True, []), (True, ["--json"])):
        folder = tmp_path / f"{faulty}{len(form)}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert exit_code(*COMMANDS[name](folder, faulty), *form) == int(faulty), capfd.readouterr()
        assert "Traceback" not in capfd.readouterr().err


def test_commands_that_only_show_something_end_with_0(tmp_path, monkeypatch, capfd):
    make_run(tmp_path / "runs", "a", steps=1)
    monkeypatch.chdir(tmp_path)
    for arguments in (["runs", "list"], ["runs", "show", "a"], ["recipes"], ["profiles", "one_gpu"], ["jobs", "list"]):
        assert exit_code(*arguments) == 0, capfd.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code"), [(["recipes"], 0), (["report", "no-such-run"], 1), (["run"], 2)], ids=str
)
def test_a_process_ends_with_the_code(arguments, code, tmp_path):
    done = rstar_lab(*arguments, cwd=tmp_path)
    assert done.returncode == code and "Traceback" not in done.stderr
