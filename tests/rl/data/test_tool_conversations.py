"""Solutions in plain text become conversations with executed programs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from rstar_lab.cli.data import app
from rstar_lab.rl.data.lint import lint
from rstar_lab.rl.data.tool_conversations import parts_of
from rstar_lab.rl.renderers.conversations import read_conversations

QUESTION = "What is the sum of the squares below 10?"
PROGRAM = "```python\nprint(sum(i * i for i in range(10)))\n```\n"
SOLUTION = f"I add the squares.\n{PROGRAM}The sum is 285, so the answer is \\boxed{{285}}."
ROWS = [
    {"question": QUESTION, "solution": SOLUTION, "answer": "285"},
    {
        "question": QUESTION,
        "solution": SOLUTION.replace(PROGRAM, f"{PROGRAM}```output\n285\n```\n").replace("\n", "\r\n"),
    },
    {"question": QUESTION, "solution": SOLUTION.replace(PROGRAM, f"{PROGRAM}```output\n284\n```\n")},
    {"question": QUESTION, "solution": SOLUTION, "answer": "286"},
    {"question": QUESTION, "solution": SOLUTION.replace("print(", "print(1 / 0, "), "answer": "285"},
    {"question": QUESTION, "solution": SOLUTION.replace("print(", "("), "answer": "285"},
    {"question": QUESTION, "solution": "It is \\boxed{285}.", "answer": "285"},
    {"question": QUESTION, "answer": "285"},
    {"question": QUESTION, "solution": PROGRAM, "answer": "285"},
]
REFUSED = {
    "a program prints another output than the solution says": 1, "another answer than that of the row": 1,
    "a program failed (exception)": 1, "a program prints nothing": 1, "no program": 1,
    "no solution in a column solution or generated_solution or response or output": 1,
    "no answer in \\boxed{} after the last program": 1,
}  # fmt: skip


class Writer(BaseHTTPRequestHandler):
    """An OpenAI-style server whose model thinks, and puts a program in place of the numbers."""

    def reply(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.reply({"data": [{"id": "writer"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = body["messages"][0]["content"]
        assert self.path == "/v1/chat/completions" and body["model"] == "other" and QUESTION in request
        assert "0 + 1 + 4" in request
        self.reply({"choices": [{"message": {"content": f"<think>hm ```python\n1\n```</think>{SOLUTION}"}}]})

    def log_message(self, *_): ...


@pytest.fixture
def writer():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Writer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def convert(tmp_path, rows, *arguments):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    command = ["add-tools", str(tmp_path / "rows.jsonl"), "--out", str(out), "--json", *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return json.loads(done.stdout.splitlines()[-1]), list(read_conversations(out))


def test_programs_run_and_other_rows_are_counted_by_reason(tmp_path):
    report, conversations = convert(tmp_path, ROWS)
    assert (report["rows"], report["converted"], report["refused"]) == (len(ROWS), 2, REFUSED)
    for conversation in conversations:
        assert not lint(conversation)
        user, call, result, final = conversation.messages
        assert user.content == QUESTION and "sum(i * i" in call.content and result.content.strip() == "285"
        assert call.content.startswith("<reason>I add the squares.</reason>")
        assert final.content.endswith("<answer>\\boxed{285}</answer>") and "The sum is 285" in final.content


@pytest.mark.parametrize(
    ("printed", "unconfirmed"), [("285", 0), ("285.0", 0), ("the sum is 285.", 0), ("280", 1), ("2850", 1)]
)
def test_answers_that_no_program_prints_are_counted(tmp_path, printed, unconfirmed):
    solution = f"I add.\n```python\nprint({printed!r})\n```\nSo the answer is \\boxed{{285}}."
    report, _ = convert(tmp_path, [{"question": QUESTION, "solution": solution, "answer": "285"}])
    assert (report["converted"], report["unconfirmed"]) == (1, unconfirmed)


def test_a_model_behind_an_openai_style_server_writes_the_programs(tmp_path, writer):
    row = {"problem": QUESTION, "generated_solution": "0 + 1 + 4 + ... = \\boxed{285}", "expected_answer": "285"}
    arguments = ["--writer", writer, "--model", "other", "--fields", "question=problem,answer=expected_answer"]
    report, (conversation,) = convert(tmp_path, [row], *arguments)
    assert report["converted"] == 1 and [m.role for m in conversation.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_blocks_of_other_languages_stay_text():
    text = "a\n```text\nx\n```\nb\n```python\n1\n```\n```output\n1\n```\nc\n```py\n2\n```\nd"
    between = "```python3\n1\n```\nThe output:\n```output\n2\n```\nc"
    assert parts_of(between) == [("", "1", "2\n"), ("The output:\nc", "", None)], "its claim is checked and left out"
    assert parts_of(text) == [("a\n```text\nx\n```\nb", "1", "1\n"), ("c", "2", None), ("d", "", None)]
