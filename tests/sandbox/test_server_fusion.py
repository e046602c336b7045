"""Tests of SandboxFusion's /run_code and of verl's client for it."""

import base64

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


@pytest.mark.parametrize(
    ("language", "more", "word"),
    [
        ("rust", {}, "'rust'"),
        ("python", {"files": {"a.bin": "YQ="}}, "'a.bin': binascii.Error"),
        ("python", {"files": {"/etc/a": "YQ=="}}, "/etc/a"),
    ],
)
def test_unsupported_requests_are_rejected_with_a_reason(http, language, more, word):
    reply = run_code(http, "1", language, **more)
    assert reply["status"] == "SandboxError" and word in reply["message"]


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_files_are_written_before_and_fetched_after_the_program(http):
    every_byte = bytes(range(256))
    code = """
import helper
data = open("in/data.bin", "rb").read()
open("out.bin", "wb").write(data[::-1])
log = open("log.txt", "w")
log.write("never closed")
print(helper.WORD, len(data), input())
"""
    files = {"in/data.bin": base64_of(every_byte), "helper.py": base64_of(b"WORD = 'hello'"), "none": None}
    names = ["out.bin", "log.txt", "/tmp/none", "none", "in"]
    reply = run_code(http, code, stdin="read", files=files, fetch_files=names)
    assert (reply["status"], reply["message"], reply["run_result"]["stdout"]) == ("Success", "", "hello 256 read\n")
    assert reply["files"] == {"out.bin": base64_of(every_byte[::-1]), "log.txt": base64_of(b"never closed")}


def test_files_of_a_program_that_failed_are_fetched(http):
    code = "open('a', 'w').write('a')\nwhile True: pass"
    reply = run_code(http, code, run_timeout=0.5, fetch_files=["a"])
    assert (reply["run_result"]["status"], reply["files"]) == ("TimeLimitExceeded", {"a": "YQ=="})
    gone = run_code(http, "import os\nopen('a', 'w').write('a')\nos._exit(1)", fetch_files=["a"])
    assert (gone["status"], gone["run_result"]["return_code"], gone["files"]) == ("Failed", -9, {})
    assert "ended its interpreter" in gone["message"] and gone["run_result"]["stderr"] == ""


def test_files_that_are_too_large_to_fetch_are_named(http):
    code = "open('small', 'w').write('a')\nopen('large', 'w').write('a' * 10**6)"
    reply = run_code(http, code, fetch_files=["large", "small"])
    assert reply["files"] == {"small": "YQ=="} and "['large'] left out" in reply["message"]


def test_an_unreadable_file_does_not_lose_the_others(http):
    code = "import os\nopen('a', 'w').write('a')\nopen('locked', 'w').write('b')\nos.chmod('locked', 0)"
    reply = run_code(http, code, fetch_files=["locked", "bad\0name", "a"])
    assert reply["files"] == {"a": "YQ=="}
    assert "'locked'" in reply["message"] and "PermissionError" in reply["message"]


def test_a_program_cannot_forge_fetched_files(http):
    lies = [
        "[1, 2]",
        '[{"a": 1}, {}]',
        '[{"a": null}, {}]',
        '[{"a": "YQ="}, {}]',
        '[{"b": "YQ=="}, {}]',
        "[[], {}]",
        "[" * 10_000,
    ]
    for lie in lies:
        code = f"import json\njson.dump = lambda thing, out: out.write({lie!r})"
        reply = run_code(http, code, fetch_files=["a"])
        assert (reply["status"], reply["files"]) == ("Success", {}), lie


def sessions(http) -> str:
    return next(
        line for line in http.get("/metrics").text.splitlines() if line.startswith("rstar_lab_sandbox_sessions")
    )


def test_files_and_sessions_are_removed_afterwards(http):
    before = sessions(http)  # sessions of other tests
    for _ in range(2):
        code = "import os\nprint(os.listdir())\nopen('mine', 'w').close()"
        assert run_code(http, code, fetch_files=["mine"])["run_result"]["stdout"] == "[]\n"
    assert sessions(http) == before


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
    header, code = base64_of(b'const char *word = "hi";'), '#include <fstream>\n#include "word.h"\n'
    staged = run_code(
        http,
        code + 'int main() { std::ofstream("out") << word; }',
        "cpp",
        files={"word.h": header},
        fetch_files=["out"],
    )
    assert (staged["status"], staged["files"]) == ("Success", {"out": base64_of(b"hi")})


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
