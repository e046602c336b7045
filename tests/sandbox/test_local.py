"""LocalSandbox: what a call gives back."""

import pytest

from rstar_lab.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox


@pytest.fixture
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=5), workers=2) as sandbox:
        yield sandbox


async def test_value_of_the_last_expression_is_echoed(sandbox):
    result = await sandbox.run("x = 6\nprint('hello')\nx * 7")
    assert (result.outcome, result.stdout, result.stderr, result.value) == (Outcome.OK, "hello\n", "", "42")


async def test_no_value_without_a_last_expression(sandbox):
    for code in ("x = 1", "None", "", "# nothing"):
        result = await sandbox.run(code)
        assert (result.outcome, result.value) == (Outcome.OK, None)


async def test_traceback_keeps_the_line_numbers_of_the_code(sandbox):
    result = await sandbox.run("from __future__ import annotations\n\ndef f():\n    1 / 0\n\nf()")
    assert result.outcome == Outcome.EXCEPTION
    assert "line 6, in <module>\n    f()" in result.stderr
    assert "line 4, in f\n    1 / 0" in result.stderr
    assert result.stderr.count("  File ") == 2
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("code", ["x = (", "return 1", "a\x00b", "'\ud800'", "(" * 10_000, "\tx\n  y"])
async def test_what_does_not_compile_is_a_syntax_error(sandbox, code):
    assert (await sandbox.run(code)).outcome == Outcome.SYNTAX_ERROR


async def test_run_many_keeps_the_order(sandbox):
    results = await sandbox.run_many([Call(f"print({i})") for i in range(40)])
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(40)]
