"""The graders of microsoft/rStar run in a sandbox: no text of the model or of a data set is executed outside of it."""

import importlib.util
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.reward.boxed import released_grade
from rstar_lab.verify import verify_many
from rstar_lab.verify.released_program import has_code

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("2*sqrt(3)", False), (r"\frac{1}{2}", False), ("f(x)", False), ("(1,2)", False), ("2 pi", False), ("x+1", False),
        ("open(x)", True), ("a.b", True), ("3.5", False), ("print(1)", True), ("'a'", True), ("__a", True), ("exit 5", True),
        ("lambda: 1", True), ("x()", True), ("getattr(x,y)", True), ("[f for f in x](1)", True), ("x:=1", True),
    ],
)  # fmt: skip
def test_what_counts_as_code(text, code):
    assert has_code(text) is code


def expression(rng: random.Random, mark: str, depth: int = 3) -> str:
    """Return a Python or LaTeX expression with calls, dunder names, lambdas and quotes, most of which write `mark`."""
    leaf = [
        "1", "x", r"\pi", r"\frac{1}{2}", f'open("{mark}","w")', f"open({mark!r},'w').write('x')", "__import__('os')",
        "().__class__", "(lambda: 7)()", f'exec("open({mark!r},chr(119))")', "getattr(x,'__class__')", "print('1')", "exit(0)",
        f'eval("open({mark!r},chr(119))")', "[c for c in ().__class__.__mro__]", "globals()", "breakpoint()", "1 if x else 2",
        "__builtins__", "f'{1}'", "type('A',(),{})", "compile('1','','eval')", "5",
    ]  # fmt: skip
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaf)
    first, second = (expression(rng, mark, depth - 1) for _ in range(2))
    forms = (
        "{0}+{1}",
        "[{0},{1}]",
        "({0})*({1})",
        r"\frac{{{0}}}{{{1}}}",
        "{0} or {1}",
        r"\sqrt{{{0}}}{1}",
        "({0},{1})",
        "{0};{1}",
    )
    return rng.choice(forms).format(first, second)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_generated_expressions_execute_nothing_and_forge_no_reward(count, tmp_path):
    mark = str(tmp_path / "executed")
    rng = random.Random(0)
    generated = [expression(rng, mark) for _ in range(count)]
    assert sum(has_code(text) for text in generated) > 0.8 * count
    responses = [rf"\boxed{{{text}}}" if n % 2 else f"The answer is {text} 1" for n, text in enumerate(generated)]
    with ThreadPoolExecutor(4) as threads:
        accepted = list(threads.map(lambda response: released_grade(response, "31415"), responses))
    assert not any(accepted)
    assert not any(verify_many([(response, "31415") for response in responses], answer_format="boxed"))
    assert not Path(mark).exists()


def test_code_that_passes_the_filter_still_runs_in_the_sandbox_only(tmp_path):
    """The box is the boundary, not the filter: a program in it sees no file of the user and has no network."""
    from rstar_lab.rl.reward.boxed import grader_box

    mark = tmp_path / "executed"
    program = (
        f"import json, sys\ntry:\n    open({str(mark)!r}, 'w')\nexcept OSError:\n    pass\n"
        "import socket\ntry:\n    socket.create_connection(('1.1.1.1', 53), 1)\n    print(1)\nexcept OSError:\n    print(0)\n"
    )
    assert grader_box().run(program, {}).stdout.strip() == "0"
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
