"""Values that the driver of C++ programs does not write."""

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.cpp import commands, cpp_outcome
from rstar_lab.sandbox.sandbox_fusion import RunCodeRequest, to_response


@pytest.mark.parametrize(
    "value",
    ["(((", "7", "('a', 'b')", "((1, 2, 3, 4), None)", "(('x', 1.0, ''), None)", "[" * 5000, "f(1)", None, "((0, 1e999), None)",
     "((0, 'x'), None)", "((0, None), None)"],
)  # fmt: skip
def test_an_unreadable_value_is_a_program_that_failed(value):
    result = CallResult(Outcome.OK, "", "", value, 0.0)
    assert cpp_outcome(result).outcome is Outcome.EXCEPTION and commands(result)[0] is not None
    response = to_response(RunCodeRequest(code="", language="cpp"), result)
    assert (response.outcome, response.status) == (Outcome.EXCEPTION, "Failed")


def test_a_written_value_is_read():
    result = CallResult(Outcome.OK, "", "", "((0, 1.5, ''), (0, 0.1))", 0.0)
    assert cpp_outcome(result).outcome is Outcome.OK
