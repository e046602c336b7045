"""Tests of `rstar-lab sandbox top` and of the events in /metrics."""

import json
import os
import signal

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.soak import sandbox_parts
from rstar_lab.cli.sandbox import app
from rstar_lab.errors import UserError
from rstar_lab.sandbox.launch import serving
from rstar_lab.sandbox.top import Snapshot, fetch, quantile, rates

PAGE = """
rstar_lab_sandbox_call_seconds_bucket{{le="0.01",outcome="ok"}} {fast}
rstar_lab_sandbox_call_seconds_bucket{{le="1.0",outcome="ok"}} {all}
rstar_lab_sandbox_call_seconds_bucket{{le="+Inf",outcome="ok"}} {all}
rstar_lab_sandbox_call_seconds_count{{outcome="ok"}} {all}
rstar_lab_sandbox_call_seconds_sum{{outcome="ok"}} 3.0
rstar_lab_sandbox_in_flight 7.0
rstar_lab_sandbox_events_total{{event="retry"}} 2.0
"""


def test_rates_are_computed_between_two_pages():
    before = Snapshot.parse(PAGE.format(fast=10, all=10), 100.0)
    values = rates(before, Snapshot.parse(PAGE.format(fast=100, all=110), 105.0))
    assert values["calls_per_s"] == 20 and values["by_outcome"] == {"ok": 20}
    assert (values["p50_s"], values["p99_s"]) == (0.01, 1.0)
    assert values["in_flight"] == 7 and values["events"] == {"retry": 2}


def test_quantile_without_calls_is_none():
    assert quantile({}, 0.5) is None and quantile({0.1: 0.0}, 0.5) is None


def test_a_service_that_does_not_answer_is_an_error():
    with pytest.raises(UserError, match="cannot read the metrics"):
        fetch("http://127.0.0.1:9", None, 0.0)


@pytest.mark.slow
def test_top_shows_calls_and_failures_of_a_service(monkeypatch):
    monkeypatch.delenv("RSTAR_LAB_SANDBOX_TOKEN", raising=False)
    with (
        serving("serve", "--port", "0", "--workers", "1") as service,
        httpx.Client(base_url=service["url"], timeout=60, trust_env=False) as http,
    ):
        codes = ["1", "1 / 0", "x ="]
        assert http.post("/calls", json={"calls": [{"code": code} for code in codes]}).status_code == 200
        for supervisor in sandbox_parts(service["pid"])["supervisor"]:
            os.kill(supervisor, signal.SIGSTOP)
            os.kill(supervisor, signal.SIGKILL)
        assert http.post("/run", json={"type": "python", "solution": "print(1)"}).json()["success"]
        http.post("/calls", json={"calls": [{"code": "x = 1", "session": "a"}]})
        http.post("/calls", json={"calls": [{"kind": "fork", "session": "a", "n": 2}]})
        done = CliRunner().invoke(app, ["top", service["url"], "--interval", "0.1", "--count", "1", "--json"])
        values = json.loads(done.stdout)
        page = Snapshot.parse(http.get("/metrics").text, 0.0)
    assert values["sessions"] == 3 and values["workers"] == 1 and values["events"]["session_forked"] == 2
    counts = {outcome: page.get("call_seconds_count", outcome) for outcome in ("exception", "syntax_error")}
    assert counts == {"exception": 1, "syntax_error": 1}
