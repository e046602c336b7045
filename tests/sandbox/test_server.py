"""Tests of the HTTP service: access, request size, a full queue, closed connections and shutdown."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.sandbox import SandboxClient
from rstar_lab.sandbox.access import LOOPBACK_HOST, check_exposure
from rstar_lab.sandbox.launch import serving

JSON = {"Content-Type": "application/json"}
MARK = "call-of-test"
RENAME = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{MARK}')\n"  # names the process of the program
SLEEP = RENAME + "import time\ntime.sleep({})\nprint('slept')"


def running(service):
    """Return how many running programs have executed RENAME."""
    count = 0
    for process in psutil.Process(service["pid"]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            count += process.name() == MARK
    return count


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "myhost"])
def test_addresses_other_than_loopback_require_a_token(host):
    with pytest.raises(UserError, match="token is required: set RSTAR_LAB_SANDBOX_TOKEN"):
        check_exposure(host, None)
    check_exposure(host, "0123456789abcdef")


def test_a_short_token_is_rejected():
    with pytest.raises(UserError, match="at least 16 characters"):
        check_exposure("127.0.0.1", "secret")


@pytest.mark.slow
def test_serve_refuses_to_start_without_a_token(monkeypatch, capfd):
    monkeypatch.delenv("RSTAR_LAB_SANDBOX_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="did not start"), serving("serve", "--host", "0.0.0.0", "--port", "0"):
        pass
    assert "a token is required" in capfd.readouterr().err


@pytest.mark.slow
def test_an_error_names_the_port_in_use(service, capfd):
    port = service["url"].rsplit(":", 1)[1]
    with pytest.raises(RuntimeError, match="did not start"), serving("serve", "--port", port):
        pass
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.slow
async def test_requests_without_the_token_are_rejected(monkeypatch):
    token = "0123456789abcdef0123456789abcdef"
    monkeypatch.setenv("RSTAR_LAB_SANDBOX_TOKEN", token)
    with serving("serve", "--no-token", "--port", "0", "--workers", "1") as ready:
        for given in (None, "Bearer", "Bearer wrong", token, f"Basic {token}", f"Bearer {token}x", f"bearer {token}"):
            headers = {"Authorization": given} if given else {}
            async with httpx.AsyncClient(base_url=ready["url"], headers=headers, trust_env=False) as http:
                assert (await http.get("/ping")).json() == "pong"
                for path in ("/status", "/docs", "/openapi.json"):
                    assert (await http.get(path)).status_code == 401, (given, path)
                reply = await http.post("/run", json={"type": "python", "solution": "1"})
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        async with SandboxClient(ready["url"]) as client:
            assert (await client.run("print(1)")).stdout == "1\n"
        async with SandboxClient(ready["url"], "another token, a wrong one") as client:
            with pytest.raises(UserError, match="wrong token"):
                await client.run("print(1)")


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--no-token"]], ids=["own token", "no token"])
def test_the_command_that_serve_prints_runs_a_program(tmp_path, option):
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    command = [sys.executable, "-m", "rstar_lab.cli", "sandbox", "serve", "--port", "0", "--workers", "1", *option]
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    state = {"XDG_STATE_HOME": str(tmp_path / "a state")}
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | state)
    try:
        lines = iter(served.stdout.readline, "")
        address = next(line for line in lines if line.startswith("sandbox: ")).split()[1]
        shown = next(line for line in lines if line.startswith("try: "))
        done = subprocess.run(["bash", "-c", shown.removeprefix("try: ")], capture_output=True, text=True, timeout=60)
        assert '"stdout":"42\\n"' in done.stdout.replace(" ", ""), done.stderr
        welcome = httpx.get(address, trust_env=False).json()
        assert f"curl {address}/run" in welcome["try"] and ("TOKEN" in welcome["try"]) == (not option)
    finally:
        served.terminate()
        served.wait(60)


def test_a_guessed_request_is_told_where_one_that_works_is_shown(http):
    reply = http.post("/run", json={"code": "print(1)"})
    assert reply.status_code == 422 and "GET /" in reply.json()["help"]
    assert "print(6 * 7)" in http.get("/").json()["try"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [(b"localhost:80", True), (b"127.0.0.1", True), (b"[::1]:9", True), (b"evil.example", False), (b"", False),
     (b"127.0.0.1.evil.example:80", False), (b"localhost.evil.example", False)],
)  # fmt: skip
def test_loopback_names_are_recognised(host, loopback):
    assert bool(LOOPBACK_HOST.fullmatch(host)) == loopback


def test_a_web_page_cannot_reach_a_service_without_token(http):
    assert http.get("/status", headers={"Host": "evil.example"}).status_code == 400
    body = json.dumps({"type": "python", "solution": "1"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert http.post("/run", content=body, headers={"Content-Type": kind}).status_code == 415


def test_a_too_large_request_is_rejected_before_it_is_read(service):
    with connect(service) as client:
        head = "POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def connect(service):
    host, port = service["url"].removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.slow
def test_a_too_large_chunked_request_is_rejected(http):
    def endless():
        while True:
            yield b" " * (1 << 20)

    try:
        assert http.post("/run", content=endless(), headers=JSON).status_code == 413
    except httpx.WriteError:  # the service closed the connection instead of reading on
        pass
    assert http.get("/ping").json() == "pong"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"type": "python"}', b'{"solution": "1"}',
        b'{"type": "python", "solution": 1}', b'{"type": "python", "solution": NaN}',
        b'{"calls": []}', b'{"calls": [{"code": "1", "seed": ' + b"9" * 5000 + b"}]}",
        b'{"calls": [{"code": "1", "timeout_s": Infinity}]}', b'{"calls": [{"code": "1", "timeout_s": -1}]}',
        b'{"calls": [{"code": "1", "unknown": 1}]}', b'{"calls": [{"kind": "x", "code": "1"}]}',
        b'{"calls": [{"code": "1", "session": ""}]}', b'{"calls": [{"code": "1", "memory_mb": 1e400}]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/run", "/judge/long-batch", "/run_code", "/calls"])
def test_invalid_requests_are_rejected_with_a_reason(http, path, body):
    reply = http.post(path, content=body, headers=JSON)
    assert reply.status_code in (400, 422), reply.text
    assert reply.json()["detail"]


def test_output_that_json_cannot_encode_is_returned(http):
    code = b'{"type": "python", "solution": "print(ascii(input()))\\n\'\\ud800\'", "input": "a\\udcff\\u0000b"}'
    result = http.post("/run", content=code, headers=JSON).json()
    assert result["outcome"] != "sandbox_error"
    printed = http.post(
        "/run", json={"type": "python", "solution": "import sys\nsys.stdout.buffer.write(b'a\\xff\\x00b')"}
    )
    assert printed.status_code == 200 and printed.json()["stdout"].startswith("a")


def test_an_error_names_the_limit_above_its_maximum(http):
    lines = http.post(
        "/calls", json={"calls": [{"code": "1", "timeout_s": 1e6}, {"code": "print(2)"}]}
    ).text.splitlines()
    wrong, right = sorted(map(json.loads, lines), key=lambda line: line["index"])
    assert wrong["outcome"] == "invalid_arguments" and "timeout_s" in wrong["stderr"]
    assert right["stdout"] == "2\n"


@pytest.mark.slow
def test_results_are_streamed_as_calls_end(http):
    calls = [{"code": SLEEP.format(1)}, {"code": "print('at once')"}]
    with http.stream("POST", "/calls", json={"calls": calls}) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert [(line["index"], line["stdout"]) for line in lines] == [(1, "at once\n"), (0, "slept\n")]


def test_openapi_and_docs_are_served(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/ping", "/status", "/run", "/run/batch", "/run/long-batch", "/judge", "/judge/batch", "/judge/long-batch",
            "/run_code", "/calls"} <= set(paths)  # fmt: skip
    assert http.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/run", "/calls"])
def test_calls_of_a_closed_connection_are_ended(http, service, path):
    call = {"code": RENAME + "while True: pass", "timeout_s": 600}
    body = {"calls": [call] * 3} if path == "/calls" else {"type": "python", "solution": SLEEP.format(600)}
    with connect(service) as client:
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        client.sendall(head.encode() + text)
        wait_until(lambda: running(service) > 0)
    wait_until(lambda: running(service) == 0)
    assert http.post("/run", json={"type": "python", "solution": "print(1)"}).json()["stdout"] == "1\n"


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
async def test_a_full_queue_returns_retry_after_and_loses_no_calls():
    with serving("serve", "--no-token", "--port", "0", "--workers", "1", "--max-queue", "4") as ready:
        async with httpx.AsyncClient(base_url=ready["url"], timeout=60, trust_env=False) as http:
            body = {"type": "python", "solution": SLEEP.format(0.3)}
            replies = await asyncio.gather(*(http.post("/run", json=body) for _ in range(16)))
        codes = [reply.status_code for reply in replies]
        assert set(codes) == {200, 429} and codes.count(200) >= 4
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status_code == 429)
        assert all(reply.json()["stdout"] == "slept\n" for reply in replies if reply.status_code == 200)
        async with SandboxClient(ready["url"]) as client:
            results = await asyncio.gather(*(client.run(f"print({number})") for number in range(24)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(24)]


@pytest.mark.slow
def test_sigterm_finishes_calls_and_rejects_new_ones():
    with serving("serve", "--no-token", "--port", "0", "--workers", "2") as ready:
        replies = []

        def ask():
            replies.append(httpx.post(ready["url"] + "/run", json={"type": "python", "solution": SLEEP.format(1.5)}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: running(ready) == 2)
        os.kill(ready["pid"], signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert [reply.json()["stdout"] for reply in replies] == ["slept\n"] * 2
        with pytest.raises(httpx.TransportError):
            httpx.get(ready["url"] + "/ping")
        assert ready["wait"](30) == 0


@pytest.mark.slow
def test_calls_longer_than_the_drain_are_sandbox_errors():
    with serving(
        "serve", "--no-token", "--port", "0", "--workers", "1", "--time-limit", "100", "--drain", "1"
    ) as ready:
        replies = []
        body = {"type": "python", "solution": RENAME + "while True: pass"}
        thread = threading.Thread(
            target=lambda: replies.append(httpx.post(ready["url"] + "/run", json=body, timeout=60))
        )
        thread.start()
        wait_until(lambda: running(ready) == 1)
        os.kill(ready["pid"], signal.SIGTERM)
        thread.join(30)
        assert [(reply.json()["reason"], reply.json()["outcome"]) for reply in replies] == [
            ("internal_error", "sandbox_error")
        ]
        assert ready["wait"](30) == 0
