"""The reward of programs: 1 if the final program passes every hidden test case of its problem, else 0.

A problem has its tests in `info`: `{"tests": [{"input": text, "output": text}, ...]}` for programs that read stdin and
write stdout. With `"function": NAME`, inputs are JSON lists of arguments and outputs JSON values of that function, or of that
method of a class `Solution`. Source: strict accuracy of APPS (arXiv 2105.09938), the reward of rStar-Coder (arXiv 2505.21297).
Programs run in the sandbox of the run, which never contains the expected outputs.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.rl.problems import Problem
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.cpp import cpp_call, cpp_outcome
from rstar_lab.verify import Undecided

Runner = Callable[[Sequence[Call]], Awaitable[list[CallResult]]]

AT_ONCE = 8  # tests that run at the same time; after a failure, no further ones start
CPP_TIMEOUT_S = 10.0
# A fence opens a block behind a list mark, a quote mark, a tag or a few words that end in a colon; text may follow the closing one.
_OPENS = r"^([ \t]*)(?:(?:[-*+]|\d{1,3}[.)])[ \t]+|[^\n`~]{0,200}[>:*][ \t]*)?"
_FENCE = re.compile(_OPENS + r"(```|~~~)[ \t]*+([\w+]*+)[^\n`]*+\n(.*?)^[ \t]*\2", re.DOTALL | re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_CPP = re.compile(r"(?:cpp|c\+\+|cc|cxx)\d{0,2}")
_PYTHON = frozenset(("python", "python3", "py"))
_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(\.\d{0,300})?|(\.\d{1,300}))([eE][+-]?\d{1,3})?")
# What the harness of LiveCodeBench puts before each program.
_IMPORTS = """string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"""
PRELUDE = (
    "import sys\nsys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(0)\nfrom typing import *\n"
    + "".join(f"from {name} import *\n" for name in _IMPORTS.split())
    + "import " + ", ".join(_IMPORTS.split()) + "\nfrom builtins import *\n"
)  # fmt: skip
_CALL = """
import json, sys
sys.set_int_max_str_digits(0)
arguments = json.loads(sys.stdin.read())
module = sys.modules["program"] = type(sys)("program")  # dataclasses look for the module of a class
exec(PRELUDE, module.__dict__)
exec(compile(PROGRAM, "program.py", "exec"), module.__dict__)
names = module.__dict__
owner = names.get("Solution")
function = getattr(owner(), NAME) if hasattr(owner, NAME) else names[NAME]

def plain(value):
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")

result = json.dumps(function(*arguments), default=plain)
print()
print(result)
"""


def final_program(text: str) -> tuple[str, str] | None:
    """Return (language, source) of the final program of a response; None without one.

    The program is the last fenced code block after the last `<answer>`. If there is none, it is the last one of the text. Blocks
    that name Python or C++ come before others, which can be outputs. The language is `cpp` or `python`.

    Args:
        text: Text that the model generated, without tool output.
    """
    ends = [match.end() for match in _FENCE_END.finditer(text)]
    end = ends[-1] if ends else 0  # every block before it is closed, so the search takes linear time
    blocks = _FENCE.findall(text[text.rfind("<answer>") + 1 : end]) or _FENCE.findall(text[:end])
    if not blocks:
        return None
    named = [block for block in blocks if block[2].lower() in _PYTHON or _CPP.fullmatch(block[2].lower())]
    indent, _, tag, source = (named or blocks)[-1]
    lines = source.splitlines(keepends=True)
    if first := next((line for line in lines if line.strip()), ""):
        margin = first[: len(first) - len(first.lstrip(" \t"))]  # a block in a list has the indentation of its text
        if margin and (indent or all(line.startswith(margin) or not line.strip() for line in lines)):
            source = "".join(
                line.removeprefix(indent if indent and not line.startswith(margin) else margin) for line in lines
            )
    return "cpp" if _CPP.fullmatch(tag.lower()) else "python", source


def same_output(printed: str, expected: str) -> bool:
    """Return whether a program printed the expected text.

    Lines are compared without space at their ends, and without empty lines at the end. Words of a line must be equal, or equal
    numbers; if the expected number has a fraction, its error may be 1e-6, absolute or relative.

    Args:
        printed: Standard output of the program.
        expected: Expected output.
    """
    lines, truths = ([line.strip() for line in text.strip().splitlines()] for text in (printed, expected))
    return len(lines) == len(truths) and all(map(_same_line, lines, truths))


def _same_line(line: str, truth: str) -> bool:
    if line == truth:
        return True
    words, truths = line.split(), truth.split()
    return len(words) == len(truths) and all(map(_same_word, words, truths))


def _same_word(word: str, truth: str) -> bool:
    if word == truth:
        return True
    if not (_NUMBER.fullmatch(word) and (number := _NUMBER.fullmatch(truth))):
        return False
    if number[1] is None and number[2] is None and number[3] is None:
        return Decimal(word) == Decimal(truth)
    return _close(float(word), float(truth))


def _close(value: float, truth: float) -> bool:
    return abs(value - truth) <= 1e-6 * max(1.0, abs(truth))


def same_value(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; numbers with a fraction may have an error of 1e-6.

    Args:
        value: Value that a function returned.
        expected: Expected value.
    """
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in expected)
    if value == expected:
        return True
    try:
        return isinstance(expected, float) and isinstance(value, int | float) and _close(value, expected)
    except OverflowError:  # an integer beyond the range of floating-point numbers
        return False


def hidden_tests_of(problem: Problem) -> tuple[list[Mapping[str, str]], str | None]:
    """Return the test cases of a problem and the name of its function, or None.

    Args:
        problem: The problem.

    Raises:
        UserError: If `info` has no valid tests.
    """
    tests, function = problem.info.get("tests"), problem.info.get("function")
    valid = isinstance(tests, list) and tests and (function is None or (isinstance(function, str) and function))
    if not valid or not all(
        isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
        for test in tests  # type: ignore[union-attr]
    ):
        raise UserError(
            f"problem {problem.problem_id}: rl.reward: tests requires info.tests, a list of {{input, output}} with texts, and "
            "optionally info.function; `rstar-lab data prepare apps=FILE` (or taco, code_contests, livecodebench) writes them"
        )
    return tests, function  # type: ignore[return-value]


@dataclass(frozen=True)
class HiddenTests:
    """The reward `tests`. run: executes calls in the sandbox of the run; None: there is none, and scoring raises UserError."""

    run: Runner | None = None

    def __call__(self, response_text: str, answer: str) -> float:
        """Raise UserError: the text and the answer alone do not contain the tests."""
        raise UserError("rl.reward: tests requires the test cases of the problem, which are not stored with rollouts")

    async def score_rollout(self, text: str, problem: Problem, **_: object) -> tuple[float, dict[str, float]]:
        """Return the reward, and as metrics the share of tests that passed before the first failure ended the run of tests.

        Args:
            text: Text that the model generated.
            problem: The problem with its tests.

        Raises:
            UserError: If the problem has no valid tests, or without a sandbox.
            Undecided: If the sandbox failed twice on one test.
        """
        tests, function = hidden_tests_of(problem)
        if self.run is None:
            raise UserError("rl.reward: tests requires the sandbox of a run")
        program, passed = final_program(text), 0
        for start in range(0, len(tests) if program else 0, AT_ONCE):
            chunk = tests[start : start + AT_ONCE]
            assert program is not None
            results = await self._results([_call(*program, test["input"], function) for test in chunk])
            if program[0] == "cpp":
                results = list(map(cpp_outcome, results))
            # In a thread: outputs can have megabytes.
            outcomes = await asyncio.to_thread(lambda: [_passes(*pair, function) for pair in zip(results, chunk)])  # noqa: B023, B905
            passed += sum(outcomes)
            if not all(outcomes):
                break
        return float(passed == len(tests)), {"tests_passed": passed / len(tests)}

    async def _results(self, calls: Sequence[Call]) -> list[CallResult]:
        assert self.run is not None
        results = await self.run(calls)
        if failed := [i for i, result in enumerate(results) if result.outcome in INFRASTRUCTURE_FAILURES]:
            for i, result in zip(failed, await self.run([calls[i] for i in failed]), strict=True):
                results[i] = result
        for result in results:
            if result.outcome in INFRASTRUCTURE_FAILURES:
                raise Undecided(
                    f"the sandbox failed while it ran hidden tests ({result.outcome}): {result.stderr[-200:]}"
                )
        return results


def _call(language: str, source: str, stdin: str, function: str | None) -> Call:
    if language == "cpp":
        return cpp_call(source, stdin, run_timeout_s=CPP_TIMEOUT_S)
    if function is not None:
        source = f"PRELUDE = {PRELUDE!r}\nPROGRAM = {source!r}\nNAME = {function!r}\n{_CALL}"
    else:
        source = f"exec({PRELUDE!r})\nexec(compile({source!r}, 'program.py', 'exec'))"
    return Call(source, stdin, seed=0)


def _integer(digits: str) -> int | Decimal:
    """Return an integer of JSON; Python converts no text of more than 4,300 digits to an integer."""
    return int(digits) if len(digits) < 4_000 else Decimal(digits)


def _passes(result: CallResult, test: Mapping[str, str], function: str | None) -> bool:
    if result.outcome is not Outcome.OK:
        return False
    if function is None:
        return same_output(result.stdout, test["output"])
    try:
        texts = result.stdout.rstrip("\n").rpartition("\n")[2], test["output"]
        return same_value(*(json.loads(text, parse_int=_integer) for text in texts))
    except (ValueError, RecursionError):
        return False
