"""Fuzz tests: no input stops the service, causes a server error or leaks resources."""

import json
import os
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
QUICK = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


OPERATIONS = [("GET", "/"), ("GET", "/ping"), ("GET", "/status"), ("POST", "/run"), ("POST", "/run/batch"),
              ("POST", "/run/long-batch"), ("POST", "/judge"), ("POST", "/judge/batch"), ("POST", "/judge/long-batch"),
              ("POST", "/run_code"), ("POST", "/calls")]  # fmt: skip


@pytest.fixture(scope="module")
def schema(service):
    import schemathesis

    return schemathesis.openapi.from_url(service["url"] + "/openapi.json")


def test_all_documented_operations_are_fuzzed(schema):
    documented = {(result.ok().method.upper(), result.ok().path) for result in schema.get_all_operations()}
    assert documented == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_documented_requests_get_documented_responses(service, schema, method, path):
    from schemathesis import checks

    @QUICK
    @given(case=schema[path][method].as_strategy())
    def ask(case):
        response = case.call(base_url=service["url"], timeout=60)
        case.validate_response(
            response,
            checks=[
                checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )

    ask()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["type", "solution", "input", "expected_output", "options", "sub_id", "submissions", "calls", "code", "stdin",
          "seed", "timeout_s", "memory_mb", "session", "kind", "language", "run_timeout", "files", "path"]  # fmt: skip
BODIES = st.binary(max_size=60) | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8).map(
    lambda value: json.dumps(value).encode()
)
PATHS = ["/run", "/judge", "/run/batch", "/judge/long-batch", "/run_code", "/calls"]


@settings(QUICK, max_examples=80)
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_no_request_body_causes_a_server_error(service, path, body):
    with httpx.Client(base_url=service["url"], timeout=60, trust_env=False) as http:
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500, reply.text
    assert '"sandbox_error"' not in reply.text


@settings(QUICK, max_examples=30)
@given(code=st.text(st.characters(codec=None), max_size=40), stdin=st.text(st.characters(codec=None), max_size=20))
def test_no_program_causes_an_infrastructure_failure(service, code, stdin):
    with httpx.Client(base_url=service["url"], timeout=60, trust_env=False) as http:
        calls = [{"code": code, "stdin": stdin}, {"code": "print('neighbour')"}]
        body = json.dumps({"calls": calls}).encode()
        reply = http.post("/calls", content=body, headers={"Content-Type": "application/json"})
    results = {line["index"]: line for line in map(json.loads, reply.text.splitlines())}
    assert set(results) == {0, 1} and results[1]["stdout"] == "neighbour\n"
    assert results[0]["outcome"] not in ("sandbox_error", "queue_timeout")


def test_fuzzing_leaks_no_processes_or_descriptors(service, http):
    pid = service["pid"]

    def held():
        return len(os.listdir(f"/proc/{pid}/fd")), sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())  # noqa: PTH208

    for _ in range(2):  # the first round fills the pools
        before = held()
        for _ in range(30):
            http.post("/run", json={"type": "python", "solution": "1/0"})
            http.post("/run", content=b"{", headers={"Content-Type": "application/json"})
    files, threads = (after - then for after, then in zip(held(), before, strict=True))
    assert files <= 3 and threads <= 2
    assert http.get("/status").json() == {"queue": 0, "num_workers": 2}
