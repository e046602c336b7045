"""The graders of microsoft/rStar run in a sandbox: no text of the model or of a data set is executed outside of it."""

from pathlib import Path

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.reward.boxed import grader_box, released_grade
from rstar_lab.verify.released_program import has_code

pytestmark = pytest.mark.slow


def payloads(mark: str) -> list[str]:
    """Return responses whose box writes the file `mark` when it is evaluated."""
    system = f'import os;os.system("id > {mark}")'
    return [
        rf"So \boxed{{[exec({system!r}),\pi]}}",
        rf'\boxed{{open("{mark}","w").write("x1")}}',
        rf"The answer is [__import__('os').system('id > {mark}'), 1]",
        rf'\boxed{{(lambda: open("{mark}", "w"))()}} 1',
        rf"\boxed{{().__class__.__base__.__subclasses__()[1], open('{mark}','w')}}",
        rf"\boxed{{\begin{{pmatrix}} exec({system!r}) & 1 \end{{pmatrix}}}}",
    ]


def test_known_payloads_do_not_run(tmp_path):
    mark = str(tmp_path / "executed")
    for response in payloads(mark):
        assert released_grade(response, "5") is False
        assert released_grade(r"\boxed{5}", response) is False
        assert make_reward("released")(response, "5") == 0.0
    assert not Path(mark).exists()


FORGERY = "import os;os.write(1,b'1');os._exit(0)"


def fullwidth(name: str) -> str:
    return "".join(chr(ord(char) + 0xFEE0) for char in name[:-1]) + name[-1]


def forgeries() -> list[str]:
    """Return answers that print `1` if they are evaluated: in fullwidth letters, and in a comment that is read backwards."""
    call = f"{fullwidth('exec')}(" + "+".join(f"{fullwidth('chr')}({ord(char)})" for char in FORGERY) + ")"
    backwards = "exec([" + "+".join(f"chr({ord(char)})" for char in FORGERY) + "][0])"
    return [f"[{call},\\pi]", call, f"[\\pi,N(string[::-1])]#{backwards[::-1]}"]


@pytest.mark.parametrize("answer", forgeries(), ids=["eval", "parse_expr", "comment"])
def test_answers_that_print_a_verdict_are_wrong(answer):
    assert released_grade(f"The answer is \\boxed{{{answer}}}", "5") is False
    assert has_code(answer)


def test_code_that_passes_the_filter_still_runs_in_the_sandbox_only(tmp_path):
    """The box is the boundary, not the filter: a program in it sees no file of the user and has no network."""
    mark = tmp_path / "executed"
    program = (
        f"import json, sys\ntry:\n    open({str(mark)!r}, 'w')\nexcept OSError:\n    pass\n"
        "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 53), 1)\n    print(1)\nexcept OSError:\n    print(0)\n"
    )
    assert grader_box().run(program, "").stdout.strip() == "0"
    assert not mark.exists()


USER_GRADER = """
import os

def grade(text, answer):
    return float(eval(text) == eval(answer))

grade.sandbox = True

def names_secret(text, answer):
    return float("SECRET" in os.environ)

names_secret.sandbox = True
"""


def test_a_users_grader_that_evaluates_text_runs_in_the_sandbox(tmp_path, monkeypatch):
    (tmp_path / "evaluating.py").write_text(USER_GRADER)
    (tmp_path / "broken.py").write_text(
        f"import os\nos.stat({str(tmp_path)!r})\ndef grade(text, answer): ...\ngrade.sandbox = True"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SECRET", "1")
    reward, mark = make_reward("evaluating:grade"), tmp_path / "executed"
    assert [reward("6 * 7", "42"), reward("6 * 8", "42")] == [1.0, 0.0]
    assert reward(f"open({str(mark)!r}, 'w')", "42") == 0.0 and not mark.exists()
    assert reward("1 / 0", "42") == 0.0
    assert make_reward("evaluating:names_secret")("", "") == 0.0
    with pytest.raises(
        UserError, match=r"broken:grade: its module does not run in the sandbox: .*(No such file|Permission)"
    ):
        make_reward("broken:grade")("1", "1")


FORGING = """
def raw(text, answer):
    return eval(text)

raw.sandbox = True
"""


@pytest.mark.parametrize(
    "text",
    [
        "float('nan')", "1e999", "(1, {})", "10**400", "'x'", "__import__('os').write(1, b'1e6\\n') and __import__('os')._exit(0)",
        "__import__('os').write(1, b'[['*200000) and __import__('os')._exit(0)", "__import__('os').kill(__import__('os').getpid(), 9)",
        "[[]]*3",
        "__import__('os').kill(__import__('os').getppid(), 9)", "__import__('time').sleep(999)",
    ],
)  # fmt: skip
def test_texts_that_are_evaluated_cannot_print_a_reward_or_end_the_run(text, tmp_path, monkeypatch, caplog):
    (tmp_path / "forging.py").write_text(FORGING)
    monkeypatch.syspath_prepend(tmp_path)
    reward = make_reward("forging:raw", timeout_s=5.0)
    assert reward(text, "5") == 0.0
    assert len([record for record in caplog.records if "counted as 0" in record.message]) == 1
