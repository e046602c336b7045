"""SandboxFusion's /run_code, and verl's own client of it."""

import pytest


def run_code(http, code, language="python", **more):
    body = {"compile_timeout": 10, "run_timeout": 2, "memory_limit_MB": -1, "code": code, "stdin": None}
    reply = http.post("/run_code", json={**body, "language": language, "files": {}, "fetch_files": [], **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_program_that_ends(http):
    reply = run_code(http, "print(input())", stdin="a")
    assert (reply["status"], reply["message"], reply["compile_result"], reply["files"]) == ("Success", "", None, {})
    ran = reply["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"], ran["stderr"]) == ("Finished", 0, "a\n", "")
    assert 0 < ran["execution_time"] < 2


def test_a_program_that_fails(http):
    reply = run_code(http, "print('before')\n1/0")
    assert reply["status"] == "Failed"
    ran = reply["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"]) == ("Finished", 1, "before\n")
    assert "ZeroDivisionError" in ran["stderr"]


def test_a_program_that_never_ends(http):
    reply = run_code(http, "import time\ntime.sleep(60)", run_timeout=1)
    assert (reply["status"], reply["run_result"]["status"], reply["run_result"]["return_code"]) == (
        "Failed", "TimeLimitExceeded", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("language", "more", "word"),
    [
        ("rust", {}, "'rust'"),
        ("python", {"files": {"a": "YQ=="}}, "files"),
        ("python", {"fetch_files": ["a"]}, "files"),
    ],
)
def test_what_is_not_served_is_said(http, language, more, word):
    reply = run_code(http, "1", language, **more)
    assert reply["status"] == "SandboxError" and word in reply["message"]


@pytest.mark.slow
def test_cpp_tells_compiler_and_program_apart(http):
    works = run_code(http, '#include <cstdio>\nint main() { puts("hi"); return 2; }', "cpp")
    if works["status"] == "SandboxError":
        assert "g++ is not installed" in works["message"]
        pytest.skip("C++ IS NOT TESTED: g++ is not installed (`make services` installs it where it may)")
    assert (works["status"], works["compile_result"]["return_code"]) == ("Failed", 0)
    assert works["run_result"]["stdout"] == "hi\n"
    wrong = run_code(http, "int main() { return x; }", "cpp")
    assert (wrong["status"], wrong["run_result"]) == ("Failed", None)
    assert wrong["compile_result"]["return_code"] == 1 and "x" in wrong["compile_result"]["stderr"]


@pytest.mark.slow
def test_verls_own_client_understands_it(service):
    sandbox_fusion = pytest.importorskip("verl.utils.reward_score.sandbox_fusion.utils")
    cases = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}
    url = service["url"] + "/run_code"
    add = "print(sum(map(int, input().split())))"
    results, told = sandbox_fusion.check_correctness(url, cases, add, timeout=2)
    assert (results, [item["status"] for item in told]) == ([True, False], ["success", "wrong_answer"])
    results, told = sandbox_fusion.check_correctness(url, cases, "1/0", timeout=2)
    assert (results, told[0]["status"]) == ([-2, -2], "runtime_error")
    results, told = sandbox_fusion.check_correctness(url, cases, "import time\ntime.sleep(60)", timeout=1)
    assert (results, told[0]["status"]) == ([-3, -3], "timeout")
