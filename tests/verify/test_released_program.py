"""Texts that reach `eval` in the graders of microsoft/rStar: an allow-list of syntax trees, wherever the text came from."""

import builtins
import contextlib

import pytest
import sympy
from helpers.cases import read_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.parsing import sympy_parser

from rstar_lab.verify import released_program
from rstar_lab.verify.released_program import NotArithmetic, evaluate, has_code

CASES = read_cases(__file__)
PAYLOADS = CASES["payloads"]


def wide(text: str) -> str:
    """Return a text in fullwidth letters, which Python reads as ASCII."""
    return "".join(chr(ord(char) + 0xFEE0) if char.isalpha() and char.isascii() else char for char in text)


def as_numbers(text: str) -> str:
    return "+".join(f"chr({ord(char)})" for char in text)


leaves = st.sampled_from(CASES["leaves"] + PAYLOADS)
hidden = st.one_of(
    st.sampled_from(PAYLOADS).map(wide),
    st.sampled_from(PAYLOADS).map(lambda text: f"N({text!r})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"sqrt({text!r})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"S({text!r})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"Symbol({text})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"exec({as_numbers(text)})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"N(string[::-1])]#{text[::-1]}["),
    st.sampled_from(PAYLOADS).map(lambda text: f"Function('f')({text})"),
    st.sampled_from(PAYLOADS).map(lambda text: f"getattr(sqrt, 'x', {text})"),
)
expressions = st.recursive(
    st.one_of(leaves, hidden),
    lambda inner: st.builds(
        lambda form, first, second: form.format(first, second),
        st.sampled_from(["{0}+{1}", "[{0},{1}]", "({0})*({1})", "{0} or {1}", "sqrt({0})", "{0}({1})", "({0},{1})", "x[{0}:{1}]",
                         "{0} if {1} else 2"]),
        inner,
        inner,
    ),
    max_leaves=6,
)  # fmt: skip


class Recorder:
    """Names for an evaluation. A payload that is evaluated reads or calls one of the builtins, which are recorded."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def guarded(self, code, names=None, local_names=None):
        builtin = {name: lambda *_, name=name, **__: self.ran.append(name) for name in dir(builtins) if name.islower()}
        arithmetic = {
            name: getattr(builtins, name)
            for name in ("abs", "max", "min", "pow", "round", "sum", "int", "float", "complex")
        }
        return evaluate(
            code, {**builtin, **arithmetic, **(names or {}), "__builtins__": builtin | arithmetic}, local_names
        )


@settings(max_examples=300, deadline=None)
@given(text=expressions)
def test_no_generated_expression_calls_anything(text):
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sympy_parser, "eval", recorder.guarded, raising=False)
        patch.setattr(sympy_parser, "compile", released_program.compile_checked, raising=False)
        for parse in (
            recorder.guarded,
            sympy_parser.parse_expr,
            lambda text: sympy_parser.parse_expr(text, evaluate=False),
        ):
            with contextlib.suppress(Exception):
                parse(text)
    assert recorder.ran == []


@pytest.mark.parametrize("text", ["1+2", "[1, 2]", "(1, -2.5e3)", "abs(-3) + pow(2, 3)", "1 < 2"])
def test_arithmetic_is_evaluated(text):
    assert evaluate(text) == eval(text)


def test_sympy_reads_formulas_as_before(monkeypatch):
    texts = ("2*x+1", "sqrt(2)/2", "f(x)+1", "1/3+pi", "sin(x)**2", "5!", "Matrix([[1,2],[3,4]])", "x<3", "2.50*y")
    before = [[sympy.parse_expr(text, evaluate=flag) for flag in (True, False)] for text in texts]
    monkeypatch.setattr(sympy_parser, "eval", evaluate, raising=False)
    monkeypatch.setattr(sympy_parser, "compile", released_program.compile_checked, raising=False)
    assert [[sympy_parser.parse_expr(text, evaluate=flag) for flag in (True, False)] for text in texts] == before


@pytest.mark.parametrize("text", CASES["no expression"])
def test_other_trees_are_refused(text):
    with pytest.raises((NotArithmetic, SyntaxError)):
        evaluate(text)
    with pytest.raises(NotArithmetic, match="too deep"):
        evaluate("-" * 150 + "1")


@pytest.mark.parametrize(("text", "code"), CASES["code"])
def test_what_counts_as_code(text, code):
    assert has_code(text) is code
