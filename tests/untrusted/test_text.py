"""No text of a model, tool, run or service reaches a terminal with control sequences or as markup."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.cli.shared import fail
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.chat.events import Event, Kind
from rstar_lab.rl.chat.view import show
from rstar_lab.untrusted.text import Html, counted, echo, escaped, html, joined, printable

GOLDEN = Path(__file__).parent.parent / "golden" / "runs"
HOSTILE = "\x1b]52;c;ZXZpbA==\x1b\\[/x] [bold]b[/] :smile: \x1b[2J\x07\x9b2J\u202eabc\ud800"


def is_plain(text):
    return not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c == "\u202e" for c in text)


def test_control_characters_become_visible_and_colours_go():
    assert printable("\x1b[1;31mred\x1b[0m\ttab\nline") == "red\ttab\nline"
    assert is_plain(printable(HOSTILE)) and "[/x] [bold]b[/]" in printable(HOSTILE)
    assert printable(5) == "5" and printable(None) == "None"
    every = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0xD800]))
    assert is_plain(printable(every)) and len(printable(every)) == len(every)


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_chat_prints_no_control_sequences(kind):
    async def stream(question):
        yield Event(kind, HOSTILE, tool=HOSTILE, outcome=HOSTILE)

    output = io.StringIO()
    await show(SimpleNamespace(stream=stream, replies=[None]), "q", Console(file=output, width=200, highlight=False))
    assert is_plain(output.getvalue())
    if kind is not Kind.STOP:
        assert "[/x] [bold]b[/] :smile:" in output.getvalue()


def test_an_error_is_one_line_without_markup(capsys):
    with pytest.raises(SystemExit):
        fail(HOSTILE, 1)
    text = capsys.readouterr().err
    assert is_plain(text) and "error: " in text and "[/x] [bold]b[/] :smile:" in text


@pytest.fixture
def runs(tmp_path):
    """Two runs: a sound one, and one with hostile text."""
    for name in ("good", "hostile"):
        shutil.copytree(GOLDEN / "tiny_fast-rl", tmp_path / name)
        change(tmp_path / name, run_id=name)
    return tmp_path


def change(folder, **values):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


WRONG = [
    {"run_id": 5}, {"run_id": "a[/foo]"}, {"run_id": HOSTILE}, {"status": 5}, {"kind": [HOSTILE]}, {"created": 5}, {"attempts": "x"},
    {"recipe": "x"}, {"hardware": []}, {"schema_version": "x"},
]  # fmt: skip


@pytest.mark.parametrize("values", [*WRONG, {"kind": HOSTILE, "error": HOSTILE, "result": {HOSTILE: HOSTILE}}])
def test_runs_with_hostile_text_or_wrong_types_are_listed(runs, values):
    change(runs / "hostile", **values)
    for command in (["list"], ["show", "hostile"], ["show", "good"]):
        done = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["runs", *command, "--runs-dir", str(runs)])
        assert done.exit_code == 0 or (command[-1] == "hostile" and values in WRONG), done.output
        assert is_plain(done.stdout + done.stderr)
        if command == ["list"]:
            assert "good" in done.stdout and "hostile" in done.stdout
    done = CliRunner().invoke(app, ["runs", "list", "--json", "--runs-dir", str(runs)])
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    "line", ["{", "[]", "5", '{"stage": 5, "step": "x", "reward": {}}', '{"stage": "rl", "step": 1e400}']
)
def test_one_damaged_run_does_not_end_the_list(runs, line):
    (runs / "hostile" / "metrics.jsonl").write_text(f"{line}\n")
    done = CliRunner().invoke(app, ["runs", "list", "--json", "--runs-dir", str(runs)])
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 2, done.output


def test_rescore_prints_answers_without_control_sequences(monkeypatch, runs):
    from rstar_lab.rl import rescore

    found = SimpleNamespace(
        changes=[rescore.Change(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0.0, 1.0)],
        trajectories=1, correct_before=0, correct=1, run=None, result=None,
    )  # fmt: skip
    monkeypatch.setattr(rescore, "rescore", lambda *arguments, **options: found)
    done = CliRunner().invoke(app, ["rescore", "good", "--runs-dir", str(runs)])
    assert done.exit_code == 0 and "1 of 1 rewards change" in done.stdout and is_plain(done.stdout)


def test_a_reporter_prints_text_as_it_is():
    output = io.StringIO()
    reporter = Reporter(console=Console(file=output, width=300, highlight=False, force_terminal=True))
    reporter.print_line(HOSTILE)
    with reporter.work(HOSTILE, 2) as work:
        work.update(1, HOSTILE)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).replace("\r", "")
    assert is_plain(shown) and shown.count("[/x] [bold]b[/]") >= 2


def test_an_evaluation_prints_answers_of_the_model_as_they_are():
    from rstar_lab.rl.evaluate_command import print_result

    interval = (0.5, 0.4, 0.6)
    row = {
        "problem_id": HOSTILE, "correct": 1, "majority": f"[/x]{HOSTILE}", "truth": f"[/x]{HOSTILE}", "majority_correct": True,
        "response_tokens": 5.0, "calls": 1, "samples": 1, "errors": 0,
    }  # fmt: skip
    names = ("response_tokens", "calls", "error_rate", "truncated")
    result = {
        "samples": 1, "problems": 1, "n": 1, "pass1": interval, "maj1": interval, "error_rate": 0.5, "calls": 1.0, "truncated": 0.0,
        "response_tokens": 5.0, "intervals": dict.fromkeys(names, interval),
    }  # fmt: skip
    output = io.StringIO()
    with contextlib.suppress(KeyError):  # the lines below the table need more keys
        print_result(
            result, [row], Path(f"runs/{HOSTILE}"), Reporter(console=Console(file=output, width=300)), tools=True
        )
    assert is_plain(output.getvalue()) and output.getvalue().count("[/x]") >= 3


def test_preflight_prints_findings_as_they_are(monkeypatch, capsys):
    from rstar_lab.rl.preflight import run

    finding = run.Finding("model", run.Status.FAIL, HOSTILE)
    monkeypatch.setattr(run, "preflight", lambda *_: iter([finding]))
    assert run.run_preflight(HOSTILE, HOSTILE, {}) == 1
    assert is_plain(text := capsys.readouterr().out) and "[/x]" in text and "[bold]" in text


def test_warnings_and_log_lines_are_printable():
    code = (
        "import logging, sys, warnings\nfrom rstar_lab.cli import command_line\n"
        f"text = {HOSTILE!r}\ncommand_line.app = lambda **_: (warnings.warn(text), logging.getLogger('x').warning(text))\n"
        "command_line.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert is_plain(done.stderr) and done.stderr.count("[/x] [bold]b[/]") == 2, done.stderr


def test_counts_have_the_noun_in_the_right_number():
    found = [counted(number, noun) for number, noun in ((1, "problem"), (0, "step"), (1200, "trajectory"), (2, "key"))]
    assert found == ["1 problem", "0 steps", "1,200 trajectories", "2 keys"]


def test_markup_is_made_of_escaped_values_only():
    row = html("<td title='{0}'>{0}</td><b class='{name}'>{1}</b>", HOSTILE, escaped("<i>"), name="'x")
    assert row.count("<") == 4 and "&lt;i&gt;" in row and "&amp;lt;" not in row and "class='&#x27;x'" in row
    assert isinstance(joined([row, row]), Html) and joined([row]) == row and is_plain(row)


def test_echo_prints_plain_text(capsys):
    echo(HOSTILE)
    echo(HOSTILE, err=True)
    captured = capsys.readouterr()
    assert is_plain(captured.out) and is_plain(captured.err) and captured.out == captured.err
