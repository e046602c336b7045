"""The exit status of commands: 0, 1 with a finding or a mistake of the user, 2 for a wrong command line or an unreadable log."""

import json
from pathlib import Path

import nbformat
import pytest
from helpers.analysis_runs import make_run
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


def notebook(path: Path, number: str) -> str:
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(
            "print(0.25)", execution_count=1, outputs=[nbformat.v4.new_output("stream", text="0.25\n")]
        ),
        nbformat.v4.new_markdown_cell(f"The rate is {number}."),
    ]
    nbformat.write(book, path)
    return str(path)


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
    "report --lab": lambda folder, faulty: ["report", "--lab", notebook(folder / "n.ipynb", "0.91" if faulty else "0.25")],
    "audit": lambda folder, faulty: [
        "audit", "generous:reward" if faulty else "verify", "--problems", problems(folder / "p.jsonl", "17", "23", "31"),
    ],
    "preflight": lambda folder, faulty: [
        "preflight", *(["qwen2_5_32b", "--profile", "one_gpu"] if faulty else ["tiny"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("faulty", [False, True], ids=["nothing found", "something found"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_finds_something_ends_with_1(name, faulty, tmp_path):
    (tmp_path / "generous.py").write_text("def reward(text, answer):\n    return 1.0\n")
    done = rstar_lab(*COMMANDS[name](tmp_path, faulty), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == int(faulty), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


MISTAKES = {
    2: [["no-such-command"], ["run"], ["doctor", "no-such-file"]],
    1: [
        ["run", "no-such-recipe"], ["run", "tiny", "--set", "rl.clip_hihg=1"], ["report", "no-such-run"],
        ["evaluate", "no-such-model", "--problems", "p.jsonl"], ["rewind", "no-such-run", "1", "out"],
        ["jobs", "logs", "no-such-job"], ["data", "lint", "no-such-file"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("code, arguments", [(code, row) for code, rows in MISTAKES.items() for row in rows], ids=str)
def test_a_mistake_of_the_user_is_one_line_and_no_success(code, arguments, tmp_path):
    done = rstar_lab(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")


def test_commands_that_only_show_something_end_with_0(tmp_path):
    make_run(tmp_path / "runs", "a", steps=1)
    for arguments in (["runs", "list"], ["runs", "show", "a"], ["recipes"], ["profiles", "one_gpu"], ["jobs", "list"]):
        done = rstar_lab(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
