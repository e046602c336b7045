"""The reward `tests`: programs on hidden test cases, in the sandbox of the run."""

import json
import shutil

import pytest
from helpers.cases import read_cases
from helpers.rollouts import roll_out
from helpers.scripted_training import recipe_of

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.resolved import check_answers, resolve
from rstar_lab.rl.reward import HiddenTests
from rstar_lab.rl.reward.hidden_tests import final_program, same_output, same_value
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.session import RunSession, needs_sandbox
from rstar_lab.rl.trajectory import StopReason
from rstar_lab.sandbox import LocalSandbox
from rstar_lab.sandbox.call import CallResult

CASES = read_cases(__file__, "programs.yaml")
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
TESTS = [{"input": f"{i} {i + 1}\n", "output": f"{2 * i + 1}\n"} for i in range(10)]


def problem(tests=TESTS, **info):
    return Problem(problem_id="p", question="Add two numbers.", info={"tests": tests} | info)


def answer(source, language="python"):
    return f"I add.</reason>\n<answer>\n```{language}\n{source}```\n</answer>"


async def test_a_rollout_is_graded_in_the_sandbox_of_the_run():
    """End to end through the session: prompt, rollout, sandbox, metrics, and retry of what the sandbox failed at."""
    recipe = recipe_of([], reward="tests", tools=[])
    assert needs_sandbox(recipe)
    tokenizer = train_tokenizer(["text"], 300)
    async with RunSession.open(resolve(recipe), Reporter()) as session:
        codec = Codec(tokenizer, {}, recipe.rl.prompt_style)
        assert "hidden test cases" in tokenizer.decode(codec.prompt_ids("Add two numbers."))
        for source, reward, share in (
            (ADD, 1.0, 1.0),
            (ADD.replace("a + b", "a + b if a < 9 else 0"), 0.0, 0.9),
            ("print(1)\n", 0.0, 0.1),
        ):
            trajectory = await roll_out(answer(source), reward=session.reward, rl=recipe.rl, problem=problem())
            assert (trajectory.reward, trajectory.metrics["tests_passed"]) == (reward, pytest.approx(share))


FUNCTIONS = {
    answer("def f(x, y=2):\n    return {'sum': [x + y, (1.0,)]}\n"): 1.0,
    answer("class Solution:\n    def f(self, x: int, y: List[int] = 2):\n        print(0)\n        return {'sum': [x + y, [1]]}\n"): 1.0,
    answer("def f(x):\n    return None\n"): 0.0,
    answer("def g(x):\n    return x\n"): 0.0,
    answer("print('{}')\nraise SystemExit\n"): 0.0,
    "no program": 0.0,
}  # fmt: skip
PROGRAMS = {
    "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b; }\n": 1.0,
    "int main() {\n": 0.0,
}


async def test_functions_and_cpp_programs_run_on_the_tests():
    tests = [
        {"input": "[1]", "output": json.dumps({"sum": [3, [1.0]]})},
        {"input": "[1, 4]", "output": '{"sum": [5, [1]]}'},
    ]
    async with LocalSandbox(workers=2) as sandbox:
        reward = HiddenTests(sandbox.run_many)
        for text, expected in FUNCTIONS.items():
            assert (await reward.score_rollout(text, problem(tests, function="f")))[0] == expected, text
        for source, expected in PROGRAMS.items() if shutil.which("g++") else ():
            assert (await reward.score_rollout(answer(source, "cpp"), problem(TESTS[:2])))[0] == expected, source


async def test_a_failure_of_the_sandbox_is_retried_and_then_undecided():
    """A failed sandbox is never a wrong answer; a second attempt counts."""
    broken, fine = (CallResult(o, "3", "", None, 0.0) for o in (Outcome.SANDBOX_ERROR, Outcome.OK))
    replies = [[broken], [fine]]

    async def run(calls):
        return replies.pop(0) if replies else [broken for _ in calls]

    tests = [{"input": "", "output": "3"}]
    assert (await HiddenTests(run).score_rollout(answer("print(3)\n"), problem(tests)))[0] == 1.0
    rl = recipe_of([], reward="tests").rl
    trajectory = await roll_out(answer("print(3)\n"), reward=HiddenTests(run), rl=rl, problem=problem(tests))
    assert trajectory.stop_reason is StopReason.UNDECIDED and not trajectory.usable


@pytest.mark.parametrize(("printed", "expected", "same"), CASES["outputs"])
def test_outputs_are_compared_by_words_and_numbers(printed, expected, same):
    assert same_output(printed, expected) is same


def test_values_are_compared_as_json():
    assert same_value([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}]) and not same_value([1], [1, 2])
    assert not same_value(1.5, 1) and not same_value("1", 1) and same_value(None, None)
    assert not same_value(10**400, 1.5) and same_value(float("inf"), float("inf")), "beyond floating-point numbers"


@pytest.mark.parametrize(("text", "program"), CASES["last block"])
def test_the_last_block_of_the_answer_is_the_program(text, program):
    assert final_program(text) == (program and tuple(program))


def test_problems_without_tests_or_answers_are_refused():
    with pytest.raises(UserError, match=r"problem p: rl.reward: tests requires info.tests"):
        check_answers([Problem(problem_id="p", question="q", answer="1")], recipe_of([], reward="tests").rl)
    with pytest.raises(UserError, match=r"problem p has no answer, which rl.reward: verify requires"):
        check_answers([problem()], recipe_of([]).rl)
    with pytest.raises(UserError, match="not stored with rollouts"):
        HiddenTests()("text", "answer")


HARNESS = {
    "names": ("class Solution:\n    def f(self, x: int) -> str:\n        return string.ascii_lowercase[operator.add(x, 0)]\n",
              "f", '"b"', 1.0),
    "recursion": ("def g(n):\n    return 0 if n == 0 else 1 + g(n - 1)\nprint(g(5000) + 0 * deepcopy(1))\n", None, "5000", 1.0),
    "numpy": ("import numpy as np\nclass Solution:\n    def f(self, x):\n        return [np.int64(x), np.array([x])]\n",
              "f", "[1, [1]]", 1.0),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass N:\n    v: int\n    n: 'N' = None\n"
        "class Solution:\n    def f(self, x):\n        return N(x).v\n", "f", "1", 1.0,
    ),
    "digits": ("print(10**5000)\n", None, "1" + "0" * 5000, 1.0),
    "digits of a function": ("class Solution:\n    def f(self, x):\n        return 10**5000\n", "f", "1" + "0" * 5000, 1.0),
    "other digits": ("class Solution:\n    def f(self, x):\n        return 10**5000 + 1\n", "f", "1" + "0" * 5000, 0.0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HARNESS)
async def test_programs_have_the_names_and_limits_of_livecodebench(name):
    source, function, output, expected = HARNESS[name]
    info = {"tests": [{"input": "1" if function is None else "[1]", "output": output}]} | (
        {"function": function} if function else {}
    )
    async with LocalSandbox() as sandbox:

        async def run(calls):
            return [await sandbox.run_call(call) for call in calls]

        reward, _ = await HiddenTests(run).score_rollout(
            answer(source), Problem(problem_id="p", question="q", info=info)
        )
    assert reward == expected


@pytest.mark.parametrize(("text", "language"), CASES["program"])
def test_where_a_program_is_found(text, language):
    assert final_program(text) == (language, "x\n")
