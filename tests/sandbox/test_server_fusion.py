"""Tests of SandboxFusion's /run_code and of verl's client for it."""

import pytest


def run_code(http, code, language="python", **more):
    body = {"compile_timeout": 10, "run_timeout": 2, "memory_limit_MB": -1, "code": code, "stdin": None}
    reply = http.post("/run_code", json={**body, "language": language, "files": {}, "fetch_files": [], **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_finished_program_has_status_success(http):
    reply = run_code(http, "print(input())", stdin="a")
    assert (reply["status"], reply["message"], reply["compile_result"], reply["files"]) == ("Success", "", None, {})
    ran = reply["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"], ran["stderr"]) == ("Finished", 0, "a\n", "")
    assert 0 < ran["execution_time"] < 2


def test_a_failed_program_has_status_failed(http):
    reply = run_code(http, "print('before')\n1/0")
    assert reply["status"] == "Failed"
    ran = reply["run_result"]
    assert (ran["status"], ran["return_code"], ran["stdout"]) == ("Finished", 1, "before\n")
    assert "ZeroDivisionError" in ran["stderr"]


@pytest.mark.slow
def test_an_endless_program_has_status_time_limit_exceeded(http):
    reply = run_code(http, "import time\ntime.sleep(60)", run_timeout=1)
    assert (reply["status"], reply["run_result"]["status"], reply["run_result"]["return_code"]) == (
        "Failed", "TimeLimitExceeded", None,
    )  # fmt: skip


def test_unsupported_requests_are_rejected_with_a_reason(http):
    for name, value in (("files", {"a.bin": "YQ=="}), ("fetch_files", ["a"]), ("language", "rust")):
        reply = http.post("/run_code", json={"code": "1", "language": "python"} | {name: value})
        assert reply.status_code == 422 and reply.json()["detail"][0]["loc"] == ["body", name]


@pytest.mark.slow
def test_cpp_reports_compiler_and_program_separately(http):
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
def test_verls_client_can_read_the_response(service):
    sandbox_fusion = pytest.importorskip("verl.utils.reward_score.sandbox_fusion.utils")
    cases = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}
    url = service["url"] + "/run_code"
    add = "print(sum(map(int, input().split())))"
    results, metadata = sandbox_fusion.check_correctness(url, cases, add, timeout=2)
    assert (results, [item["status"] for item in metadata]) == ([True, False], ["success", "wrong_answer"])
    results, metadata = sandbox_fusion.check_correctness(url, cases, "1/0", timeout=2)
    assert (results, metadata[0]["status"]) == ([-2, -2], "runtime_error")
    results, metadata = sandbox_fusion.check_correctness(url, cases, "import time\ntime.sleep(60)", timeout=1)
    assert (results, metadata[0]["status"]) == ([-3, -3], "timeout")
