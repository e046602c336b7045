"""Tests of `rstar-lab monitor`, and that dashboard and alerts use only metrics that exist."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from helpers.run_rows import rows
from prometheus_client.parser import text_string_to_metric_families

from rstar_lab.cli.exporter import GAUGES, make_exporter, serve_metrics
from rstar_lab.common.errors import UserError
from rstar_lab.common.service_tokens import find_token
from rstar_lab.runs import RunWriter
from rstar_lab.sandbox import http_limits
from rstar_lab.sandbox.access import listen
from rstar_lab.sandbox.service import Service

MONITORING = Path(__file__).parents[1] / "cluster" / "monitoring"
LAST = {"correct": 0.5, "mismatch": 1e-6, "eval/held_out/pass1": 0.25, "reward": None, "loss": float("nan")}


@pytest.fixture
def runs_dir(tmp_path):
    writer = RunWriter.open(tmp_path / "runs", "alive", kind="train", recipe={}, seed=0)
    writer.write_step("one", 1, **rows(1), metrics={"correct": 0.1})
    writer.write_step("one", 2, **rows(2), metrics=LAST)
    with RunWriter.open(tmp_path / "runs", "done", kind="train", recipe={}, seed=0) as finished:
        finished.finish("finished")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "run.json").write_text("{")
    yield tmp_path / "runs"
    writer.close()


def scrape(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers)


@pytest.fixture
def serve():
    servers = []

    def start(runs_dir, token) -> str:
        server, listener = make_exporter(runs_dir, token), listen("127.0.0.1", 0)
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        servers.append((server, thread))
        thread.start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    yield start
    for server, thread in servers:
        server.should_exit = server.force_exit = True
        thread.join()


def test_the_last_step_of_every_run_is_exported(runs_dir, serve):
    page = scrape(serve(runs_dir, None)).text
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    samples = {(sample.name, sample.labels["run"]): sample.value for sample in found}
    assert samples["rstar_lab_run_running", "alive"] == 1 and samples["rstar_lab_run_running", "done"] == 0
    assert samples["rstar_lab_run_step", "alive"] == 2
    metrics = {sample.labels["name"]: sample.value for sample in found if "name" in sample.labels}
    assert metrics == {"correct": 0.5, "mismatch": 1e-6, "eval_held_out_pass1": 0.25}
    assert ("rstar_lab_run_step", "done") not in samples, "a run without a step has no last step"


def test_connections_and_heads_are_limited_before_the_token(runs_dir, serve, monkeypatch):
    monkeypatch.setattr(http_limits, "HEADER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http_limits, "MAX_STRANGERS", 64)
    token = "0123456789abcdef"
    url = serve(runs_dir, token)
    address = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    idle = [socket.create_connection(address, timeout=10) for _ in range(84)]
    assert scrape(url, Authorization=f"Bearer {token}").status_code == 200
    assert idle[0].recv(1) == b"", "the oldest is closed"
    with socket.create_connection(address, timeout=10) as connection:
        sent = 0
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /metrics HTTP/1.0\r\n")
            while sent < 64 << 20:
                connection.sendall(b"a: b\r\n" * 1000)
                sent += 6000
        assert sent < 20 << 20
    for connection in idle[1:]:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "without a head within the time limit"
        connection.close()


def test_a_token_is_required_beyond_this_machine(runs_dir, serve):
    with pytest.raises(UserError, match="token is required: set RSTAR_LAB_MONITOR_TOKEN"):
        serve_metrics(runs_dir, "0.0.0.0", 0, None, print)
    token = "0123456789abcdef"
    url = serve(runs_dir, token)
    assert scrape(url).status_code == 401 and scrape(url, Authorization="Bearer wrong").status_code == 401
    assert scrape(url, Authorization=f"Bearer {token}").status_code == 200
    assert scrape(serve(runs_dir, None), Host="attacker.example").status_code == 400


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(runs_dir):
    command = [sys.executable, "-m", "rstar_lab.cli", "monitor", "--runs-dir", str(runs_dir), "--port", "0"]
    # A background job of a shell starts with SIGINT ignored, and its children inherit that.
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    }
    with subprocess.Popen(command, text=True, **options) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert 'rstar_lab_run_running{run="alive"} 1.0' in scrape(url, Authorization=f"Bearer {find_token(url)}").text
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 130


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:rstar_lab_|vllm:)\w+", expression)) - {"rstar_lab_"}


def test_every_query_uses_metrics_that_exist():
    sandbox = Service(SimpleNamespace(gauges={}, events={}), max_calls=1, max_bytes=1)
    exported = set(GAUGES) | {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    for family in sandbox.registry.collect():
        exported |= {family.name + suffix for suffix in ("", "_count", "_sum", "_bucket", "_total")}
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    queries = {panel["title"]: [t["expr"] for t in panel["targets"]] for panel in dashboard["panels"]}
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries |= {rule["alert"]: [rule["expr"]] for rule in rules}
    for title, expressions in queries.items():
        for expression in expressions:
            used = names_in(expression)
            assert used <= exported, f"{title}: {used - exported} is not exported"
            assert used or expression.startswith("up{")
    # Names of step metrics are those that trainers write.
    source = "\n".join(path.read_text() for path in (Path(__file__).parents[1] / "rstar_lab" / "rl").rglob("*.py"))
    for name in re.findall(r'name="(\w+)"', json.dumps(queries).replace("\\", "")):
        assert f'"{name}"' in source or f"{name}=" in source or name.startswith("scheduler_"), (
            f"no trainer writes {name}"
        )
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}) == len(
        dashboard["panels"]
    )
