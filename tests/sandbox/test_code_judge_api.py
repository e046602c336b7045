"""Tests of code-judge's API: fields, meanings and reasons that its clients rely on."""

import base64
import shutil

import aiohttp
import pytest

from rstar_lab.sandbox import LocalSandbox
from rstar_lab.sandbox.code_judge import Submission, to_work, with_imports_shown
from rstar_lab.sandbox.cpp import cpp_call, cpp_outcome

FIELDS = {"sub_id", "success", "run_success", "cost", "reason", "stdout", "stderr"}
OURS = {"outcome", "value"}


def submit(http, path="/run", **submission):
    reply = http.post(path, json={"type": "python", **submission})
    assert reply.status_code == 200, reply.text
    return reply.json()


def submit_until_not_sandbox_error(http, **submission):
    """Submit again after `sandbox_error`, which means that the machine was too busy to run the call."""
    for _ in range(3):
        result = submit(http, **submission)
        if result["outcome"] != "sandbox_error":
            return result
    pytest.skip("THIS MACHINE IS TOO BUSY to give a call 2 s of CPU time")


def test_ping_and_status_equal_code_judges(http):
    assert http.get("/ping").json() == "pong"
    assert http.get("/status").json() == {"queue": 0, "num_workers": 2}


def test_run_has_code_judges_fields_and_outcome_and_value(http):
    result = submit(http, solution="print(input())", input="a", expected_output="a", sub_id="mine")
    assert set(result) == FIELDS | OURS
    assert result["sub_id"] == "mine" and result["stdout"] == "a\n" and result["stderr"] == ""
    assert (result["success"], result["run_success"], result["reason"]) == (True, True, "")
    assert 0 < result["cost"] < 2 and result["outcome"] == "ok"


def test_judge_omits_the_output(http):
    result = submit(http, "/judge", solution="print(1)")
    assert set(result) == (FIELDS | OURS) - {"stdout", "stderr"}
    assert result["sub_id"]


def test_a_missing_or_empty_sub_id_is_generated(http):
    ids = {submit(http, solution="", sub_id=given)["sub_id"] for given in (None, "")}
    assert len(ids) == 2 and "" not in ids


@pytest.mark.parametrize(
    ("code", "expected", "success", "run_success", "outcome"),
    [
        ("print('b')", "a", False, True, "ok"),
        ("print('  a  ')\n\n", "\na", True, True, "ok"),
        ("print('a')\n1/0", "a", False, False, "exception"),
        ("import sys\nprint('a')\nsys.exit(3)", "a", False, False, "exception"),
        ("import os\nos._exit(1)", None, False, False, None),
        ("import sys\nsys.exit(0)", None, True, True, "ok"),
        ("print('a'", None, False, False, "syntax_error"),
        ("input()", None, False, False, "exception"),
        ("", None, True, True, "ok"),
    ],
)
def test_success_requires_the_expected_output(http, code, expected, success, run_success, outcome):
    result = submit(http, solution=code, expected_output=expected)
    assert (result["success"], result["run_success"], result["reason"]) == (success, run_success, "")
    assert outcome is None or result["outcome"] == outcome


def test_the_last_expression_is_returned_as_value(http):
    result = submit(http, solution="x = 20\nx + 1")
    assert result["stdout"] == "" and result["value"] == "21"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(60)", "print('x', flush=True)\nwhile 1: pass"]
)
def test_an_endless_program_is_worker_timeout(http, code):
    result = submit_until_not_sandbox_error(http, solution=code)
    assert (result["reason"], result["outcome"]) == ("worker_timeout", "timeout")
    assert not result["success"] and not result["run_success"] and result["cost"] >= 1.9
    assert result["stdout"] == ("x\n" if "print" in code else "")


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"])
def test_results_of_a_batch_keep_the_order(http, path):
    submissions = [
        {"type": "python", "solution": f"print({number})", "expected_output": str(number), "sub_id": f"s{number}"}
        for number in range(9)
    ]
    submissions[4] = {"type": "python", "solution": "raise KeyError('k')", "sub_id": "s4"}
    reply = http.post(path, json={"type": "batch", "sub_id": "all", "submissions": submissions}).json()
    assert reply["sub_id"] == "all"
    assert [result["sub_id"] for result in reply["results"]] == [f"s{number}" for number in range(9)]
    assert [result["success"] for result in reply["results"]] == [number != 4 for number in range(9)]
    assert ("stdout" in reply["results"][0]) == path.startswith("/run")


def test_an_empty_batch_is_refused(http):
    assert http.post("/run/batch", json={"type": "batch", "submissions": []}).status_code == 422


@pytest.mark.parametrize("kind", ["java", None, 7])
def test_an_unknown_type_is_an_error_that_names_it(http, kind):
    reply = http.post("/run", json={"type": kind, "solution": "1"})
    assert reply.status_code == 422 and reply.json()["detail"][0]["loc"] == ["body", "type"]


CPP = "#include <iostream>\nint main() { std::string s; std::cin >> s; std::cout << s << std::endl; return %s; }"


@pytest.fixture
def cpp(http):
    result = submit(http, type="cpp", solution="int main() {}")
    if "g++" in result["stderr"]:
        pytest.skip("C++ IS NOT TESTED: g++ is not installed (`make services` installs it where it may)")
    return http


@pytest.mark.slow
def test_cpp_is_compiled_and_run(cpp):
    result = submit(cpp, type="cpp", solution=CPP % "0", input="word", expected_output="word")
    assert (result["success"], result["run_success"], result["stdout"], result["value"]) == (True, True, "word\n", None)
    failed = submit(cpp, type="cpp", solution=CPP % "3", input="word", expected_output="word")
    assert (failed["run_success"], failed["reason"], failed["outcome"]) == (False, "", "exception")


@pytest.mark.slow
def test_cpp_compiler_errors_name_the_line(cpp):
    result = submit(cpp, type="cpp", solution="int main() { return x; }")
    assert (result["run_success"], result["outcome"]) == (False, "syntax_error")
    assert "source.cpp:1" in result["stderr"] and "x" in result["stderr"]


@pytest.mark.slow
def test_an_endless_cpp_program_is_worker_timeout(cpp):
    endless = "int main() { volatile long i = 0; for (;;) i++; }"
    result = submit_until_not_sandbox_error(cpp, type="cpp", solution=endless)
    assert (result["reason"], result["outcome"]) == ("worker_timeout", "timeout")


@pytest.mark.slow
def test_cpp_that_sleeps_ends_at_its_time_limit(cpp):
    """The time limit of the service is 2 s."""
    result = submit(cpp, type="cpp", solution="#include <unistd.h>\nint main() { sleep(10); return 0; }")
    assert result["reason"] == "worker_timeout"
    assert 1.9 < result["cost"] < 3.5


@pytest.mark.parametrize(
    ("solution", "answer", "right"),
    [
        ("42", "42", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\boxed{\\frac{1}{2}}", "1/2", True),
        ("41", "42", False),
        ("some thought</reason><answer>it is \\boxed{\\sqrt{8}}</answer>", "2\\sqrt{2}", True),
        ("\\boxed{7}</reason><answer>I do not know</answer>", "7", False),
        ("", "7", False),
    ],
)
def test_math_compares_answers(http, solution, answer, right):
    result = submit(http, type="math", solution=solution, expected_output=answer)
    assert (result["success"], result["run_success"], result["outcome"]) == (right, True, "ok")
    assert result["value"] == str(right)


def test_math_can_require_a_complete_response(http):
    bare = {"type": "math", "solution": "so \\boxed{7}", "expected_output": "7"}
    assert submit(http, **bare)["success"]
    assert not submit(http, **bare, options={"as": "response"})["success"]


@pytest.mark.slow
def test_a_pathological_answer_does_not_delay_others(http):
    tower = {"type": "math", "solution": "9^{9^{9^{9^9}}}", "expected_output": "1/3"}
    honest = {"type": "math", "solution": "\\frac{2}{6}", "expected_output": "1/3"}
    reply = http.post("/judge/long-batch", json={"submissions": [tower, *[honest] * 8]}, timeout=30).json()
    assert [result["success"] for result in reply["results"]] == [False] + [True] * 8
    assert max(result["cost"] for result in reply["results"]) < 5


@pytest.mark.parametrize("broken", [{"expected_output": None}, {"expected_output": "1", "options": {"as": "x"}}])
def test_an_invalid_math_submission_is_invalid_input(http, broken):
    result = submit(http, type="math", solution="1", **broken)
    assert (result["reason"], result["outcome"], result["run_success"]) == ("invalid_input", "invalid_arguments", False)


@pytest.mark.slow
async def test_requests_of_the_releases_client_are_answered(service):
    """The client posts batches to /run/long-batch with aiohttp, matches results by order and requires `reason`."""
    submissions = [
        {"type": "python", "solution": "print(input())", "input": "word"},
        {"type": "python", "solution": "import os, sys\nprint('no', file=sys.stderr)\nos._exit(1)", "input": None},
        {"type": "python", "solution": "import time\ntime.sleep(60)", "input": ""},
    ]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        body = {"type": "batch", "submissions": submissions}
        async with session.post(f"{service['url']}/run/long-batch", json=body) as response:
            assert response.status == 200
            results = (await response.json())["results"]
    returned = [(r["run_success"] and r["success"], r["reason"], r["stdout"], r["stderr"]) for r in results]
    assert returned == [(True, "", "word\n", ""), (False, "", "", "no\n"), (False, "worker_timeout", "", "")]
    assert all(isinstance(result["cost"], float) for result in results)


@pytest.mark.parametrize("padding", ["", "#", "##"])
def test_imports_in_base64_programs_are_recognised(padding):
    """The release's client encodes programs. Without the hint, importing sympy would count as time of the program."""
    inner = base64.b64encode(f"{padding}\nimport sympy\nprint(sympy.pi)".encode()).decode()
    wrapped = f"import base64\nexec(base64.b64decode('{inner}'))"
    shown = with_imports_shown(wrapped)
    assert shown.startswith(wrapped) and shown.endswith("\n# sympy")
    assert with_imports_shown("import base64\nprint(1)") == "import base64\nprint(1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome"), [("SIGKILL", "killed"), ("SIGXCPU", "exception"), ("SIGTERM", "exception")]
)
async def test_cpp_that_sends_itself_a_signal_did_not_run_out_of_time(number, outcome):
    if shutil.which("g++") is None:
        pytest.skip("requires g++")
    source = f"#include <csignal>\nint main() {{ raise({number}); }}"
    async with LocalSandbox(workers=1) as sandbox:
        result = cpp_outcome(await sandbox.run_call(cpp_call(source, "", run_timeout_s=2.0)))
        assert result.outcome == outcome


async def test_the_graders_of_the_release_are_importable_in_the_judge():
    """The programs that the reward manager of microsoft/rStar sends, without further packages."""
    program = """
from fused_compute_score import compute_score
import base64
solution_str = base64.b64decode("{}".encode()).decode()
ground_truth = base64.b64decode("{}".encode()).decode()
result = compute_score(solution_str, ground_truth)

print(f"<result>{{result}}</result>")
"""
    pairs = {
        ("so \\boxed{\\frac{1}{2}}", "0.5"): "1.0",
        ("so \\boxed{7}", "8"): "0.0",
        ("<answer>\\boxed{8}", "8"): "1.0",
    }
    async with LocalSandbox(workers=1) as sandbox:
        for texts, expected in pairs.items():
            code = program.format(*(base64.b64encode(text.encode()).decode() for text in texts))
            result = await sandbox.run_call(to_work(Submission(type="python", solution=code), 4.0))
            assert (result.stdout, result.outcome) == (f"<result>{expected}</result>\n", "ok"), result.stderr
